"""The arena's bookkeeping: one int32 array that holds every KV byte, cut into slabs of blocks of one kind.

Kinds are the plan's: hot and cold blocks of every cache group, numbered as in `kvcache.plan.Counts`. A slab is a run
of bytes that is, at any moment, free, or cut into slots of one kind (KIVI-2: 3 hot or 16 cold blocks fill the same
bytes exactly). A slab that empties is free again, so the split between the kinds follows the load; nobody has to
guess it. Offsets are in units of 64 bytes, so that int32 reaches 128 GiB.

When the slots left would do but lie scattered over half-empty slabs of other kinds, blocks are moved together:
`compact` empties a slab and says which blocks moved, the caller copies the bytes and mends its block tables. Because
of that, whether an allocation can succeed is a plain formula (`fits`), with no bad luck in it.

The arena knows neither the array nor sequences. Each slot carries an opaque `owner`, which `compact` hands back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvattention import UNIT_WORDS
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import added

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowkv.kvcache.plan import CachePlan, Counts

Owner = TypeVar("Owner")
UNIT = 4 * UNIT_WORDS  # bytes per offset unit: 64

_MAX_UNITS = 2**31 - 1
_MAX_LARGEST_SLOTS = 16  # a larger slab would round better and strand more
_WASTE_GOAL = 0.005


@dataclass(frozen=True)
class Cut:
    """One way to cut a slab: into `slots` blocks of `units` x 64 bytes."""

    units: int
    slots: int


@dataclass(frozen=True)
class SlabGeometry:
    """The ways to cut a slab, one for every kind of block."""

    cuts: tuple[Cut, ...]

    @classmethod
    def for_plan(cls, plan: CachePlan) -> SlabGeometry:
        """The smallest slab that wastes at most half a percent whichever way it is cut, or the least wasteful one.

        Tried are multiples of the largest block, and what blocks of another kind make of them when they stand out.
        """
        units = [size // UNIT for size in plan.block_bytes]
        best: SlabGeometry | None = None
        for multiple in range(1, _MAX_LARGEST_SLOTS + 1):
            least = multiple * max(units)
            for slab in sorted({-(-least // unit) * unit for unit in units}):
                geometry = cls(tuple(Cut(unit, slab // unit) for unit in units))
                if geometry.waste <= _WASTE_GOAL:
                    return geometry
                if best is None or geometry.waste < best.waste:
                    best = geometry
        assert best is not None
        return best

    @property
    def units(self) -> int:
        """Units of a slab: the largest of its cuts."""
        return max(cut.units * cut.slots for cut in self.cuts)

    @property
    def bytes(self) -> int:
        return self.units * UNIT

    @property
    def waste(self) -> float:
        """Share of a slab's bytes that the worst of its cuts leaves unused."""
        return 1 - min(cut.units * cut.slots for cut in self.cuts) / self.units

    def slabs_for(self, counts: Counts) -> int:
        """Fewest slabs that hold so many blocks of every kind."""
        return sum(-(-count // cut.slots) for count, cut in zip(counts, self.cuts, strict=True))


@dataclass
class _Slab:
    kind: int
    free: list[int]  # slot indices, last one next
    used: int = 0


class Arena(Generic[Owner]):
    """Slab bookkeeping over one array. Not thread-safe: the serving engine's step thread owns it."""

    def __init__(self, geometry: SlabGeometry, budget: int) -> None:
        """`budget` in bytes; the array never exceeds it. Raises `LowkvError` when not even one slab fits."""
        self.geometry = geometry
        self.budget = budget
        self.slabs = budget // geometry.bytes
        if self.slabs < 1:
            raise LowkvError(
                "kv_cache.budget holds not even one slab of blocks",
                got=f"{budget} bytes",
                expected=f"at least {geometry.bytes} bytes",
                fix="raise kv_cache.budget",
            )
        if self.slabs * geometry.units > _MAX_UNITS:
            raise LowkvError(
                "kv_cache.budget is beyond what 32-bit block offsets reach",
                got=f"{budget} bytes",
                expected=f"at most {_MAX_UNITS * UNIT} bytes",
                fix="lower kv_cache.budget, or run more replicas",
            )
        self._slab_units = geometry.units
        self._state: list[_Slab | None] = [None] * self.slabs
        self._free_slabs = list(range(self.slabs - 1, -1, -1))
        # For each kind: its slabs by how many slots are taken, so that the fullest with room is filled first.
        self._filed: list[list[set[int]]] = [[set() for _ in range(cut.slots + 1)] for cut in geometry.cuts]
        self._owners: dict[int, Owner] = {}
        self.used = [0] * len(geometry.cuts)
        """Allocated blocks of every kind."""

    # -- questions ---------------------------------------------------------------------------------------

    def fits(self, counts: Counts) -> bool:
        """True when that many more blocks of every kind can be allocated, compaction included. Exact."""
        return self.geometry.slabs_for(added(self.used, counts)) <= self.slabs

    @property
    def bytes_used(self) -> int:
        """Bytes of allocated blocks."""
        return UNIT * sum(used * cut.units for used, cut in zip(self.used, self.geometry.cuts, strict=True))

    @property
    def bytes_total(self) -> int:
        """Bytes of the array: the budget rounded down to whole slabs."""
        return self.slabs * self.geometry.bytes

    # -- allocate / free ---------------------------------------------------------------------------------

    def has_room(self, counts: Counts) -> bool:
        """True when that many blocks of every kind can be allocated without moving anything."""
        lacking = tuple(max(0, count - self._loose_slots(kind)) for kind, count in enumerate(counts))
        return self.geometry.slabs_for(lacking) <= len(self._free_slabs)

    def allocate(self, kind: int, owner: Owner) -> int:
        """Takes a slot and returns its offset in 64-byte units. IndexError unless `has_room` said so."""
        index = self._fullest_with_room(kind)
        if index is None:
            index = self._free_slabs.pop()
            self._state[index] = _Slab(kind, list(range(self.geometry.cuts[kind].slots - 1, -1, -1)))
        slab = self._slab(index)
        slot = slab.free.pop()
        self._refile(index, slab, +1)
        offset = self._offset(index, slab, slot)
        self._owners[offset] = owner
        self.used[kind] += 1
        return offset

    def free(self, offset: int) -> None:
        """Gives a slot back; its slab becomes free when it was the last one taken."""
        del self._owners[offset]
        index, rest = divmod(offset, self._slab_units)
        slab = self._slab(index)
        slab.free.append(rest // self.geometry.cuts[slab.kind].units)
        self.used[slab.kind] -= 1
        self._refile(index, slab, -1)
        if slab.used == 0:
            self._dissolve(index, slab)

    def compact(self, counts: Counts) -> tuple[int, list[tuple[int, int, Owner]]]:
        """Empties one slab towards room for that many blocks; call until `has_room`, only while `fits`.

        Returns the kind of the moved blocks and (old offset, new offset, owner) for each of them. No source
        overlaps a destination within one call; the caller copies before it calls again.
        """
        kind = next(
            kind
            for kind, (count, cut) in enumerate(zip(counts, self.geometry.cuts, strict=True))
            if self._loose_slots(kind) - count >= cut.slots
        )
        victim = next(index for bucket in self._filed[kind] for index in bucket)
        slab = self._slab(victim)
        taken = sorted(set(range(self.geometry.cuts[kind].slots)) - set(slab.free))
        self._filed[kind][slab.used].discard(victim)  # so that nothing is moved into the slab being emptied
        moves = []
        for slot in taken:
            old = self._offset(victim, slab, slot)
            owner = self._owners.pop(old)
            moves.append((old, self.allocate(kind, owner), owner))
        self.used[kind] -= len(moves)
        self._dissolve(victim, slab)
        return kind, moves

    # -- invariants --------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every slab and slot is free or owned exactly once. Raises AssertionError; run when idle and in tests."""
        free = set(self._free_slabs)
        assert len(free) == len(self._free_slabs), "a slab is free twice"
        counted = [0] * len(self.used)
        owned = set()
        for index, slab in enumerate(self._state):
            assert (slab is None) == (index in free), f"slab {index} is neither free nor cut"
            if slab is None:
                continue
            slots = self.geometry.cuts[slab.kind].slots
            assert 0 < slab.used == slots - len(set(slab.free)) == slots - len(slab.free), f"slab {index} miscounts"
            assert index in self._filed[slab.kind][slab.used], f"slab {index} is filed wrongly"
            counted[slab.kind] += slab.used
            owned |= {self._offset(index, slab, slot) for slot in set(range(slots)) - set(slab.free)}
        assert counted == self.used, f"blocks used: counted {counted}, booked {self.used}"
        assert owned == set(self._owners), "owners and taken slots differ"
        filed = sum(len(bucket) for buckets in self._filed for bucket in buckets)
        assert filed == self.slabs - len(free), "a slab is filed twice"

    def owners(self) -> Iterator[tuple[int, Owner]]:
        """(offset, owner) of every taken slot."""
        return iter(self._owners.items())

    # -- inside ------------------------------------------------------------------------------------------

    def _slab(self, index: int) -> _Slab:
        slab = self._state[index]
        assert slab is not None
        return slab

    def _offset(self, index: int, slab: _Slab, slot: int) -> int:
        return index * self._slab_units + slot * self.geometry.cuts[slab.kind].units

    def _loose_slots(self, kind: int) -> int:
        """Free slots in slabs already cut for `kind`."""
        slots = self.geometry.cuts[kind].slots
        return sum(len(bucket) * (slots - used) for used, bucket in enumerate(self._filed[kind]))

    def _fullest_with_room(self, kind: int) -> int | None:
        for bucket in reversed(self._filed[kind][:-1]):  # the last bucket holds full slabs
            if bucket:
                return next(iter(bucket))
        return None

    def _refile(self, index: int, slab: _Slab, change: int) -> None:
        buckets = self._filed[slab.kind]
        buckets[slab.used].discard(index)
        slab.used += change
        buckets[slab.used].add(index)

    def _dissolve(self, index: int, slab: _Slab) -> None:
        self._filed[slab.kind][slab.used].discard(index)
        self._state[index] = None
        self._free_slabs.append(index)
