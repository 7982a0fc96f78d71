"""The simulated cache against a golden that goes token by token, and the block rules it must follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvattention import LayerSpec, RecordLayout
from kvattention.codec import f16
from kvattention.reference import as_stored, attention
from lowkv.calibration.scales import KVScales
from lowkv.models.config import ModelConfig
from lowkv.study.configurations import Configuration, Side, grouped, of_format
from lowkv.study.simulation import Cache, SimulatedAttention

TOKENS, HEADS, KV_HEADS, SIZE = 232, 4, 2, 32


def model(window: int | None = None) -> ModelConfig:
    """What the attention of a one-layer model needs to know."""
    config = SimpleNamespace(
        layers=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE, windows=(window,), softmax_scale=SIZE**-0.5
    )
    return cast(ModelConfig, config)


def inputs() -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    generator = np.random.default_rng(0)
    return tuple(generator.normal(size=(TOKENS, n, SIZE)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS))  # type: ignore[return-value]


def simulated(configuration: Configuration, config: ModelConfig, scales: KVScales | None = None) -> Any:
    plan = configuration.plan(config, "float16")
    parts = map(torch.from_numpy, inputs())
    return SimulatedAttention(config, Cache(configuration, plan, scales))(0, *parts).numpy()


def golden(configuration: Configuration, config: ModelConfig, scales: KVScales | None = None) -> Any:
    """Each token alone: its history with exactly the blocks cold that the plan says, then the formula."""
    plan, (q, k, v) = configuration.plan(config, "float16"), inputs()
    hot = RecordLayout(f16, f16, KV_HEADS, SIZE, plan.group_size)
    cold = RecordLayout(configuration.k.kind, configuration.v.kind, KV_HEADS, SIZE, plan.group_size)
    pair = (np.ones((), np.float32),) * 2 if scales is None else scales.layers[0]
    layer = LayerSpec(hot, cold, k_scales=pair[0], v_scales=pair[1])
    rows = []
    for at in range(TOKENS):
        sealed = range(plan.groups[0].sink_blocks, plan.groups[0].cold_end(at))
        keys, values = as_stored(layer, k[: at + 1], v[: at + 1], sealed)
        rows.append(
            attention(q[at : at + 1], keys, values, softmax_scale=config.softmax_scale, window=config.windows[0])
        )
    return np.concatenate(rows)


CASES = [
    grouped(2, 2),
    grouped(4, 2, residual_length=32),
    grouped(2, 2, residual_length=32, sink_tokens=32),
    grouped(2, 2, residual_length=128, sink_tokens=64),
    grouped(2, 2, group_size=64, residual_length=64),
    grouped(4, 4, group_size=128),
    of_format("fp16"),
]


@pytest.mark.parametrize("configuration", CASES, ids=lambda one: one.name)
@pytest.mark.parametrize("window", [None, 50])
def test_a_text_in_one_call_is_the_text_token_by_token(configuration: Configuration, window: int | None) -> None:
    config = model(window)
    found = simulated(configuration, config)
    # float32 sums of some hundred terms of order one against float64
    np.testing.assert_allclose(found, golden(configuration, config), atol=2e-6)


def test_static_scales_take_part() -> None:
    config, configuration = model(), Configuration(Side("int8", "channel"), Side("int8", "token"), granularity="head")
    generator = np.random.default_rng(1)
    pair = (
        generator.uniform(0.01, 0.05, (KV_HEADS, SIZE)).astype(np.float32),
        generator.uniform(0.01, 0.05, KV_HEADS).astype(np.float32),
    )
    scales = KVScales("dataset", "channel", "amax", (pair,))
    np.testing.assert_allclose(
        simulated(configuration, config, scales), golden(configuration, config, scales), atol=2e-6
    )


def test_rotated_values_are_quantized_in_another_basis_and_come_back() -> None:
    config = model()
    turned, plain = (grouped(4, 2, rotate_values=rotate) for rotate in (True, False))
    assert (turned.row, plain.row) == (of_format("k4v2plus").row, of_format("k4v2").row)
    exact = simulated(of_format("fp16"), config)
    errors = [np.linalg.norm(simulated(one, config) - exact) / np.linalg.norm(exact) for one in (turned, plain)]
    assert 0.05 < errors[0] < 0.5
    assert errors[0] != errors[1]


def test_axes_that_no_format_serves_keep_the_block_rules() -> None:
    """Only the first 96 tokens are ever cold with R = 128: queries up to then, and one block more, see none of them."""
    config = model()
    exact = simulated(of_format("fp16"), config)
    found = simulated(grouped(2, 2, "token", "channel", residual_length=128), config)
    np.testing.assert_array_equal(found[:160], exact[:160])
    assert (np.abs(found[160:] - exact[160:]).max(axis=(1, 2)) > 0.01).all()
