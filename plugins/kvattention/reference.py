"""The specification of paged attention in NumPy: plain, slow, and what every kernel is compared with.

Two layers of truth live here. `ReferenceAttention` performs the operation on a real arena, block by block.
`attention` is the formula on explicit lists of keys and values: the tests call it with the exact values, and with
the values after encode and decode (`as_stored`), never reading an arena, so that an error in block bookkeeping
cannot hide in both sides of a comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvattention.batch import RaggedBatch
from kvattention.codec import (
    VALUES_PER_PARAM,
    Codec,
    Floats,
    Words,
    decode_group,
    decode_plain,
    encode_group,
    encode_plain,
    round_to,
)
from kvattention.layout import UNIT_WORDS, LayerSpec, arena_words


def attention(
    q: Floats,  # [n, Hq, D]
    k: Floats,  # [past + n, Hkv, D]
    v: Floats,  # [past + n, Hkv, D]
    *,
    softmax_scale: float,
    window: int | None = None,
    dtype: Any = np.float64,
) -> Floats:
    """Causal softmax attention of the last n positions over explicit keys and values; returns ``[n, Hq, D]``.

    Query head h reads KV head ``h // (Hq / Hkv)``. Computed in ``dtype``.
    """
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    group = heads // kv_heads
    position = np.arange(length - n, length)[:, None]  # [n, 1]
    key = np.arange(length)[None, :]  # [1, length]
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    out = np.empty(q.shape, dtype)
    for h in range(heads):
        scores = q[:, h].astype(dtype) @ k[:, h // group].astype(dtype).T * dtype(softmax_scale)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, h] = weights @ v[:, h // group].astype(dtype)
    return out


def as_stored(
    layer: LayerSpec, k: Floats, v: Floats, cold_blocks: Collection[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """k, v ``[N, Hkv, D]`` as they read back when the given blocks are cold and the others hot.

    Encodes and decodes values without packing them into a record.
    """
    k, v = round_to(layer.hot.k, k), round_to(layer.hot.v, v)
    group = layer.group_size
    for block in cold_blocks:
        tokens = slice(block * group, (block + 1) * group)
        k[tokens] = _round_trip(layer.cold.k, k[tokens], 0, group, layer.k_scales)
        v[tokens] = _round_trip(layer.cold.v, v[tokens], 2, VALUES_PER_PARAM, layer.v_scales[:, None])
    return k, v


def _round_trip(codec: Codec, x: Floats, axis: int, per_group: int, scales: Floats) -> NDArray[np.float32]:
    """x ``[G, Hkv, D]`` after encode and decode, with groups of ``per_group`` along ``axis``; scales broadcast."""
    if not codec.grouped:
        return decode_plain(codec, encode_plain(codec, x, scales), scales)
    borders = range(per_group, x.shape[axis], per_group)
    pieces = []
    for piece in np.split(x, borders, axis=axis):
        codes, params = encode_group(codec, np.moveaxis(piece, axis, -1))
        pieces.append(np.moveaxis(decode_group(codec, codes, params), -1, axis))
    return np.concatenate(pieces, axis=axis)


class ReferenceAttention:
    """paged_attention, seal and move as specified by `kvattention.Attention`; arithmetic in ``dtype``."""

    name = "reference"

    def __init__(self, dtype: Any = np.float64) -> None:
        self.dtype = dtype

    def allocate(self, words: int) -> Words:
        return arena_words(words)

    def paged_attention(
        self,
        q: NDArray[np.float32],
        k: NDArray[np.float32],
        v: NDArray[np.float32],
        arena: Words,
        batch: RaggedBatch,
        layer: LayerSpec,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        out = np.empty(q.shape, np.float32) if out is None else out
        for s in range(batch.sequences):
            new = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
            self._append(k[new], v[new], arena, batch, s, layer)
            past_k, past_v = self._history(arena, batch, s, layer)
            out[new] = attention(
                q[new],
                np.concatenate([past_k, round_to(layer.hot.k, k[new])]),
                np.concatenate([past_v, round_to(layer.hot.v, v[new])]),
                softmax_scale=layer.softmax_scale,
                window=layer.window,
                dtype=self.dtype,
            )
        return out

    def seal(self, arena: Words, pairs: NDArray[np.int32], layers: Sequence[LayerSpec]) -> None:
        for hot, cold in pairs:
            for layer in layers:
                k, v = layer.hot.decode(layer.record(arena, hot, cold=False), layer.k_scales, layer.v_scales)
                layer.cold.encode(k, v, layer.record(arena, cold, cold=True), layer.k_scales, layer.v_scales)

    def move(self, arena: Words, moves: NDArray[np.int32], words: int) -> None:
        for source, target in moves.astype(np.int64) * UNIT_WORDS:
            arena[target : target + words] = arena[source : source + words]

    def _append(self, k: Floats, v: Floats, arena: Words, batch: RaggedBatch, s: int, layer: LayerSpec) -> None:
        """Store the step's tokens of sequence s: whole blocks straight to cold slots, the rest token by token."""
        group, past, total = layer.group_size, int(batch.past[s]), int(batch.total[s])
        for block in range(past // group, -(-total // group)):
            begin, end = max(past, block * group), min(total, (block + 1) * group)
            block_k = round_to(layer.hot.k, k[begin - past : end - past])
            block_v = round_to(layer.hot.v, v[begin - past : end - past])
            offset = int(batch.table[s, block])
            if batch.is_direct(s, block, group):
                record = layer.record(arena, offset, cold=True)
                heads_first = np.swapaxes(block_k, 0, 1), np.swapaxes(block_v, 0, 1)  # [Hkv, G, D]
                layer.cold.encode(*heads_first, record, layer.k_scales, layer.v_scales)
            else:
                slots = slice(begin - block * group, end - block * group)
                keys, values = layer.hot.token_views(layer.record(arena, offset, cold=False))
                keys[:, :, slots] = np.moveaxis(encode_plain(layer.hot.k, block_k), 0, 2)
                values[:, slots] = np.swapaxes(encode_plain(layer.hot.v, block_v), 0, 1)

    def _history(self, arena: Words, batch: RaggedBatch, s: int, layer: LayerSpec) -> tuple[Floats, Floats]:
        """(k, v) ``[past, Hkv, D]`` as stored; zeros where the block has left the window."""
        group, past = layer.group_size, int(batch.past[s])
        k = np.zeros((past, layer.kv_heads, layer.head_dim), np.float32)
        v = np.zeros_like(k)
        first = 0 if layer.window is None else max(0, past - layer.window + 1) // group
        for block in range(first, -(-past // group)):
            cold = batch.is_cold(s, block, group)
            layout = layer.cold if cold else layer.hot
            record = layer.record(arena, int(batch.table[s, block]), cold=cold)
            block_k, block_v = layout.decode(record, layer.k_scales, layer.v_scales)
            stored = slice(block * group, min(past, (block + 1) * group))
            k[stored] = np.swapaxes(block_k, 0, 1)[: stored.stop - stored.start]
            v[stored] = np.swapaxes(block_v, 0, 1)[: stored.stop - stored.start]
        return k, v
