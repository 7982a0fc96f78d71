"""What the kernels of one step do, decided on the host: lists of int32 that every layer's launches read.

A launch's grid depends on the lengths of these lists and on nothing in them, so that a CUDA graph can be captured once
and replayed with other contents; `pad_schedule` fills lists up to the captured lengths with null items. A schedule
knows nothing of layers: windows and record offsets are applied inside the kernels.

Queries are cut into tiles. Row r of a tile is token ``r // gqa`` and head ``r % gqa`` of one KV head's group, so that a
tile reads its keys once for the whole group. A sequence of few new tokens (decode) gets narrow tiles, others wide ones.
Where a sequence has few tiles and a long history, the history is split into parts:

    stored blocks   | part 0 | part 1 | ... | last part + the step's own tokens |
                        |        |                   |
    partial rows    [ tile's rows ][ tile's rows ] ... [ tile's rows ]   --merge-->  out

How a sequence is cut depends on its own lengths only: its result never depends on who else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvattention.batch import RaggedBatch

Ints = NDArray[np.int32]

DIRECT = 1 << 30
"""Bit of an append's count: the block is new as a whole and is written straight to its cold record."""

NARROW = 16
WIDE = 64
MAX_PARTS = 32
PART_TOKENS = 256
"""Fewest stored tokens of a part: below, writing and merging partial results costs more than it gains."""


LISTS = ("sequences", "table", "appends", "narrow", "wide", "merges")
"""A schedule's arrays, in the order in which whoever passes them on does."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything is int32 and C-contiguous. An empty list is one null item long: TensorRT has no empty dimensions."""

    sequences: Ints  # [S, 4] past, cold_begin, cold_end, query_start
    table: Ints  # [S, B] as in RaggedBatch
    appends: Ints  # [A, 4] sequence, block, first, count (with DIRECT): one per block that the step writes
    narrow: Ints  # [W, 8] sequence, first, count, begin, end, own, row, 0
    wide: Ints  # [P, 8] the same
    merges: Ints  # [C, 4] token, row of its part 0, parts, rows from part to part
    rows: int
    """Partial rows in use."""

    # first and count are tokens within the sequence's new ones; begin and end are stored blocks. own: the part also
    # attends to the step's own tokens. row: the tile's first partial row, -1: the tile writes `out` itself.
    # Null items hold -1 in column 0.


def narrow_rows(gqa: int) -> int:
    """Rows of a narrow tile: at least one token's heads must fit."""
    return max(NARROW, next_power_of_2(gqa))


def wide_rows(gqa: int) -> int:
    return max(WIDE, next_power_of_2(gqa))


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def partial_rows(narrow: int, wide: int, gqa: int) -> int:
    """Most partial rows that ``narrow`` and ``wide`` tiles can use."""
    return narrow * narrow_rows(gqa) + wide * wide_rows(gqa)


def workspace_bytes(narrow: int, wide: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Bytes for partial results: float32 sums ``[rows, Hkv, D]``, then float32 (max, weight) ``[rows, Hkv, 2]``."""
    return 4 * partial_rows(narrow, wide, group_heads(heads, kv_heads)) * kv_heads * (head_dim + 2)


def group_heads(heads: int, kv_heads: int) -> int:
    """Query heads that share a KV head.

    Raises ValueError when they do not divide.
    """
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads: expected a multiple")
    return heads // kv_heads


def make_schedule(
    batch: RaggedBatch, heads: int, kv_heads: int, group_size: int, part_tokens: int = PART_TOKENS
) -> Schedule:
    """The lists of one step. ``part_tokens`` is smaller in tests only, so that small shapes split too.

    Raises ValueError for query heads that are not a multiple of the KV heads.
    """
    gqa = group_heads(heads, kv_heads)
    n, past = batch.lengths, batch.past
    narrow_tokens, wide_tokens = narrow_rows(gqa) // gqa, wide_rows(gqa) // gqa
    few = n <= narrow_tokens  # [S]
    tile_tokens = np.where(few, narrow_tokens, wide_tokens)
    tiles = -(-n // tile_tokens)
    stored = -(-past // group_size)  # blocks
    parts = np.maximum(np.minimum(past // part_tokens, MAX_PARTS // tiles), 1)
    part_blocks = -(-stored // parts)
    parts = np.maximum(-(-stored // np.maximum(part_blocks, 1)), 1)  # rounding up may have emptied the last ones

    s, index = _expand(tiles * parts)  # an item per (sequence, tile, part)
    tile, part = index // parts[s], index % parts[s]
    first = tile * tile_tokens[s]
    count = np.minimum(tile_tokens[s], n[s] - first)
    begin = part * part_blocks[s]
    end = np.minimum(begin + part_blocks[s], stored[s])
    own = part == parts[s] - 1
    split = parts[s] > 1
    size = np.where(split, count * gqa, 0)
    row = np.cumsum(size) - size
    items = _rows(s, first, count, begin, end, own, np.where(split, row, -1), 0)

    leaders = np.flatnonzero(split & (part == 0))  # one per split tile
    of, token = _expand(count[leaders])  # one per token of a split tile
    leader = leaders[of]
    merges = _rows(
        batch.query_start[s[leader]] + first[leader] + token,
        row[leader] + token * gqa,
        parts[s[leader]],
        size[leader],
    )
    return Schedule(
        sequences=_rows(past, batch.cold_begin, batch.cold_end, batch.query_start[:-1]),
        table=batch.table,
        appends=_or_null(_appends(batch, group_size)),
        narrow=_or_null(items[few[s]]),
        wide=_or_null(items[~few[s]]),
        merges=_or_null(merges),
        rows=int(size.sum()),
    )


def pad_schedule(schedule: Schedule, S: int, B: int, A: int, W: int, P: int, C: int) -> Schedule:
    """The same work in lists of the given lengths, filled up with null items.

    Raises ValueError when a list is longer than asked for.
    """
    shapes = {
        "sequences": (S, 4),
        "table": (S, B),
        "appends": (A, 4),
        "narrow": (W, 8),
        "wide": (P, 8),
        "merges": (C, 4),
    }
    padded = {}
    for name, shape in shapes.items():
        have: Ints = getattr(schedule, name)
        if have.shape[0] > shape[0] or have.shape[1] > shape[1]:
            raise ValueError(f"{name} is {have.shape}, which does not fit into {shape}")
        padded[name] = np.zeros(shape, np.int32)
        padded[name][:, 0] = 0 if name == "sequences" else -1
        if name == "table":
            padded[name][...] = -1
        padded[name][: have.shape[0], : have.shape[1]] = have
    return Schedule(**padded, rows=schedule.rows)


def _appends(batch: RaggedBatch, group_size: int) -> Ints:
    past, n = batch.past, batch.lengths
    start = past // group_size
    s, index = _expand(-(-batch.total // group_size) - start)
    block = start[s] + index
    first = np.maximum(block * group_size - past[s], 0)
    count = np.minimum((block + 1) * group_size - past[s], n[s]) - first
    new = block * group_size >= past[s]
    direct = new & (batch.cold_begin[s] <= block) & (block < batch.direct_end[s])
    return _rows(s, block, first, count + direct * DIRECT)


def _expand(counts: NDArray[np.integer[Any]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(owner, index within the owner) of ``counts[i]`` items of every owner i."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]


def _rows(*columns: NDArray[np.generic] | int) -> Ints:
    """int32 ``[N, columns]``."""
    return np.ascontiguousarray(np.stack(np.broadcast_arrays(*columns), axis=1), dtype=np.int32)


def _or_null(items: Ints) -> Ints:
    if len(items):
        return items
    null = np.zeros((1, items.shape[1]), np.int32)
    null[0, 0] = -1
    return null
