"""A step as a TensorRT engine's inputs: where they lie, and how few lengths decode steps are padded to."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import pytest

from kvattention import select
from kvattention.gpu.schedule import LISTS, make_schedule
from lowkv.engine.tensorrt.profiles import INPUTS, StepLimits, decode_limits, group_input
from lowkv.kvcache import CachePlan, KVCache
from lowkv.recipe import KVCacheConfig
from lowkv.serving.tensorrt.inputs import Layout, StepInputs, input_layout, output_layout, padded, step_inputs

HEADS, KV_HEADS, GROUP = 8, 2, 32


@dataclass(frozen=True)
class Geometry:
    windows: tuple[int | None, ...] = (None,)
    kv_heads: int = KV_HEADS
    head_dim: int = 16
    softmax_scale: float = 0.25

    @property
    def layers(self) -> int:
        return len(self.windows)


def limits(sequences: int = 16, length: int = 8192) -> StepLimits:
    return decode_limits(sequences, length=length, group_size=GROUP)


def stored(tokens: list[int], name: str, *windows: int | None) -> tuple[KVCache, list[Any]]:
    """A cache in which sequences of those lengths are stored, without their contents."""
    plan = CachePlan.from_config(Geometry(windows), KVCacheConfig(format=name))
    cache = KVCache(plan, 2**26, select("reference"))
    sequences = [cache.add() for _ in tokens]
    for sequence, count in zip(sequences, tokens, strict=True):
        if count:
            cache.commit(cache.prepare([(sequence, count)]))
    return cache, sequences


def inputs_of(tokens: list[int], new: list[int], rows: list[int], most: StepLimits) -> StepInputs:
    cache, sequences = stored(tokens, "fp16", None)
    step = cache.prepare(list(zip(sequences, new, strict=True)))
    fed = np.arange(100, 100 + sum(new))
    return step_inputs(fed, step, np.array(rows, np.int64), HEADS, cache.plan, most)


@pytest.mark.parametrize("dims", [limits(1), limits(5, 100), limits(64, 131072)])
def test_inputs_lie_aligned_side_by_side_and_whole(dims: StepLimits) -> None:
    layout = input_layout(dims, 2)
    further = ["sequences.1", "table.1", "appends.1"]
    assert list(layout.shapes) == [*(name for name in INPUTS if name != "arena"), *further]
    end = 0
    for name, shape in layout.shapes.items():
        assert layout.offsets[name] == end
        assert 4 * layout.offsets[name] % 256 == 0
        end = layout.offsets[name] + -(-prod(shape) // 64) * 64
    assert layout.words == end


def test_packing_puts_every_array_in_its_place() -> None:
    layout = Layout.of({"a": (3,), "b": (2, 40), "c": (1,)})
    arrays = {name: np.arange(prod(shape), dtype=np.int32) + 1 for name, shape in layout.shapes.items()}
    packed = layout.pack(arrays)
    for name, shape in layout.shapes.items():
        np.testing.assert_array_equal(layout.view(packed, name), arrays[name].reshape(shape))
    assert np.count_nonzero(packed) == 3 + 80 + 1


def test_outputs_lie_in_one_buffer() -> None:
    layout = output_layout(3, 256)
    assert layout.shapes == {"values": (3, 256), "ids": (3, 256), "lse": (3,)}
    assert layout.words == 3 * 256 + 3 * 256 + 64


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 16])
def test_decode_steps_are_padded_up_to_the_profile(count: int) -> None:
    most = limits(sequences=12)
    rng = random.Random(count)
    tokens = [rng.choice((0, 31, 32, 500, 6000)) for _ in range(min(count, 12))]
    found = inputs_of(tokens, [1] * len(tokens), list(range(len(tokens))), most)
    assert found.decode
    dims = asdict(found.dims)
    assert dims["T"] == dims["R"] == dims["S"] == {1: 1, 2: 2, 3: 4, 5: 8, 9: 12, 16: 12}[count]
    assert all(size == getattr(most, name) or size & (size - 1) == 0 for name, size in dims.items())
    assert all(size <= getattr(most, name) for name, size in dims.items())
    layout = input_layout(found.dims, 1)
    real = len(tokens)
    for name in ("tokens", "positions"):
        assert (layout.view(found.packed, name)[real:] == 0).all()
    np.testing.assert_array_equal(layout.view(found.packed, "positions")[:real], tokens)
    np.testing.assert_array_equal(layout.view(found.packed, "tokens")[:real], 100 + np.arange(real))
    assert (layout.view(found.packed, "appends")[real:, 0] == -1).all()
    assert (layout.view(found.packed, "table")[real:] == -1).all()


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 40, 5], [33, 1, 64]])
def test_every_group_has_its_own_blocks_in_lists_of_the_same_lengths(new: list[int]) -> None:
    """Those of a batch by itself: which of a group's blocks are alive, sealed and written straight to cold differs."""
    cache, sequences = stored([700, 31, 320], "k4v2", None, 100)
    step = cache.prepare(list(zip(sequences, new, strict=True)))
    rows = np.cumsum(new) - 1
    found = step_inputs(np.arange(sum(new)), step, rows, HEADS, cache.plan, limits())
    layout = input_layout(found.dims, 2)
    schedules = [make_schedule(batch, HEADS, KV_HEADS, GROUP) for batch in step.batches]
    for name in ("narrow", "wide", "merges"):
        np.testing.assert_array_equal(getattr(schedules[0], name), getattr(schedules[1], name))
        assert f"{name}.1" not in layout.shapes
    for group, schedule in enumerate(schedules):
        for name in LISTS:
            own = getattr(schedule, name)
            packed = layout.view(found.packed, group_input(name, group))
            np.testing.assert_array_equal(packed[: own.shape[0], : own.shape[1]], own)
    full, sliding = (layout.view(found.packed, name)[:3] for name in ("table", "table.1"))
    assert (full[0] >= 0).sum() > (sliding[0] >= 0).sum() > 0
    assert not set(full[full >= 0]) & set(sliding[sliding >= 0])


def test_a_growing_batch_needs_few_graphs() -> None:
    """64 sequences from 100 to 8,192 tokens, joining one by one: every length that a server would see."""
    most = limits(sequences=64)
    seen = set()
    for count in range(1, 65):
        for length in range(100, 8192, 300):
            parts = max(1, min(32, length // 256))
            split = count if parts > 1 else 1
            exact = StepLimits(T=count, R=count, S=count, B=length // 32 + 1, A=count, W=count * parts, P=1, C=split)
            seen.add(padded(exact, most))
    assert len(seen) < 80
    assert len({dims.S for dims in seen}) == 7


@pytest.mark.parametrize(
    ("tokens", "new", "rows"),
    [
        ([0], [40], [39]),
        ([0, 64], [40, 1], [39, 40]),
        ([64, 64], [1, 1], [1]),  # one token each, but the first is a prompt's that goes on
        ([64], [1], []),
    ],
)
def test_other_steps_keep_their_lengths(tokens: list[int], new: list[int], rows: list[int]) -> None:
    found = inputs_of(tokens, new, rows, limits())
    assert not found.decode
    assert (sum(new), len(new), max(1, len(rows))) == (found.dims.T, found.dims.S, found.dims.R)
    layout = input_layout(found.dims, 1)
    np.testing.assert_array_equal(layout.view(found.packed, "rows"), rows or [0])
    assert found.packed.dtype == np.int32
