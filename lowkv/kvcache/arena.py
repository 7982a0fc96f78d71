"""The arena's bookkeeping: one int32 array that holds every KV byte, cut into slabs of hot or cold blocks.

A slab is a run of bytes that is, at any moment, free, or cut into `hot` slots, or cut into `cold` slots
(KIVI-2: 3 hot or 16 cold blocks fill the same bytes exactly). A slab that empties is free again, so the split
between hot and cold follows the load; nobody has to guess it. Offsets are in units of 64 bytes, so that int32
reaches 128 GiB.

When the slots left would do but lie scattered over half-empty slabs of the other kind, blocks are moved
together: `compact` empties a slab and says which blocks moved, the caller copies the bytes and mends its block
tables. Because of that, whether an allocation can succeed is a plain formula (`fits`), with no bad luck in it.

The arena knows neither the array nor sequences. Each slot carries an opaque `owner`, which `compact` hands back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from kvattention import UNIT_WORDS
from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowkv.kvcache.plan import CachePlan

Kind = Literal["hot", "cold"]
Owner = TypeVar("Owner")
UNIT = 4 * UNIT_WORDS  # bytes per offset unit: 64
KINDS: tuple[Kind, Kind] = ("hot", "cold")

_MAX_UNITS = 2**31 - 1
_MAX_HOT_SLOTS = 16  # a larger slab would round better and strand more
_WASTE_GOAL = 0.005


@dataclass(frozen=True)
class SlabGeometry:
    """How a slab is cut: `slots["hot"]` blocks of `units["hot"]` x 64 bytes, or the same for cold."""

    hot_units: int
    cold_units: int
    hot_slots: int
    cold_slots: int

    @classmethod
    def for_plan(cls, plan: CachePlan) -> SlabGeometry:
        """The smallest slab that wastes at most half a percent cut either way, or the least wasteful one.

        A plan that never seals gets slabs of one hot block.
        """
        hot, cold = plan.hot_block_bytes // UNIT, plan.cold_block_bytes // UNIT
        if not plan.seals:
            return cls(hot, hot, 1, 1)
        best: tuple[float, SlabGeometry] | None = None
        for hot_slots in range(1, _MAX_HOT_SLOTS + 1):
            for cold_slots in {max(1, hot_slots * hot // cold), -(-hot_slots * hot // cold)}:
                geometry = cls(hot, cold, hot_slots, cold_slots)
                if geometry.waste <= _WASTE_GOAL:
                    return geometry
                if best is None or geometry.waste < best[0]:
                    best = geometry.waste, geometry
        assert best is not None
        return best[1]

    @property
    def units(self) -> int:
        """Units of a slab: the larger of its two cuts."""
        return max(self.hot_slots * self.hot_units, self.cold_slots * self.cold_units)

    @property
    def bytes(self) -> int:
        return self.units * UNIT

    @property
    def waste(self) -> float:
        """Share of a slab's bytes that the worse of its two cuts leaves unused."""
        used = min(self.hot_slots * self.hot_units, self.cold_slots * self.cold_units)
        return 1 - used / self.units

    def slots(self, kind: Kind) -> int:
        return self.hot_slots if kind == "hot" else self.cold_slots

    def slot_units(self, kind: Kind) -> int:
        return self.hot_units if kind == "hot" else self.cold_units

    def slabs_for(self, hot: int, cold: int) -> int:
        """Fewest slabs that hold `hot` hot and `cold` cold blocks."""
        return -(-hot // self.hot_slots) + -(-cold // self.cold_slots)


@dataclass
class _Slab:
    kind: Kind
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
        self._state: list[_Slab | None] = [None] * self.slabs
        self._free_slabs = list(range(self.slabs - 1, -1, -1))
        # For each kind: its slabs by how many slots are taken, so that the fullest with room is filled first.
        self._filed: dict[Kind, list[set[int]]] = {
            kind: [set() for _ in range(geometry.slots(kind) + 1)] for kind in KINDS
        }
        self._owners: dict[int, Owner] = {}
        self.used: dict[Kind, int] = {"hot": 0, "cold": 0}

    # -- questions ---------------------------------------------------------------------------------------

    def fits(self, hot: int, cold: int) -> bool:
        """True when that many more blocks of each kind can be allocated, compaction included. Exact."""
        return self.geometry.slabs_for(self.used["hot"] + hot, self.used["cold"] + cold) <= self.slabs

    @property
    def bytes_used(self) -> int:
        """Bytes of allocated blocks."""
        return UNIT * (self.used["hot"] * self.geometry.hot_units + self.used["cold"] * self.geometry.cold_units)

    @property
    def bytes_total(self) -> int:
        """Bytes of the array: the budget rounded down to whole slabs."""
        return self.slabs * self.geometry.bytes

    # -- allocate / free ---------------------------------------------------------------------------------

    def has_room(self, hot: int, cold: int) -> bool:
        """True when that many blocks of each kind can be allocated without moving anything."""
        slabs = 0
        for kind, count in zip(KINDS, (hot, cold), strict=True):
            slabs += -(-max(0, count - self._loose_slots(kind)) // self.geometry.slots(kind))
        return slabs <= len(self._free_slabs)

    def allocate(self, kind: Kind, owner: Owner) -> int:
        """Takes a slot and returns its offset in 64-byte units. IndexError unless `has_room` said so."""
        index = self._fullest_with_room(kind)
        if index is None:
            index = self._free_slabs.pop()
            self._state[index] = _Slab(kind, list(range(self.geometry.slots(kind) - 1, -1, -1)))
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
        index, rest = divmod(offset, self.geometry.units)
        slab = self._slab(index)
        slab.free.append(rest // self.geometry.slot_units(slab.kind))
        self.used[slab.kind] -= 1
        self._refile(index, slab, -1)
        if slab.used == 0:
            self._dissolve(index, slab)

    def compact(self, hot: int, cold: int) -> tuple[Kind, list[tuple[int, int, Owner]]]:
        """Empties one slab towards room for that many blocks; call until `has_room`, only while `fits`.

        Returns the kind of the moved blocks and (old offset, new offset, owner) for each of them. No source
        overlaps a destination within one call; the caller copies before it calls again.
        """
        kind = next(
            kind
            for kind, count in zip(KINDS, (hot, cold), strict=True)
            if self._loose_slots(kind) - count >= self.geometry.slots(kind)
        )
        victim = next(index for bucket in self._filed[kind] for index in bucket)
        slab = self._slab(victim)
        taken = sorted(set(range(self.geometry.slots(kind))) - set(slab.free))
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
        counted: dict[Kind, int] = {"hot": 0, "cold": 0}
        owned = set()
        for index, slab in enumerate(self._state):
            assert (slab is None) == (index in free), f"slab {index} is neither free nor cut"
            if slab is None:
                continue
            slots = self.geometry.slots(slab.kind)
            assert 0 < slab.used == slots - len(set(slab.free)) == slots - len(slab.free), f"slab {index} miscounts"
            assert index in self._filed[slab.kind][slab.used], f"slab {index} is filed wrongly"
            counted[slab.kind] += slab.used
            owned |= {self._offset(index, slab, slot) for slot in set(range(slots)) - set(slab.free)}
        assert counted == self.used, f"blocks used: counted {counted}, booked {self.used}"
        assert owned == set(self._owners), "owners and taken slots differ"
        filed = sum(len(bucket) for buckets in self._filed.values() for bucket in buckets)
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
        return index * self.geometry.units + slot * self.geometry.slot_units(slab.kind)

    def _loose_slots(self, kind: Kind) -> int:
        """Free slots in slabs already cut for `kind`."""
        slots = self.geometry.slots(kind)
        return sum(len(bucket) * (slots - used) for used, bucket in enumerate(self._filed[kind]))

    def _fullest_with_room(self, kind: Kind) -> int | None:
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
