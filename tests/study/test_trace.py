"""Statistics and errors of made-up keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from lowkv.models.config import ModelConfig
from lowkv.study.configurations import grouped, of_format
from lowkv.study.simulation import Cache, attend
from lowkv.study.trace import BINS, ROWS, Trace, errors, spots_of, statistics

TOKENS, KV_HEADS, SIZE = 300, 2, 32
CONFIG = cast(
    ModelConfig,
    SimpleNamespace(layers=2, heads=2, kv_heads=KV_HEADS, head_dim=SIZE, windows=(None, 64), softmax_scale=SIZE**-0.5),
)


@pytest.fixture(scope="module")
def seen() -> Trace:
    """Two layers of noise; in the second one channel of one K head is large, and one token of V."""
    generator = torch.Generator().manual_seed(0)
    k, v = ([torch.randn(TOKENS, KV_HEADS, SIZE, generator=generator).half() for _ in range(2)] for _ in range(2))
    k[1][:, 1, 5] += 30
    v[1][7] *= 25
    spots = spots_of(TOKENS)
    q = [torch.randn(len(spots), ROWS, KV_HEADS, SIZE, generator=generator) for _ in range(2)]
    out = [
        torch.stack(
            [
                attend(rows, keys.float().transpose(0, 1), values.float().transpose(0, 1), spot, window, SIZE**-0.5)
                for rows, spot in zip(queries, spots, strict=True)
            ]
        )
        for queries, keys, values, window in zip(q, k, v, CONFIG.windows, strict=True)
    ]
    return Trace(CONFIG, torch.zeros(0), spots, k, v, q, out)


def test_statistics_see_the_channel_and_the_token(seen: Trace) -> None:
    found = statistics(seen)
    plain, special = found["k"]
    assert plain["outlier"] < 1.3
    assert special["outlier"] == pytest.approx(30 / 0.8, rel=0.1)
    assert special["head"] == 1
    channel = special["channel"]
    assert max(range(KV_HEADS * SIZE), key=channel["mean"].__getitem__) == SIZE + 5
    assert channel["mean"][0] < channel["p99"][0] < channel["max"][0]
    assert found["v"][1]["token_outlier"] > 10 > found["v"][0]["token_outlier"]
    assert len(found["v"][1]["token"]["max"]) == BINS
    largest = found["v"][1]["token"]["max"]
    assert sorted(largest)[-2] < 10 < largest[7 // -(-TOKENS // BINS)]  # the first bins have a token more
    assert (len(special["map"]), len(special["map"][0])) == (BINS, SIZE)


def cost(seen: Trace, **settings: int) -> dict[str, list[float]]:
    chosen = grouped(2, 2, **settings)
    return errors(seen, Cache(chosen, chosen.plan(CONFIG, "float16")))


def test_errors_of_layers(seen: Trace) -> None:
    exact = of_format("fp16")
    found = errors(seen, Cache(exact, exact.plan(CONFIG, "float16")))
    assert found["k"] == found["v"] == [0.0, 0.0]
    assert max(found["output"]) < 1e-5
    rough = cost(seen)
    assert 0.2 < rough["k"][0] < 0.4
    assert rough["k"][1] < 0.15  # the large channel is most of the norm, and has scales of its own
    assert rough["output"][0] > 0.05
    kept = cost(seen, residual_length=64)
    assert kept["output"][1] == pytest.approx(0, abs=1e-5)  # all that the window shows is in the residual
    assert 0 < kept["output"][0] < rough["output"][0]


def test_spots_begin_where_every_group_begins() -> None:
    assert spots_of(2048) == (128, 384, 640, 896, 1152, 1408, 1664, 1920)
    assert spots_of(256) == (128,)
    with pytest.raises(ValueError, match="too short; expected at least 160"):
        spots_of(159)
