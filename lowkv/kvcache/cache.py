"""Sequences in the arena: block tables, what a step writes where, sealing, compaction.

A step goes through three calls. `prepare` takes every block that the step will need (so nothing can run out in
the middle of it) and returns the `Step` that the kernels read. The executor then runs the model, calling
`attend` once per layer. `commit` seals what became older than the residual, frees the hot blocks it replaced and
books the new tokens.

    prepare                          attend (per layer)                    commit
    new hot blocks, cold blocks  ->  append to hot, encode whole new   ->  seal hot to cold, free hot,
    to seal into, block tables       blocks straight to cold, attend       drop blocks out of the window
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvattention import UNIT_WORDS, RaggedBatch
from lowkv.kvcache.arena import Arena, SlabGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvattention import Array, Attention
    from lowkv.calibration.scales import KVScales
    from lowkv.kvcache.arena import Kind
    from lowkv.kvcache.plan import CachePlan

_NO_BLOCK = -1


@dataclass(eq=False)
class SequenceCache:
    """One sequence's block table: `table[b]` is the offset of block b in 64-byte units, or -1."""

    tokens: int = 0  # stored so far
    dead_end: int = 0  # blocks before this one have left every window and were freed
    cold_end: int = 0  # blocks in [sink_blocks, cold_end) are cold
    table: NDArray[np.int32] = field(default_factory=lambda: np.full(16, _NO_BLOCK, np.int32))


@dataclass(frozen=True)
class Step:
    """What one forward pass does to the cache. Valid from `prepare` to `commit`."""

    work: Sequence[tuple[SequenceCache, int]]
    batch: RaggedBatch
    seals: Sequence[tuple[SequenceCache, int, int]]  # (sequence, block, cold offset to encode it into)


class KVCache:
    """All sequences' KV blocks in one arena of `budget` bytes."""

    def __init__(self, plan: CachePlan, budget: int, attention: Attention, scales: KVScales | None = None) -> None:
        """`scales`: of the 8-bit formats; None is all ones.

        Raises `LowkvError` when `budget` (bytes) is not even a slab, or beyond 128 GiB.
        """
        self.plan = plan
        self.attention = attention
        self.arena: Arena[tuple[SequenceCache, int]] = Arena(SlabGeometry.for_plan(plan), budget)
        self.words = attention.allocate(self.arena.bytes_total // 4)
        self.specs = plan.layer_specs(None if scales is None else scales.layers)
        self.sequences: set[SequenceCache] = set()
        self.moved_blocks = 0

    # -- sequences ---------------------------------------------------------------------------------------

    def add(self) -> SequenceCache:
        """A new, empty sequence; it owns no block yet."""
        sequence = SequenceCache(cold_end=self.plan.sink_blocks)
        self.sequences.add(sequence)
        return sequence

    def release(self, sequence: SequenceCache) -> None:
        """Frees all blocks of a sequence and forgets it."""
        self.sequences.remove(sequence)
        for block in range(sequence.dead_end, self.plan.blocks(sequence.tokens)):
            self.arena.free(int(sequence.table[block]))

    # -- steps -------------------------------------------------------------------------------------------

    def need(self, sequence: SequenceCache, count: int) -> tuple[int, int]:
        """(hot, cold) blocks to allocate for `count` more tokens of a sequence."""
        plan, past, total = self.plan, sequence.tokens, sequence.tokens + count
        stored, end = plan.blocks(past), plan.blocks(total)
        direct = len(self._direct(stored, total))
        sealed = len(self._to_seal(sequence, total))
        return end - stored - direct, direct + sealed

    def fits(self, hot: int, cold: int) -> bool:
        """True when that many blocks can be allocated now (moving blocks together if need be)."""
        return self.arena.fits(hot, cold)

    def prepare(self, work: Sequence[tuple[SequenceCache, int]]) -> Step:
        """Allocates all that a step over `work` = (sequence, new tokens > 0) needs.

        The scheduler has asked `fits` for the sum of `need`; RuntimeError when it has not.
        """
        needs = [self.need(sequence, count) for sequence, count in work]
        self._make_room(sum(hot for hot, _ in needs), sum(cold for _, cold in needs))
        seals: list[tuple[SequenceCache, int, int]] = []
        direct_ends = []
        for sequence, count in work:
            total = sequence.tokens + count
            stored, end = self.plan.blocks(sequence.tokens), self.plan.blocks(total)
            direct = self._direct(stored, total)
            self._widen(sequence, end)
            for block in range(stored, end):
                kind: Kind = "cold" if block in direct else "hot"
                sequence.table[block] = self.arena.allocate(kind, (sequence, block))
            seals += [
                (sequence, block, self.arena.allocate("cold", (sequence, block)))
                for block in self._to_seal(sequence, total)
            ]
            direct_ends.append(direct.stop)
        return Step(work, self._batch(work, direct_ends), seals)

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
        return self.attention.paged_attention(q, k, v, self.words, step.batch, self.specs[layer], out)

    def commit(self, step: Step) -> None:
        """Seals, frees and books what the step wrote."""
        if step.seals:
            pairs = np.array([(seq.table[block], cold) for seq, block, cold in step.seals], np.int32)
            self.attention.seal(self.words, pairs, self.specs)
            for sequence, block, cold in step.seals:
                self.arena.free(int(sequence.table[block]))
                sequence.table[block] = cold
        for sequence, count in step.work:
            sequence.tokens += count
            sequence.cold_end = self.plan.cold_end(sequence.tokens)
            dead_end = min(self.plan.dead_end(sequence.tokens), self.plan.blocks(sequence.tokens))
            for block in range(sequence.dead_end, dead_end):
                self.arena.free(int(sequence.table[block]))
                sequence.table[block] = _NO_BLOCK
            sequence.dead_end = max(sequence.dead_end, dead_end)

    def abandon(self, step: Step) -> None:
        """Undoes `prepare` when the step could not be run: frees what it allocated, books nothing."""
        for sequence, count in step.work:
            stored, end = self.plan.blocks(sequence.tokens), self.plan.blocks(sequence.tokens + count)
            for block in range(stored, end):
                self.arena.free(int(sequence.table[block]))
                sequence.table[block] = _NO_BLOCK
        for _, _, cold in step.seals:
            self.arena.free(cold)

    # -- invariants --------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Arena and block tables agree: every block is owned once, by the table entry that names it."""
        self.arena.check_integrity()
        named = {}
        for sequence in self.sequences:
            for block in range(sequence.dead_end, self.plan.blocks(sequence.tokens)):
                named[int(sequence.table[block])] = (sequence, block)
            resident = self.plan.resident(sequence.tokens)
            held = sum(1 for owner, _ in named.values() if owner is sequence)
            assert held == sum(resident), f"a sequence of {sequence.tokens} tokens holds {held} blocks, not {resident}"
        assert named == dict(self.arena.owners()), "block tables and arena disagree"

    # -- inside ------------------------------------------------------------------------------------------

    def _direct(self, stored: int, total: int) -> range:
        """Blocks that a step from `stored` blocks to `total` tokens writes straight to cold."""
        first = max(stored, self.plan.sink_blocks)
        return range(first, max(first, min(self.plan.cold_end(total), self.plan.blocks(total))))

    def _to_seal(self, sequence: SequenceCache, total: int) -> range:
        """Blocks that hold tokens already and become cold at `total` stored tokens, less those that die."""
        stored = self.plan.blocks(sequence.tokens)
        first = max(sequence.cold_end, self.plan.dead_end(total))
        return range(first, max(first, min(stored, self.plan.cold_end(total))))

    def _make_room(self, hot: int, cold: int) -> None:
        if not self.arena.fits(hot, cold):
            raise RuntimeError(f"no room for {hot} hot and {cold} cold blocks: ask `fits` before `prepare`")
        while not self.arena.has_room(hot, cold):
            kind, moves = self.arena.compact(hot, cold)
            pairs = np.array([(old, new) for old, new, _ in moves], np.int32)
            self.attention.move(self.words, pairs, self.arena.geometry.slot_units(kind) * UNIT_WORDS)
            for _, new, (sequence, block) in moves:
                sequence.table[block] = new
            self.moved_blocks += len(moves)

    def _widen(self, sequence: SequenceCache, blocks: int) -> None:
        width = len(sequence.table)
        if blocks > width:
            table = np.full(max(blocks, 2 * width), _NO_BLOCK, np.int32)
            table[:width] = sequence.table
            sequence.table = table

    def _batch(self, work: Sequence[tuple[SequenceCache, int]], direct_ends: Sequence[int]) -> RaggedBatch:
        counts = np.array([count for _, count in work], np.int32)
        past = np.array([sequence.tokens for sequence, _ in work], np.int32)
        width = max(self.plan.blocks(sequence.tokens + count) for sequence, count in work)
        table = np.full((len(work), width), _NO_BLOCK, np.int32)
        for row, (sequence, _) in enumerate(work):
            known = min(width, len(sequence.table))
            table[row, :known] = sequence.table[:known]
        query_start = np.zeros(len(work) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        return RaggedBatch(
            query_start=query_start,
            past=past,
            table=table,
            cold_begin=np.full(len(work), self.plan.sink_blocks, np.int32),
            cold_end=np.array([sequence.cold_end for sequence, _ in work], np.int32),
            direct_end=np.array(direct_ends, np.int32),
        )
