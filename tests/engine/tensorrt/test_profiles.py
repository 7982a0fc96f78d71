"""The profiles: no step within the recipe's limits makes lists that are longer."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvattention.batch import RaggedBatch
from kvattention.gpu.schedule import Schedule, make_schedule
from lowkv.engine.tensorrt.profiles import (
    GROUP_LISTS,
    INPUTS,
    StepLimits,
    decode_limits,
    engine_profiles,
    prefill_limits,
)
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import CachePlan
from lowkv.models.config import ModelConfig, RopeConfig
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ServingConfig

GROUP = 32
KIVI2 = KVCacheConfig(format="kivi2")
CONFIG = ModelConfig("llama", 2, 64, 4, 2, 16, 128, 257, 1e-5, RopeConfig(), 2048, True, False, False, (None, None))


def batch(steps: list[tuple[int, int]]) -> RaggedBatch:
    """Sequences of (stored, new) tokens; which blocks are cold does not change a list's length."""
    past = np.array([stored for stored, _ in steps], np.int32)
    new = np.array([count for _, count in steps], np.int32)
    zeros = np.zeros(len(steps), np.int32)
    table = np.zeros((len(steps), -(-int((past + new).max()) // GROUP)), np.int32)
    return RaggedBatch(np.concatenate([[0], np.cumsum(new)]), past, table, zeros, zeros, zeros)


def lengths(schedule: Schedule) -> dict[str, int]:
    return {
        "S": len(schedule.sequences),
        "B": schedule.table.shape[1],
        "A": len(schedule.appends),
        "W": len(schedule.narrow),
        "P": len(schedule.wide),
        "C": len(schedule.merges),
    }


def assert_within(schedule: Schedule, limits: StepLimits) -> None:
    got, most = lengths(schedule), asdict(limits)
    assert all(got[name] <= most[name] for name in got), (got, most)


@given(data=st.data(), gqa=st.sampled_from([1, 3, 4, 8, 32]), length=st.sampled_from([64, 600, 2048, 40960]))
@settings(max_examples=150, deadline=None)
def test_no_step_is_beyond_the_prefill_profile(data: st.DataObject, gqa: int, length: int) -> None:
    sequences = data.draw(st.integers(1, 24))
    tokens = data.draw(st.integers(sequences, 300))
    limits = prefill_limits(sequences, tokens, length=length, gqa=gqa, group_size=GROUP)
    steps: list[tuple[int, int]] = []
    left = tokens
    for _ in range(sequences):
        if left:
            new = data.draw(st.one_of(st.integers(1, left), st.integers(1, min(left, 20))))
            new = min(new, length)
            steps.append((data.draw(st.one_of(st.integers(0, length - new), st.just(length - new))), new))
            left -= new
    assert_within(make_schedule(batch(steps), gqa, 1, GROUP), limits)


@pytest.mark.parametrize("new", [1, 5, 17, 33, 64, 65, 300])
def test_the_worst_steps_are_within_the_prefill_profile(new: int) -> None:
    """Every sequence as long as can be, all with as many new tokens."""
    for gqa in (1, 4, 16):
        sequences, tokens, length = 64 // new + 4, 320, 8192
        limits = prefill_limits(sequences, tokens, length=length, gqa=gqa, group_size=GROUP)
        steps = [(length - new, new)] * min(sequences, tokens // new)
        assert_within(make_schedule(batch(steps), gqa, 1, GROUP), limits)


@given(st.lists(st.integers(0, 8191), min_size=1, max_size=40), st.sampled_from([1, 4, 20]))
@settings(max_examples=50, deadline=None)
def test_no_decode_step_is_beyond_the_decode_profile(past: list[int], gqa: int) -> None:
    limits = decode_limits(len(past), length=8192, group_size=GROUP)
    assert_within(make_schedule(batch([(stored, 1) for stored in past]), gqa, 1, GROUP), limits)


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        (
            {"max_tokens_per_step": 2**23},
            r"max_tokens_per_step .*: got 8388608, expected at most 8388607 with .* 256 wide",
        ),
        ({"max_sequences": 8355968, "max_tokens_per_step": 8355968}, r"max_sequences .*expected at most 8355967 with"),
    ],
)
def test_limits_beyond_what_tensorrt_counts_are_refused(serving: dict[str, int], message: str) -> None:
    recipe = Recipe("r", ModelSource("folder", "m"), kv_cache=KIVI2, serving=ServingConfig(**serving))
    with pytest.raises(LowkvError, match=message):
        engine_profiles(recipe, CONFIG, CachePlan.from_config(CONFIG, recipe.kv_cache))


def test_profiles_come_from_the_recipe_and_the_model() -> None:
    serving = ServingConfig(max_sequences=8, max_tokens_per_step=100, max_model_len=1000)
    recipe = Recipe("r", ModelSource("folder", "m"), kv_cache=replace(KIVI2, group_size=64), serving=serving)
    prefill, decode = engine_profiles(recipe, CONFIG, CachePlan.from_config(CONFIG, recipe.kv_cache))
    assert (prefill.name, decode.name) == ("prefill", "decode")
    shapes = {name: (smallest, largest) for name, smallest, largest in prefill.ranges()}
    assert list(shapes) == list(INPUTS)
    assert shapes["tokens"] == ((1,), (100,))
    assert shapes["table"] == ((1, 1), (8, 16))
    assert shapes["arena"] == ((1,), (1,))
    assert {name: largest for name, _, largest in decode.ranges()}["tokens"] == (8,)
    # Layers with another window have lists of their own, of the same lengths.
    two = CachePlan.from_config(replace(CONFIG, windows=(None, 40)), recipe.kv_cache)
    for profile in engine_profiles(recipe, CONFIG, two):
        ranges = {name: (smallest, largest) for name, smallest, largest in profile.ranges()}
        assert list(ranges) == [*INPUTS, "sequences.1", "table.1", "appends.1"]
        assert all(ranges[f"{name}.1"] == ranges[name] for name in GROUP_LISTS)
    # No model is longer than itself.
    longer = replace(recipe, kv_cache=KIVI2, serving=ServingConfig(max_model_len=10**6))
    assert engine_profiles(longer, CONFIG, CachePlan.from_config(CONFIG, longer.kv_cache))[0].limits.B == 2048 // 32
