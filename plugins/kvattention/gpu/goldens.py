"""Whether the kernels are right: cases played on a device beside the reference, compared within derived tolerances.

Outputs are compared with goldens and derived tolerances, arenas with the reference's, to the bit.

The golden reads keys and values as they are stored, rounded as the kernels round them: those of 2 and 4 bits to model
precision (8 bits are exact in it). The queries that meet cold keys with scales are multiplied by these and rounded to
model precision, exactly as the kernel does. What is left between golden and kernel, with u the unit roundoff of model
precision (2^-11 in fp16, 2^-8 in bf16):

* softmax weights p are rounded to model precision:  at most  u * sum(p |v|);
* the output is rounded to model precision:          at most  u * |out|;
* float32 sums, as in the tests of the CPU kernels:  at most  1e-4, times the size of the output where it is above 1.

FP8 queries: the golden rounds those queries to e4m3 instead, again as the kernel does. Left is the
rounding of the weights of cold keys to e4m3, relative 2^-4 of each, and for weights so small that they are subnormal in
e4m3 half a step of 2^-9 / 256 (the kernel's factor), relative to the largest weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvattention.cases import Case, Playback, Step
from kvattention.codec import decode_plain, e4m3, encode_plain, round_to
from kvattention.gpu.attention import Arena, GpuAttention
from kvattention.layout import LayerSpec
from kvattention.reference import ReferenceAttention, as_stored

Float64 = NDArray[np.float64]
Floats = NDArray[np.float32]

UNIT_ROUNDOFF = {"f16": 2.0**-11, "bf16": 2.0**-8}
SUMS = 1e-4


@dataclass(frozen=True)
class Played:
    active: list[int]
    """The case's sequences that take part, in the batch's order."""
    step: Step
    outputs: list[Floats]  # per layer, float32 [T, Hq, D]
    arena: NDArray[np.int32]  # the device's, after the step
    expected: NDArray[np.int32]  # the reference's


def play(attention: GpuAttention, case: Case | Playback) -> Iterator[Played]:
    """The case's steps on the device; before each, the device's arena is made the reference's."""
    playback = case if isinstance(case, Playback) else Playback(case)
    import torch

    reference = ReferenceAttention()
    arena = attention.allocate(playback.arena.size)
    for lengths, step in zip(playback.case.steps, playback, strict=True):
        arena.words.copy_(torch.from_numpy(playback.arena))
        outputs = [run_layer(attention, arena, step, i, layer) for i, layer in enumerate(playback.layers)]
        attention.seal(arena, step.seal, playback.layers)
        for i, layer in enumerate(playback.layers):
            reference.paged_attention(step.q[i], step.k[i], step.v[i], playback.arena, step.batch, layer)
        reference.seal(playback.arena, step.seal, playback.layers)
        active = [s for s, n in enumerate(lengths) if n]
        yield Played(active, step, outputs, arena.words.cpu().numpy(), playback.arena)


def run_layer(attention: GpuAttention, arena: Arena, step: Step, index: int, layer: LayerSpec) -> Floats:
    """One layer's call, its output on the host: [T, Hq, D]."""
    q, k, v = (to_device(attention, x[index], layer) for x in (step.q, step.k, step.v))
    out = attention.paged_attention(q, k, v, arena, step.batch, layer)
    return np.asarray(out.float().cpu().numpy())


def to_device(attention: GpuAttention, x: Floats, layer: LayerSpec) -> Any:
    """A tensor of the layer's hot dtype on the attention's device."""
    import torch

    device: Any = attention.device
    dtype = torch.float16 if layer.hot.k.name == "f16" else torch.bfloat16
    return torch.from_numpy(round_to(layer.hot.k, x)).to(dtype).to(device.device)


def check(attention: GpuAttention, case: Case, fp8_query: bool | None = None) -> float:
    """Raises AssertionError where outputs or arenas are not what they must be; fp8_query: what to expect.

    Returns how much of the tolerance the worst output used, at most 1.
    """
    playback = Playback(case)
    fp8_query = attention.fp8_query if fp8_query is None else fp8_query
    used = 0.0
    for number, played in enumerate(play(attention, playback)):
        np.testing.assert_array_equal(played.arena, played.expected, err_msg=f"step {number}: arena")
        for index, output in enumerate(played.outputs):
            golden, tolerance = expect(playback, played, index, fp8_query)
            error = np.abs(output - golden)
            assert np.isfinite(output).all(), f"step {number}, layer {index}: not finite"
            worst = np.unravel_index(np.argmax(error - tolerance), error.shape)
            assert (error <= tolerance).all(), (
                f"step {number}, layer {index}, [token, head, channel] {worst}: "
                f"{output[worst]} instead of {golden[worst]}, allowed {tolerance[worst]:.2g}"
            )
            used = max(used, float((error / tolerance).max()))
    return used


def in_bf16(case: Case) -> Case:
    """The same case with a model precision of bf16."""
    formats = tuple((_bf16(k), _bf16(v)) for k, v in case.formats)
    return replace(case, name=f"{case.name}-in-bf16", hot="bf16", formats=formats)


def _bf16(codec: str) -> str:
    return "bf16" if codec == "f16" else codec


def expect(playback: Playback, played: Played, index: int, fp8_query: bool) -> tuple[Float64, Float64]:
    """(golden, tolerance), both [T, Hq, D]."""
    step = played.step
    layer, batch, case = playback.layers[index], step.batch, playback.case
    fp8 = fp8_query and layer.cold.k == layer.cold.v == e4m3
    golden, tolerance = np.empty(step.q[index].shape), np.empty(step.q[index].shape)
    for row, s in enumerate(played.active):
        new = slice(int(batch.query_start[row]), int(batch.query_start[row + 1]))
        keys, values = playback.stored(s, index)
        past, group = int(batch.past[row]), case.group_size
        blocks = range(int(batch.cold_begin[row]), min(int(batch.cold_end[row]), past // group))
        k, v = as_stored(layer, keys, values, blocks)
        if layer.cold.k.grouped:
            k = round_to(layer.hot.k, k)
        if layer.cold.v.grouped:
            v = round_to(layer.hot.v, v)
        cold = np.zeros(len(k), bool)
        for block in blocks:
            cold[block * group : (block + 1) * group] = True
        golden[new], tolerance[new] = _attention(step.q[index][new], k, v, layer, cold, fp8)
    return golden, tolerance


def _attention(
    q: Floats, k: Floats, v: Floats, layer: LayerSpec, cold: NDArray[np.bool_], fp8: bool
) -> tuple[Float64, Float64]:
    """(attention, tolerance) in float64; ``cold`` keys meet queries as `_cold_query` has them; fp8: weights too."""
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    position, key = np.arange(length - n, length)[:, None], np.arange(length)[None, :]
    visible = key <= position
    if layer.window is not None:
        visible &= key > position - layer.window
    coarse = _cold_query(q, layer, fp8)
    quantized = cold & fp8
    u = UNIT_ROUNDOFF[layer.hot.k.name]
    golden, tolerance = np.empty(q.shape), np.empty(q.shape)
    for h in range(heads):
        keys, values = (x[:, h * kv_heads // heads].astype(np.float64) for x in (k, v))
        scores = np.where(cold, coarse[:, h] @ keys.T, q[:, h].astype(np.float64) @ keys.T) * layer.softmax_scale
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        largest = 1 / p.sum(axis=1, keepdims=True)
        p *= largest
        golden[:, h] = p @ values
        rounding = p * np.where(quantized, 2.0**-4, u) + np.where(quantized & visible, largest * 2.0**-18, 0)
        tolerance[:, h] = rounding @ np.abs(values) + u * np.abs(golden[:, h])
    return golden, tolerance + SUMS * max(1.0, float(np.abs(golden).max()))


def _cold_query(q: Floats, layer: LayerSpec, fp8: bool) -> Float64:
    """q [n, Hq, D] as cold keys meet it: rounded once it is multiplied by their scales, and divided by them again."""
    if not layer.cold.k.scaled:
        return q.astype(np.float64)
    shares = layer.k_scales / layer.k_scales.max(axis=1, keepdims=True)
    shares = np.repeat(shares, q.shape[1] // layer.kv_heads, axis=0)  # [Hq, D]
    scaled = q * shares
    if fp8:  # every row with a scale of its own
        fit = np.float32(e4m3.maximum) / np.maximum(np.abs(scaled).max(axis=2, keepdims=True), np.float32(1e-30))
        rounded = decode_plain(e4m3, encode_plain(e4m3, scaled * fit)).astype(np.float64) / fit
    else:
        rounded = round_to(layer.hot.k, scaled).astype(np.float64)
    restored: Float64 = rounded / shares
    return restored
