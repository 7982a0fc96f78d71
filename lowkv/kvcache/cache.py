"""Sequences in the arena: block tables, what a step writes where, sealing, compaction.

A step goes through three calls. `prepare` takes every block that the step will need (so nothing can run out in
the middle of it) and returns the `Step` that the kernels read. The executor then runs the model, calling
`attend` once per layer. `commit` seals what became older than the residual, frees the hot blocks it replaced and
books the new tokens.

    prepare                          attend (per layer)                    commit
    new hot blocks, cold blocks  ->  append to hot, encode whole new   ->  seal hot to cold, free hot,
    to seal into, block tables       blocks straight to cold, attend       drop blocks out of the window

All of it is done for every cache group of the plan, each with its own block tables over the one arena.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvattention import UNIT_WORDS, RaggedBatch
from lowkv.kvcache.arena import Arena, SlabGeometry
from lowkv.kvcache.plan import added

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvattention import Array, Attention
    from lowkv.calibration.scales import KVScales
    from lowkv.kvcache.plan import CacheGroup, CachePlan, Counts

_NO_BLOCK = -1


@dataclass(frozen=True)
class Change:
    """What a step does to a block table, in block indices."""

    new: range
    direct: range  # those of the new ones that are written straight to cold
    sealed: range  # hot ones that become cold when the step ends, less those that die
    cold_end: int  # blocks from the sink to this one are stored cold before the step

    @cached_property
    def need(self) -> tuple[int, int]:
        """(hot, cold) blocks to allocate."""
        direct = len(self.direct)
        return len(self.new) - direct, direct + len(self.sealed)


class BlockTable:
    """Where one sequence's blocks of one group lie: `offsets[b]` is that of block b in 64-byte units, or -1."""

    def __init__(self, group: CacheGroup) -> None:
        self.group = group
        self.offsets: NDArray[np.int32] = np.full(16, _NO_BLOCK, np.int32)
        self._filling = self._change(0, 0)

    def change(self, past: int, total: int) -> Change:
        """What growing from `past` stored tokens to `total` does."""
        block, inside = divmod(past, self.group.group_size)
        if not inside or inside + total - past >= self.group.group_size:
            return self._change(past, total)
        # The block that is being filled goes on being filled, as in most steps: nothing changes until it is full.
        if self._filling.new.stop != block + 1:
            self._filling = self._change(past, total)
        return self._filling

    def _change(self, past: int, total: int) -> Change:
        group = self.group
        stored, end = group.blocks(past), group.blocks(total)
        were_cold, cold_end = group.cold_end(past), group.cold_end(total)
        direct = max(stored, group.sink_blocks)
        sealed = max(were_cold, group.dead_end(total))
        return Change(
            new=range(stored, end),
            direct=range(direct, max(direct, min(cold_end, end))),
            sealed=range(sealed, max(sealed, min(cold_end, stored))),
            cold_end=were_cold,
        )

    def widen(self, blocks: int) -> None:
        """Makes room for that many blocks."""
        width = len(self.offsets)
        if blocks > width:
            offsets = np.full(max(blocks, 2 * width), _NO_BLOCK, np.int32)
            offsets[:width] = self.offsets
            self.offsets = offsets


@dataclass(eq=False)
class SequenceCache:
    """One sequence: how many tokens of it are stored, and a block table for every group."""

    tables: tuple[BlockTable, ...]
    tokens: int = 0

    def changes(self, count: int) -> list[Change]:
        """What `count` more tokens do to the tables."""
        return [table.change(self.tokens, self.tokens + count) for table in self.tables]


@dataclass(frozen=True)
class Step:
    """What one forward pass does to the cache. Valid from `prepare` to `commit`."""

    work: Sequence[tuple[SequenceCache, int]]
    batches: tuple[RaggedBatch, ...]  # one for every group: the same tokens, other blocks
    seals: tuple[list[tuple[BlockTable, int, int]], ...]  # per group (table, block, cold offset to encode it into)


class KVCache:
    """All sequences' KV blocks in one arena of `budget` bytes."""

    def __init__(self, plan: CachePlan, budget: int, attention: Attention, scales: KVScales | None = None) -> None:
        """`scales`: of the 8-bit formats; None is all ones.

        Raises `LowkvError` when `budget` (bytes) is not even a slab, or beyond 128 GiB.
        """
        self.plan = plan
        self.attention = attention
        self.arena: Arena[tuple[BlockTable, int]] = Arena(SlabGeometry.for_plan(plan), budget)
        self.words = attention.allocate(self.arena.bytes_total // 4)
        self.specs = plan.layer_specs(None if scales is None else scales.layers)
        self._specs_of = [[self.specs[layer] for layer in group.layers] for group in plan.groups]
        self.sequences: set[SequenceCache] = set()
        self.moved_blocks = 0

    # -- sequences ---------------------------------------------------------------------------------------

    def add(self) -> SequenceCache:
        """A new, empty sequence; it owns no block yet."""
        sequence = SequenceCache(tuple(BlockTable(group) for group in self.plan.groups))
        self.sequences.add(sequence)
        return sequence

    def release(self, sequence: SequenceCache) -> None:
        """Frees all blocks of a sequence and forgets it."""
        self.sequences.remove(sequence)
        for table in sequence.tables:
            self._free(table, table.group.alive(sequence.tokens))

    # -- steps -------------------------------------------------------------------------------------------

    def need(self, sequence: SequenceCache, count: int) -> Counts:
        """Blocks of every kind to allocate for `count` more tokens of a sequence."""
        return _needs(sequence.changes(count))

    def fits(self, counts: Counts) -> bool:
        """True when that many blocks can be allocated now (moving blocks together if need be)."""
        return self.arena.fits(counts)

    def prepare(self, work: Sequence[tuple[SequenceCache, int]]) -> Step:
        """Allocates all that a step over `work` = (sequence, new tokens > 0) needs.

        The scheduler has asked `fits` for the sum of `need`; RuntimeError when it has not.
        """
        changes = [sequence.changes(count) for sequence, count in work]
        self._make_room(added(*map(_needs, changes)))
        seals: tuple[list[tuple[BlockTable, int, int]], ...] = tuple([] for _ in self.plan.groups)
        for (sequence, _), made in zip(work, changes, strict=True):
            for table, change in zip(sequence.tables, made, strict=True):
                if not any(change.need):
                    continue
                group = table.group
                table.widen(change.new.stop)
                for block in change.new:
                    kind = group.cold if block in change.direct else group.hot
                    table.offsets[block] = self.arena.allocate(kind, (table, block))
                for block in change.sealed:
                    seals[group.index].append((table, block, self.arena.allocate(group.cold, (table, block))))
        return Step(work, self._batches(work, changes), seals)

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        step: Step,
        out: Array | None = None,
    ) -> Array:
        """Appends k, v [T, Hkv, D] to a layer's cache and attends with q [T, Hq, D]; returns [T, Hq, D]."""
        batch = step.batches[self.plan.group_of[layer]]
        return self.attention.paged_attention(q, k, v, self.words, batch, self.specs[layer], out)

    def commit(self, step: Step) -> None:
        """Seals, frees and books what the step wrote."""
        for seals, specs in zip(step.seals, self._specs_of, strict=True):
            if seals:
                pairs = np.array([(table.offsets[block], cold) for table, block, cold in seals], np.int32)
                self.attention.seal(self.words, pairs, specs)
                for table, block, cold in seals:
                    self.arena.free(int(table.offsets[block]))
                    table.offsets[block] = cold
        for sequence, count in step.work:
            past, sequence.tokens = sequence.tokens, sequence.tokens + count
            for table in sequence.tables:
                group = table.group
                self._free(table, range(group.dead_end(past), group.dead_end(sequence.tokens)))

    def abandon(self, step: Step) -> None:
        """Undoes `prepare` when the step could not be run: frees what it allocated, books nothing."""
        for sequence, count in step.work:
            for table, change in zip(sequence.tables, sequence.changes(count), strict=True):
                self._free(table, change.new)
        for seals in step.seals:
            for _, _, cold in seals:
                self.arena.free(cold)

    # -- invariants --------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Arena and block tables agree: every block is owned once, by the table entry that names it."""
        self.arena.check_integrity()
        named: dict[int, tuple[BlockTable, int]] = {}
        for sequence in self.sequences:
            for table in sequence.tables:
                alive = table.group.alive(sequence.tokens)
                named |= {int(table.offsets[block]): (table, block) for block in alive}
                held = np.flatnonzero(table.offsets != _NO_BLOCK).tolist()
                assert held == list(alive), f"a table of {sequence.tokens} tokens names blocks {held}, not {alive}"
        assert named == dict(self.arena.owners()), "block tables and arena disagree"
        resident = added(self.plan.no_blocks, *(self.plan.resident(sequence.tokens) for sequence in self.sequences))
        assert resident == tuple(self.arena.used), f"blocks held: {self.arena.used}, not {resident}"

    # -- inside ------------------------------------------------------------------------------------------

    def _free(self, table: BlockTable, blocks: range) -> None:
        for block in blocks:
            self.arena.free(int(table.offsets[block]))
            table.offsets[block] = _NO_BLOCK

    def _make_room(self, counts: Counts) -> None:
        if not self.arena.fits(counts):
            raise RuntimeError(f"no room for {counts} blocks: ask `fits` before `prepare`")
        while not self.arena.has_room(counts):
            kind, moves = self.arena.compact(counts)
            pairs = np.array([(old, new) for old, new, _ in moves], np.int32)
            self.attention.move(self.words, pairs, self.arena.geometry.cuts[kind].units * UNIT_WORDS)
            for _, new, (table, block) in moves:
                table.offsets[block] = new
            self.moved_blocks += len(moves)

    def _batches(
        self, work: Sequence[tuple[SequenceCache, int]], changes: Sequence[Sequence[Change]]
    ) -> tuple[RaggedBatch, ...]:
        query_start = np.zeros(len(work) + 1, np.int32)
        np.cumsum([count for _, count in work], out=query_start[1:])
        past = np.array([sequence.tokens for sequence, _ in work], np.int32)
        width = max(change.new.stop for change, *_ in changes)  # the same in every group
        batches = []
        for group in self.plan.groups:
            mine = [made[group.index] for made in changes]
            table = np.full((len(work), width), _NO_BLOCK, np.int32)
            for row, (sequence, _) in zip(table, work, strict=True):
                offsets = sequence.tables[group.index].offsets[:width]
                row[: len(offsets)] = offsets
            batches.append(
                RaggedBatch(
                    query_start=query_start,
                    past=past,
                    table=table,
                    cold_begin=np.full(len(work), group.sink_blocks, np.int32),
                    cold_end=np.array([change.cold_end for change in mine], np.int32),
                    direct_end=np.array([change.direct.stop for change in mine], np.int32),
                )
            )
        return tuple(batches)


def _needs(changes: Sequence[Change]) -> Counts:
    return tuple(count for change in changes for count in change.need)
