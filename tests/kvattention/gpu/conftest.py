"""Where the kernels run: on the machine's GPU, else interpreted.

A process either compiles Triton's kernels or interprets them. Triton decides that for each function when it decorates
it, its own library included, so the variable must be set before anything imports Triton, and holds for the process.
Tests that compile do so in subprocesses without it.

Outputs are compared with goldens and derived tolerances, arenas with the reference's, to the bit.


The golden reads keys and values as they are stored, rounded as the kernels round them: those of 2 and 4 bits to model
precision (e4m3 is exact in 16 bits, its scales are applied in float32). What is left between golden and kernel, with
u the unit roundoff of model precision (2^-11 in fp16, 2^-8 in bf16):

* softmax weights p are rounded to model precision:  at most  u * sum(p |v|);
* the output is rounded to model precision:          at most  u * |out|;
* float32 sums, as in the tests of the CPU kernels:  at most  1e-4, times the size of the output where it is above 1.

FP8 queries: the golden rounds the queries that meet cold blocks to e4m3, exactly as the kernel does. Left is the
rounding of the weights of cold keys to e4m3, relative 2^-4 of each, and for weights so small that they are subnormal in
e4m3 half a step of 2^-9 / 256 (the kernel's factor), relative to the largest weight.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from kvattention import LayerSpec
from kvattention.cases import Case, Playback, Step
from kvattention.codec import decode_plain, e4m3, encode_plain, round_to
from kvattention.gpu.attention import Arena, GpuAttention
from kvattention.reference import ReferenceAttention, as_stored

GPU = shutil.which("nvidia-smi") is not None

if not GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before these tests could ask for its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def gpu() -> bool:
    """Whether the kernels run on a GPU; else they are interpreted."""
    return GPU


@pytest.fixture(scope="session")
def new_attention() -> Callable[..., GpuAttention]:
    """new_attention(fp8_query=True, kernels=module): parts of 64 tokens, so that small shapes split."""
    from kvattention.gpu.torch_device import TorchDevice

    def new(fp8_query: bool = False, part_tokens: int = 64, kernels: object = None) -> GpuAttention:
        device = TorchDevice("cuda" if GPU else "cpu")
        if kernels is not None:
            device.kernels = kernels
        return GpuAttention(device, fp8_query=fp8_query, part_tokens=part_tokens)

    return new


@pytest.fixture(scope="session")
def stage() -> SimpleNamespace:
    """play, check and run_layer."""
    return SimpleNamespace(play=play, check=check, run_layer=run_layer)


UNIT_ROUNDOFF = {"f16": 2.0**-11, "bf16": 2.0**-8}
SUMS = 1e-4


@dataclass(frozen=True)
class Played:
    active: list[int]
    """The case's sequences that take part, in the batch's order."""
    step: Step
    outputs: list[np.ndarray]  # per layer, float32 [T, Hq, D]
    arena: np.ndarray  # the device's, after the step
    expected: np.ndarray  # the reference's


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


def run_layer(attention: GpuAttention, arena: Arena, step: Step, index: int, layer: LayerSpec) -> np.ndarray:
    q, k, v = (to_device(attention, x[index], layer) for x in (step.q, step.k, step.v))
    out = attention.paged_attention(q, k, v, arena, step.batch, layer)
    return np.asarray(out.float().cpu().numpy())


def to_device(attention: GpuAttention, x: np.ndarray, layer: LayerSpec):
    import torch

    dtype = torch.float16 if layer.hot.k.name == "f16" else torch.bfloat16
    return torch.from_numpy(round_to(layer.hot.k, x)).to(dtype).to(attention.device.device)


def check(attention: GpuAttention, case: Case, fp8_query: bool | None = None) -> None:
    """Raises AssertionError where outputs or arenas are not what they must be; fp8_query: what to expect."""
    playback = Playback(case)
    fp8_query = attention.fp8_query if fp8_query is None else fp8_query
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


def expect(playback: Playback, played: Played, index: int, fp8_query: bool) -> tuple[np.ndarray, np.ndarray]:
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
        golden[new], tolerance[new] = _attention(step.q[index][new], k, v, layer, cold & fp8)
    return golden, tolerance


def _attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: LayerSpec, quantized: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(attention, tolerance) in float64; keys of which ``quantized`` is true meet queries and weights in e4m3."""
    n, heads, _ = q.shape
    length, kv_heads, _ = k.shape
    position, key = np.arange(length - n, length)[:, None], np.arange(length)[None, :]
    visible = key <= position
    if layer.window is not None:
        visible &= key > position - layer.window
    coarse = _through_e4m3(q)
    u = UNIT_ROUNDOFF[layer.hot.k.name]
    golden, tolerance = np.empty(q.shape), np.empty(q.shape)
    for h in range(heads):
        keys, values = (x[:, h * kv_heads // heads].astype(np.float64) for x in (k, v))
        scores = np.where(quantized, coarse[:, h] @ keys.T, q[:, h].astype(np.float64) @ keys.T) * layer.softmax_scale
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        largest = 1 / p.sum(axis=1, keepdims=True)
        p *= largest
        golden[:, h] = p @ values
        rounding = p * np.where(quantized, 2.0**-4, u) + np.where(quantized & visible, largest * 2.0**-18, 0)
        tolerance[:, h] = rounding @ np.abs(values) + u * np.abs(golden[:, h])
    return golden, tolerance + SUMS * max(1.0, float(np.abs(golden).max()))


def _through_e4m3(q: np.ndarray) -> np.ndarray:
    """Every row of q [n, Hq, D] as e4m3 with its own scale keeps it."""
    fit = np.float32(448) / np.maximum(np.abs(q).max(axis=2, keepdims=True), np.float32(1e-30))
    return decode_plain(e4m3, encode_plain(e4m3, q * fit)).astype(np.float64) / fit
