"""The plan's arithmetic: bytes against hand-computed figures, block rules against a token-by-token model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lowkv.errors import LowkvError
from lowkv.kvcache import FORMATS, CachePlan

# SmolLM2-135M: 30 layers x 3 KV heads x 64 channels, K and V.
VALUES_PER_TOKEN = 2 * 30 * 3 * 64
BITS = {"fp16": 16, "bf16": 16, "fp8": 8, "fp8_e5m2": 8, "int8": 8, "kivi4": 5}
BITS |= {"k4v2": 4, "k4v2plus": 4, "kivi2": 3, "kivi2plus": 3}


def test_every_format_has_a_known_cost() -> None:
    assert list(FORMATS) == list(BITS)


def test_what_else_a_format_asks_for() -> None:
    assert [name for name, row in FORMATS.items() if row.needs_scales] == ["fp8", "fp8_e5m2", "int8"]
    assert [name for name, row in FORMATS.items() if row.rotate_values] == ["k4v2plus", "kivi2plus"]


@pytest.mark.parametrize("name", FORMATS)
def test_sealed_bits_per_value(make_plan: Any, name: str) -> None:
    """Codes plus one 32-bit (scale, min) word per 32 values where the codec is grouped."""
    plan = make_plan(name)
    assert plan.values_per_token == VALUES_PER_TOKEN
    assert plan.effective_bits() == BITS[name]
    assert plan.bytes_per_token == VALUES_PER_TOKEN * BITS[name] / 8


@pytest.mark.parametrize("tokens", [512, 1024, 4096, 16384])
def test_compression_counts_the_residual(make_plan: Any, tokens: int) -> None:
    """R = 128, g = 32, no sink: 128 tokens at 16 bit, the others at 3; never the 8x that 2 bit suggest."""
    plan = make_plan("kivi2", sink_tokens=0)
    assert plan.compression(tokens) == pytest.approx(16 * tokens / (128 * 16 + (tokens - 128) * 3))
    assert plan.effective_bits(tokens) == pytest.approx(16 / plan.compression(tokens))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("residual", "length", "sink"),
    [
        ("window", 0, 0),
        ("window", 32, 32),
        ("window", 128, 32),
        ("window", 128, 0),
        ("window", 64, 64),
        ("flush", 32, 32),
        ("flush", 128, 32),
        ("flush", 128, 0),
        ("flush", 64, 64),
    ],
)
def test_residual_and_sink_are_never_cold(make_plan: Any, name: str, residual: str, length: int, sink: int) -> None:
    (plan,) = make_plan(name, residual=residual, residual_length=length, sink_tokens=sink).groups
    previous = 0
    for tokens in range(1, 700):
        cold = range(plan.sink_blocks, plan.cold_end(tokens))
        assert plan.cold_end(tokens) >= previous
        previous = plan.cold_end(tokens)
        if not plan.seals:
            assert len(cold) == 0
            continue
        assert len(cold) == 0 or cold.stop * 32 <= tokens, "only whole blocks are sealed"
        hot_tail = tokens - plan.cold_end(tokens) * 32
        if residual == "window":
            assert hot_tail >= min(length, tokens - sink), "the newest tokens are hot"
            assert hot_tail < length + 32 or plan.cold_end(tokens) == plan.sink_blocks
        else:
            assert hot_tail < length or plan.cold_end(tokens) == plan.sink_blocks, "the buffer never exceeds R"
        hot, cold_blocks = plan.resident(tokens)
        assert hot + cold_blocks == -(-tokens // 32)
        assert cold_blocks == len(cold)


def test_blocks_out_of_every_window_are_dropped(make_plan: Any) -> None:
    (group,) = make_plan("fp16", window=100).groups
    for tokens in range(1, 500):
        first_visible = max(0, tokens - 100 + 1)
        assert group.dead_end(tokens) == first_visible // 32
        assert sum(group.resident(tokens)) == -(-tokens // 32) - first_visible // 32
        assert group.alive(tokens) == range(first_visible // 32, -(-tokens // 32))


def test_layers_with_the_same_window_are_a_group(make_plan: Any) -> None:
    plan = make_plan("kivi2", layers=7, window=(100, 100, None), overrides={2: "fp8"}, skip_layers=(6,))
    assert [(group.window, group.layers) for group in plan.groups] == [(100, (0, 1, 3, 4, 6)), (None, (2, 5))]
    assert plan.group_of == (0, 0, 1, 0, 0, 1, 0)
    hot, sealed = plan.hot_record.bytes, {name: make_plan(name, layers=1).cold_block_bytes for name in FORMATS}
    assert plan.block_bytes == (5 * hot, 4 * sealed["kivi2"] + hot, 2 * hot, sealed["fp8"] + sealed["kivi2"])
    assert (plan.hot_block_bytes, plan.cold_block_bytes) == (7 * hot, plan.block_bytes[1] + plan.block_bytes[3])
    # 1 sink and 4 residual blocks of 10 + 32 tokens; with the window, blocks 28 and later.
    assert plan.resident(1000) == (4, 0, 6, 26)
    assert plan.bytes_at(1000) == 4 * 5 * hot + 6 * 2 * hot + 26 * plan.block_bytes[3]
    assert plan.bytes_saved_by_windows(1000) == 6 * 5 * hot + 26 * plan.block_bytes[1] - 4 * 5 * hot
    assert plan.compression(1000) == pytest.approx((4 * 5 + 32 * 2) * hot / plan.bytes_at(1000))


def test_a_group_in_model_precision_never_seals(make_plan: Any) -> None:
    plan = make_plan("kivi2", layers=6, window=(100,) * 5 + (None,), skip_layers=("sliding_window",))
    sliding, full = plan.groups
    assert (sliding.seals, full.seals, plan.seals) == (False, True, True)
    assert (sliding.residual_length, sliding.sink_tokens) == (0, 0)
    assert all(sliding.resident(tokens)[1] == 0 for tokens in range(1, 500))
    assert full.resident(500) == (6, 10)


def test_skip_layers_and_overrides(make_plan: Any) -> None:
    plan = make_plan("kivi2", skip_layers=(0, "28-29"), overrides={5: "fp8", 6: "kivi4"})
    formats = [layer.format for layer in plan.layers]
    assert [formats[index] for index in (0, 1, 5, 6, 28, 29)] == ["fp16", "kivi2", "fp8", "kivi4", "fp16", "fp16"]
    assert plan.summary() == "fp16 x3 + kivi2 x25 + fp8 x1 + kivi4 x1"
    assert plan.effective_bits() == pytest.approx((3 * 16 + 25 * 3 + 8 + 5) / 30)
    assert plan.scale_bytes == 3 * (64 + 1) * 4  # of one layer: for every channel of K, and every head of V


def test_the_ends_of_a_model_are_named_by_count(make_plan: Any) -> None:
    plan = make_plan("kivi2", skip_layers=("first:2", "last:1"))
    skipped = {index: layer.reason for index, layer in enumerate(plan.layers) if layer.format == "fp16"}
    assert skipped == {0: "skip_layers: first:2", 1: "skip_layers: first:2", 29: "skip_layers: last:1"}


def test_layers_lie_end_to_end_in_a_block(make_plan: Any) -> None:
    plan = make_plan("kivi2", window=(64, None, None), skip_layers=(1,), overrides={3: "k4v2"})
    specs = plan.layer_specs()
    for group in plan.groups:
        hot = cold = 0
        for spec in (specs[layer] for layer in group.layers):
            assert (spec.hot_offset, spec.cold_offset, spec.window) == (hot, cold, group.window)
            hot, cold = hot + spec.hot.words, cold + spec.cold.words
        assert (hot * 4, cold * 4) == (group.hot_block_bytes, group.cold_block_bytes)


def test_scales_go_to_the_layers(make_plan: Any) -> None:
    plan = make_plan("int8")
    rng = np.random.default_rng(0)
    per_channel, per_head, values = (rng.random(shape).astype(np.float32) for shape in ((3, 64), 3, 3))
    specs = plan.layer_specs([(per_channel, values), (per_head, values), *[(per_head, values)] * 28])
    np.testing.assert_array_equal(specs[0].k_scales, per_channel)
    np.testing.assert_array_equal(specs[1].k_scales, np.repeat(per_head[:, None], 64, axis=1))
    np.testing.assert_array_equal(specs[1].v_scales, values)
    assert sum(spec.k_scales.nbytes + spec.v_scales.nbytes for spec in specs) == plan.scale_bytes


def test_mapping_round_trip(make_plan: Any) -> None:
    plan = make_plan("k4v2", skip_layers=("0-1",), residual="flush", window=512)
    assert CachePlan.from_mapping(json.loads(json.dumps(plan.to_mapping()))) == plan


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip_layers": (30,)}, r"skip_layers: 30: no such layer: got 30, expected 0 to 29"),
        ({"overrides": {99: "fp8"}}, r"overrides: 99: no such layer"),
        ({"skip_layers": ("first:31",)}, r"skip_layers: first:31: no such layer"),
        ({"skip_layers": ("sliding_window",)}, "matches no layer"),
        ({"overrides": {1: "bf16"}}, "layer 1 asks for bf16, but hot blocks are fp16"),
        ({"head_dim": 72}, "head_dim must be a multiple of 16"),
    ],
)
def test_what_cannot_be_is_refused(make_plan: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LowkvError, match=message):
        make_plan("kivi2", **settings)
