"""Paged attention on the CPU: in place, dequantization fused, each block unpacked once per KV head.

This module is the Python side: it checks arguments, turns a batch into a work list once per step, and hands one
compiled function (`work`) its addresses. Decode has an item per (sequence, KV head); longer appends are also cut into
tiles of queries, so that a single sequence with few KV heads still fills every core. Threads take items from a shared
counter, the costliest first.

The first call in a process compiles (some seconds), or reads numba's cache next to this file or in NUMBA_CACHE_DIR.
An instance serves one call at a time (a lock makes others wait) and must not be used after a fork.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvattention.batch import RaggedBatch
from kvattention.layout import UNIT_WORDS, LayerSpec, arena_words

if TYPE_CHECKING:
    from kvattention.cpu.threads import Run

LOG2_E = 1.4426950408889634

Float32 = NDArray[np.float32]
Addresses = NDArray[np.int64]


class CpuAttention:
    """The "cpu" implementation of `kvattention.Attention`, on ``threads`` threads (None: all this process may use).

    q, k, v may be strided over tokens, as slices of one fused projection are; heads and channels must be contiguous.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        from kvattention.cpu import work
        from kvattention.cpu.threads import team

        self.threads = threads or len(os.sched_getaffinity(0))
        self._work = work
        self._run: Run = team(work.worker().address, self.threads)
        self._layers: WeakKeyDictionary[LayerSpec, Addresses] = WeakKeyDictionary()
        self._lock = threading.Lock()
        scratch = np.zeros(self.threads * work.SCRATCH_FLOATS + 16, np.float32)
        self._scratch = scratch[(-scratch.ctypes.data % 64) // 4 :]

    def allocate(self, words: int) -> NDArray[np.int32]:
        return arena_words(words)

    def paged_attention(
        self,
        q: Float32,
        k: Float32,
        v: Float32,
        arena: NDArray[np.int32],
        batch: RaggedBatch,
        layer: LayerSpec,
        out: Float32 | None = None,
    ) -> Float32:
        tokens, heads, head_dim = q.shape
        _check_arena(arena)
        for name, x, expected in (("q", q, heads), ("k", k, layer.kv_heads), ("v", v, layer.kv_heads)):
            if x.dtype != np.float32 or x.shape != (batch.tokens, expected, layer.head_dim):
                raise ValueError(
                    f"{name} is {x.dtype} {x.shape}, expected float32 {(batch.tokens, expected, layer.head_dim)}"
                )
            if x.strides[1:] != (4 * head_dim, 4):
                raise ValueError(f"{name} has strides {x.strides}; heads and channels must be contiguous")
        if out is None:
            out = np.empty((tokens, heads, head_dim), np.float32)
        elif out.shape != q.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, expected contiguous float32 {q.shape}")
        w = self._work
        template, appends, items = self._plan(batch, heads, layer)
        call = template.copy()
        call[w.ARENA] = _address(arena)
        call[w.LAYER] = _address(self._describe(layer))
        call[w.Q], call[w.K], call[w.V], call[w.OUT] = _address(q), _address(k), _address(v), _address(out)
        call[w.Q_ROW], call[w.K_ROW], call[w.V_ROW] = q.strides[0] >> 2, k.strides[0] >> 2, v.strides[0] >> 2
        if len(appends):
            self._start(call, w.APPEND, appends)
        self._start(call, w.ATTEND, items)
        return out

    def seal(self, arena: NDArray[np.int32], pairs: NDArray[np.int32], layers: Sequence[LayerSpec]) -> None:
        _check_arena(arena)
        w = self._work
        table = np.concatenate([self._describe(layer) for layer in layers])
        shape = len(pairs), len(layers), layers[0].kv_heads
        items = np.empty((*shape, w.ITEM_WORDS), np.int32)
        items[..., 0] = np.arange(len(layers))[:, None]
        items[..., 1] = np.arange(layers[0].kv_heads)
        items[..., 2:] = np.asarray(pairs, np.int32)[:, None, None]
        call = np.zeros(w.CALL_WORDS, np.int64)
        call[w.ARENA], call[w.LAYER] = _address(arena), _address(table)
        self._start(call, w.SEAL, items.reshape(-1, w.ITEM_WORDS))

    def move(self, arena: NDArray[np.int32], moves: NDArray[np.int32], words: int) -> None:
        for source, target in np.asarray(moves, np.int64) * UNIT_WORDS:
            arena[target : target + words] = arena[source : source + words]

    def _start(self, call: Addresses, mode: int, items: NDArray[np.int32]) -> None:
        w = self._work
        with self._lock:
            call[w.MODE], call[w.NEXT_ITEM], call[w.NEXT_THREAD] = mode, 0, 0
            call[w.ITEMS], call[w.ITEM_COUNT], call[w.SCRATCH] = (
                _address(items),
                len(items),
                _address(self._scratch),
            )
            self._run(min(self.threads, len(items)), _address(call))

    def _plan(
        self, batch: RaggedBatch, heads: int, layer: LayerSpec
    ) -> tuple[Addresses, NDArray[np.int32], NDArray[np.int32]]:
        """(call with the batch's addresses, append items, attend items); made once per step and kept on the batch."""
        key = (CpuAttention, layer.kv_heads, heads)
        plan = batch.derived.get(key)
        if plan is None:
            plan = batch.derived[key] = self._make_plan(batch, heads, layer.kv_heads)
        return plan

    def _make_plan(
        self, batch: RaggedBatch, heads: int, kv_heads: int
    ) -> tuple[Addresses, NDArray[np.int32], NDArray[np.int32]]:
        w = self._work
        gqa = heads // kv_heads
        if heads % kv_heads or gqa > w.MAX_TILE:
            raise ValueError(
                f"{heads} query heads over {kv_heads} KV heads: expected a multiple, at most x{w.MAX_TILE}"
            )
        lengths = batch.lengths
        tile = np.where(lengths * gqa <= w.MAX_FUSED, lengths, max(1, w.TILE // gqa))
        tiles = -(-lengths // tile)  # [S]
        sequence = np.repeat(np.arange(batch.sequences), tiles)
        index = np.arange(len(sequence)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        first = index * tile[sequence]
        count = np.minimum(tile[sequence], lengths[sequence] - first)
        order = np.argsort(-(batch.past[sequence] + first + count) * count, kind="stable")
        items = np.empty((len(order), kv_heads, w.ITEM_WORDS), np.int32)
        items[..., 0] = sequence[order, None]
        items[..., 1] = np.arange(kv_heads)
        items[..., 2] = first[order, None]
        items[..., 3] = count[order, None]
        tiled = np.flatnonzero(tiles > 1)
        appends = np.zeros((len(tiled), kv_heads, w.ITEM_WORDS), np.int32)
        appends[..., 0] = tiled[:, None]
        appends[..., 1] = np.arange(kv_heads)
        call = np.zeros(w.CALL_WORDS, np.int64)
        call[w.HEADS], call[w.COLUMNS] = heads, batch.table.shape[1]
        call[w.QUERY_START], call[w.PAST] = _address(batch.query_start), _address(batch.past)
        call[w.TABLE], call[w.DIRECT_END] = _address(batch.table), _address(batch.direct_end)
        call[w.COLD_BEGIN], call[w.COLD_END] = _address(batch.cold_begin), _address(batch.cold_end)
        return call, appends.reshape(-1, w.ITEM_WORDS), items.reshape(-1, w.ITEM_WORDS)

    def _describe(self, layer: LayerSpec) -> Addresses:
        """The layer as numbers, made once."""
        known = self._layers.get(layer)
        if known is not None:
            return known
        w = self._work
        table = np.zeros(w.LAYER_WORDS, np.int64)
        table[w.HOT] = layer.hot.k.index
        table[w.COLD_K], table[w.COLD_V] = layer.cold.k.reader.index, layer.cold.v.reader.index
        table[w.K_CUT], table[w.V_CUT] = layer.cold.k.cut, layer.cold.v.cut
        table[w.KV_HEADS], table[w.HEAD_DIM], table[w.GROUP] = (
            layer.kv_heads,
            layer.head_dim,
            layer.group_size,
        )
        table[w.HOT_OFFSET], table[w.COLD_OFFSET] = layer.hot_offset, layer.cold_offset
        table[w.HOT_V] = layer.hot.v_codes
        table[w.K_PARAMS], table[w.V_CODES] = layer.cold.k_params, layer.cold.v_codes
        table[w.V_PARAMS], table[w.WINDOW] = layer.cold.v_params, layer.window or 0
        table[w.K_SCALES], table[w.V_SCALES] = _address(layer.k_scales), _address(layer.v_scales)
        table[w.SOFTMAX_SCALE] = struct.unpack("<I", struct.pack("<f", layer.softmax_scale * LOG2_E))[0]
        for codec, scores, accumulate in (
            (table[w.HOT], w.HOT_SCORES, w.HOT_ACCUMULATE),
            (w.F32_CODEC, w.F32_SCORES, w.F32_ACCUMULATE),
        ):
            table[scores] = w.scores_worker(int(codec)).address
            table[accumulate] = w.accumulate_worker(int(codec)).address
        table[w.COLD_SCORES] = w.scores_worker(int(table[w.COLD_K])).address
        table[w.COLD_ACCUMULATE] = w.accumulate_worker(int(table[w.COLD_V])).address
        self._layers[layer] = table
        return table


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _check_arena(arena: NDArray[np.int32]) -> None:
    if arena.dtype != np.int32 or arena.ndim != 1 or arena.strides != (4,) or _address(arena) % 64:
        raise ValueError(f"arena is {arena.dtype} {arena.shape}; expected a 64-byte aligned int32 vector (arena_words)")
