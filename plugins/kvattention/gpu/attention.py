"""`kvattention.Attention` on a GPU: a step's lists are uploaded once, then every layer is a few launches.

What memory and launches are is the `Device`'s business; arrays are the device's own. Nothing here synchronizes, and
nothing looks into device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from kvattention.batch import RaggedBatch
from kvattention.gpu.launches import (
    AttentionInputs,
    Launch,
    attention_launches,
    layer_scales,
    layer_table,
    move_launch,
    seal_launch,
)
from kvattention.gpu.schedule import LISTS, PART_TOKENS, make_schedule, workspace_bytes
from kvattention.layout import LayerSpec

Array = Any
"""An array in the device's memory. q, k, v and out look like Torch's: shape, dtype, stride()."""

_DTYPES = {"f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, eq=False)
class Arena:
    words: Array
    """int32, 64-byte aligned."""
    pointer: Array
    """int64 [1] on the device: the address of the words."""


class Device(Protocol):
    """Memory and launches, in stream order."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Contiguous; dtype as NumPy and Torch call it, "bfloat16" included."""

    def upload(self, array: NDArray[Any]) -> Array:
        """A copy of a host array."""

    def allocate(self, words: int) -> Arena:
        """A zeroed arena."""

    def launch(self, launch: Launch) -> None: ...


@dataclass(frozen=True)
class _LayerTable:
    """What seal reads of a list of layers; valid as long as it is the same list."""

    layers: tuple[ReferenceType[LayerSpec], ...]
    table: Array
    scales: Array

    def fits(self, layers: Sequence[LayerSpec]) -> bool:
        return len(layers) == len(self.layers) and all(a() is b for a, b in zip(self.layers, layers, strict=True))


class GpuAttention:
    """The "gpu" implementation. q, k, v and the result are the device's arrays in the layer's hot dtype.

    q, k, v may be strided over tokens in multiples of 16 elements, as slices of one fused projection are.

    Args:
        device: where it runs.
        fp8_query: multiply e4m3 blocks on FP8 tensor cores, with quantized queries and weights (SM 8.9 and later).
        part_tokens: `schedule.make_schedule`'s.
    """

    name = "gpu"

    def __init__(self, device: Device, *, fp8_query: bool = False, part_tokens: int = PART_TOKENS) -> None:
        self.device = device
        self.fp8_query = fp8_query
        self.part_tokens = part_tokens
        self._scales: WeakKeyDictionary[LayerSpec, Array] = WeakKeyDictionary()
        self._tables: WeakKeyDictionary[LayerSpec, _LayerTable] = WeakKeyDictionary()
        self._workspace: Array = None
        self._workspace_bytes = 0

    def allocate(self, words: int) -> Arena:
        return self.device.allocate(words)

    def paged_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        arena: Arena,
        batch: RaggedBatch,
        layer: LayerSpec,
        out: Array | None = None,
    ) -> Array:
        heads, dtype = q.shape[1], _DTYPES[layer.hot.k.name]
        shape = batch.tokens, heads, layer.head_dim
        kv_shape = batch.tokens, layer.kv_heads, layer.head_dim
        rows = {
            f"{name}_row": _row(name, x, to, dtype)
            for name, x, to in (("q", q, shape), ("k", k, kv_shape), ("v", v, kv_shape))
        }
        if out is None:
            out = self.device.empty(shape, dtype)
        elif _row("out", out, shape, dtype) != heads * layer.head_dim:
            raise ValueError(f"out has strides {out.stride()}; expected a contiguous array")
        step = self._step(batch, heads, layer)
        inputs = AttentionInputs(
            q=q,
            k=k,
            v=v,
            out=out,
            arena=arena.pointer,
            scales=self._layer_scales(layer),
            workspace=self._reserve(workspace_bytes(step["W"], step["P"], heads, layer.kv_heads, layer.head_dim)),
            **step,
            **rows,
        )
        for launch in attention_launches(inputs, layer, heads, self.fp8_query):
            self.device.launch(launch)
        return out

    def seal(self, arena: Arena, pairs: NDArray[np.int32], layers: Sequence[LayerSpec]) -> None:
        if not len(pairs):
            return
        known = self._tables.get(layers[0])
        if known is None or not known.fits(layers):
            known = self._tables[layers[0]] = _LayerTable(
                tuple(ref(layer) for layer in layers),
                self.device.upload(layer_table(layers)),
                self.device.upload(layer_scales(layers)),
            )
        uploaded = self.device.upload(np.asarray(pairs, np.int32))
        self.device.launch(seal_launch(arena.pointer, uploaded, len(pairs), known.table, known.scales, layers))

    def move(self, arena: Arena, moves: NDArray[np.int32], words: int) -> None:
        if len(moves):
            uploaded = self.device.upload(np.asarray(moves, np.int32))
            self.device.launch(move_launch(arena.pointer, uploaded, len(moves), words))

    def _step(self, batch: RaggedBatch, heads: int, layer: LayerSpec) -> dict[str, Any]:
        """The step's lists on the device and their lengths, as `AttentionInputs` names them; made once per step."""
        key = GpuAttention, self.device, heads, layer.kv_heads, layer.group_size, self.part_tokens
        step: dict[str, Any] | None = batch.derived.get(key)
        if step is None:
            schedule = make_schedule(batch, heads, layer.kv_heads, layer.group_size, self.part_tokens)
            lists = {name: getattr(schedule, name) for name in LISTS}
            lengths = dict(zip("SAWPC", (len(lists[name]) for name in LISTS if name != "table"), strict=True))
            step = batch.derived[key] = {
                **{name: self.device.upload(array) for name, array in lists.items()},
                **lengths,
                "B": schedule.table.shape[1],
                "T": batch.tokens,
            }
        return step

    def _layer_scales(self, layer: LayerSpec) -> Array:
        scales = self._scales.get(layer)
        if scales is None:
            scales = self._scales[layer] = self.device.upload(layer_scales([layer])[0])
        return scales

    def _reserve(self, size: int) -> Array:
        """Workspace of at least ``size`` bytes; one is enough, launches run one after the other."""
        if size > self._workspace_bytes:
            self._workspace, self._workspace_bytes = self.device.empty((size // 4,), "float32"), size
        return self._workspace


def _row(name: str, x: Array, shape: tuple[int, ...], dtype: str) -> int:
    """Elements from token to token. Raises ValueError for an array that the kernels would misread."""
    have = str(x.dtype).removeprefix("torch.")
    if tuple(x.shape) != shape or have != dtype:
        raise ValueError(f"{name} is {have} {tuple(x.shape)}, expected {dtype} {shape}")
    row, head, channel = x.stride()
    if (head, channel) != (shape[2], 1):
        raise ValueError(f"{name} has strides {x.stride()}; heads and channels must be contiguous")
    return int(row)
