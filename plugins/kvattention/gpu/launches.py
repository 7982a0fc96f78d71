"""From a layer and device pointers to kernel launches: grids and argument lists, and nothing that launches.

Every launcher (Triton's, the driver's, TensorRT's plugin, a recorder in tests) takes its launches from here, so that
they cannot disagree about an argument's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvattention.gpu.schedule import group_heads, partial_rows
from kvattention.gpu.variants import MOVE, MOVE_WORDS, Variant, layer_variants, seal_variant
from kvattention.layout import UNIT_WORDS, LayerSpec

Pointer = Any
"""A device array or a device address: whatever the launcher takes."""

LAYER_FIELDS = 8


@dataclass(frozen=True)
class Launch:
    variant: Variant
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    """In the order of ``variant.arguments``."""


@dataclass(frozen=True)
class AttentionInputs:
    """Pointers of one layer's call, and the lengths of the step's lists."""

    q: Pointer  # [T, Hq, D] hot
    k: Pointer  # [T, Hkv, D] hot
    v: Pointer  # [T, Hkv, D] hot
    out: Pointer  # [T, Hq, D] hot
    arena: Pointer  # int64 [1]: the arena's address
    scales: Pointer  # float32 [Hkv, D + 1]: of K's channels, of V
    sequences: Pointer  # int32 [S, 4]
    table: Pointer  # int32 [S, B]
    appends: Pointer  # int32 [A, 4]
    narrow: Pointer  # int32 [W, 8]
    wide: Pointer  # int32 [P, 8]
    merges: Pointer  # int32 [C, 4]
    workspace: Pointer  # float32, `schedule.workspace_bytes`
    S: int
    B: int
    A: int
    W: int
    P: int
    C: int
    T: int
    q_row: int = 0
    """Elements from token to token in q, a multiple of 16; 0: tokens lie one behind the other."""
    k_row: int = 0
    v_row: int = 0


def attention_launches(
    inputs: AttentionInputs, layer: LayerSpec, heads: int, fp8_query: bool = False
) -> tuple[Launch, Launch, Launch, Launch]:
    """Append, attend to narrow and to wide tiles, merge: in this order on one stream.

    Raises ValueError for query heads that are not a multiple of the KV heads, or rows that are not aligned.
    """
    kv_heads, head_dim = layer.kv_heads, layer.head_dim
    gqa = group_heads(heads, kv_heads)
    append, narrow, wide, merge = layer_variants(layer, heads, fp8_query)
    q_row = inputs.q_row or heads * head_dim
    k_row, v_row = inputs.k_row or kv_heads * head_dim, inputs.v_row or kv_heads * head_dim
    if q_row % 16 or k_row % 16 or v_row % 16:
        raise ValueError(f"rows of {q_row} (q), {k_row} (k), {v_row} (v) elements: expected multiples of 16")
    rows = partial_rows(inputs.W, inputs.P, gqa)
    offsets = layer.hot_offset, layer.cold_offset
    lists = inputs.arena, inputs.scales, inputs.sequences, inputs.table

    def attend(variant: Variant, items: Pointer, count: int) -> Launch:
        arguments = (
            *(inputs.q, inputs.k, inputs.v, inputs.out, *lists, items, inputs.workspace),
            *(gqa, kv_heads, q_row, k_row, v_row, inputs.B, rows),
            *(layer.window or 0, *offsets, layer.softmax_scale),
        )
        return Launch(variant, (count, kv_heads, 1), arguments)

    chunks = -(-head_dim // append.channels)
    return (
        Launch(
            append,
            (inputs.A, kv_heads, chunks),
            (inputs.k, inputs.v, *lists, inputs.appends, kv_heads, k_row, v_row, inputs.B, *offsets),
        ),
        attend(narrow, inputs.narrow, inputs.W),
        attend(wide, inputs.wide, inputs.P),
        Launch(merge, (inputs.C, kv_heads, 1), (inputs.workspace, inputs.out, inputs.merges, gqa, kv_heads, rows)),
    )


def layer_table(layers: Sequence[LayerSpec]) -> NDArray[np.int32]:
    """What `seal` reads of each layer: int32 ``[L, 8]`` of hot_offset, cold_offset, K codec, V codec, zeros."""
    table = np.zeros((len(layers), LAYER_FIELDS), np.int32)
    for row, layer in zip(table, layers, strict=True):
        row[:4] = layer.hot_offset, layer.cold_offset, layer.cold.k.index, layer.cold.v.index
    return table


def layer_scales(layers: Sequence[LayerSpec]) -> NDArray[np.float32]:
    """Multipliers of scaled codecs, float32 ``[L, Hkv, D + 1]``: of a head's K channels, then of its V."""
    return np.stack([np.hstack([layer.k_scales, layer.v_scales[:, None]]) for layer in layers])


def seal_launch(
    arena: Pointer, pairs: Pointer, count: int, table: Pointer, scales: Pointer, layers: Sequence[LayerSpec]
) -> Launch:
    """Encode blocks in all layers; pairs int32 ``[count, 2]`` of (hot, cold), `layer_table` and `layer_scales`."""
    first = layers[0]
    variant = seal_variant(first.hot.k.name, first.head_dim, first.group_size)
    chunks = -(-first.head_dim // variant.channels)
    grid = count, len(layers), first.kv_heads * chunks
    return Launch(variant, grid, (arena, pairs, table, scales, first.kv_heads))


def move_launch(arena: Pointer, moves: Pointer, count: int, words: int) -> Launch:
    """Copy ``count`` blocks of ``words`` words; moves int32 ``[count, 2]`` of (from, to), none overlapping another.

    Raises ValueError when words is not a multiple of 16.
    """
    if words % UNIT_WORDS:
        raise ValueError(f"blocks of {words} words: expected a multiple of {UNIT_WORDS}")
    return Launch(MOVE, (count, -(-words // MOVE_WORDS), 1), (arena, moves, words))
