"""The rule at every position of an interval against a limit, and builds that are held to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowkv.engine import EngineDir, build_engine
from lowkv.errors import LowkvError
from lowkv.evaluation import gate
from lowkv.evaluation.gate import RULES, Verdict, check, verdicts
from lowkv.evaluation.intervals import Interval
from lowkv.evaluation.passkey import PasskeyMeasure
from lowkv.evaluation.quality import Documents, TextMeasure
from lowkv.recipe import KVCacheConfig, ModelSource, QualityConfig, Recipe

from .conftest import TEXT

Engines = dict[str, EngineDir]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's own measures, in seconds."""
    monkeypatch.setattr(gate, "TextMeasure", lambda: TextMeasure(256, 256, Documents(TEXT)))
    monkeypatch.setattr(gate, "PasskeyMeasure", lambda: PasskeyMeasure((200,), (0.3,), 1))


@pytest.mark.parametrize(
    ("low", "value", "high", "at_most", "at_least"),
    [
        (0.1, 0.2, 0.3, "surely held", "surely broken"),
        (0.1, 0.4, 0.5, "surely held", "probably broken"),
        (0.1, 0.4, 0.6, "probably held", "probably broken"),
        (0.4, 0.5, 0.6, "probably held", "probably held"),  # the limit itself is allowed
        (0.4, 0.6, 0.7, "probably broken", "probably held"),
        (0.5, 0.6, 0.7, "probably broken", "surely held"),
        (0.6, 0.7, 0.8, "surely broken", "surely held"),
    ],
)
def test_the_rule_at_a_limit_of_a_half(low: float, value: float, high: float, at_most: str, at_least: str) -> None:
    assert Verdict("kl", Interval(value, low, high), 0.5, at_most=True).words == at_most
    assert Verdict("top1", Interval(value, low, high), 0.5, at_most=False).words == at_least


def test_every_limit_that_a_recipe_can_set_has_a_rule() -> None:
    limits = QualityConfig(perplexity_ratio=1.02, kl=0.01, top1=0.9, passkey=0.9).limits
    assert set(limits) == set(RULES)


def test_verdicts_say_which_limit_what_was_got_and_what_is_allowed() -> None:
    figures = {
        "ratio": {"value": 1.2, "low": 1.1, "high": 1.3},
        "passkey": {"value": 0.95, "low": 0.76, "high": 0.99},
    }
    ratio, passkey = verdicts(figures, QualityConfig(perplexity_ratio=1.02, passkey=0.9))
    assert str(ratio) == "perplexity_ratio 1.2000 [1.1000, 1.3000], at most 1.02 allowed: surely broken"
    assert str(passkey) == "passkey 0.9500 [0.7600, 0.9900], at least 0.9 allowed: probably held"
    assert ratio.to_mapping()["broken"] is True
    assert passkey.to_mapping()["broken"] is False


@pytest.mark.usefixtures("quick")
def test_an_engine_is_checked_with_the_measures_that_its_limits_need(build_tiny: Callable[..., Path]) -> None:
    engine = EngineDir.open(build_tiny({"format": "kivi4"}, quality=QualityConfig(perplexity_ratio=100.0)))
    assert [verdict.limit for verdict in check(engine)] == ["perplexity_ratio"]
    strict = QualityConfig(perplexity_ratio=100.0, passkey=1.0)
    with pytest.raises(LowkvError, match=r"engine tiny breaks .*: passkey 0\.0000 .* at least 1 allowed: \w+ broken"):
        check(EngineDir.open(build_tiny({"format": "kivi4"}, quality=strict)))  # a random model finds nothing


def test_no_limits_is_misuse(tiny_engines: Engines) -> None:
    with pytest.raises(LowkvError, match="sets no limits"):
        check(tiny_engines["kivi2"])


def recipe(checkpoint: Path, quality: QualityConfig, **settings: Any) -> Recipe:
    cache = KVCacheConfig(format="kivi2", residual_length=32, sink_tokens=0, budget=8 * 2**20)
    return Recipe("held", ModelSource("folder", str(checkpoint)), kv_cache=cache, quality=quality, **settings)


@pytest.mark.usefixtures("quick")
def test_a_build_that_requires_quality_publishes_only_what_has_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bad = recipe(tiny_checkpoint, QualityConfig(kl=0.0, required=True))
    with pytest.raises(LowkvError, match=r"breaks the limits .* kl .* at most 0 allowed"):
        build_engine(bad, tmp_path / "bad")
    assert list(tmp_path.iterdir()) == []  # nothing is left, hidden or not
    good = build_engine(recipe(tiny_checkpoint, QualityConfig(kl=100.0, required=True)), tmp_path / "good")
    assert good.path == tmp_path / "good"
    unheld = build_engine(recipe(tiny_checkpoint, QualityConfig(kl=0.0)), tmp_path / "unheld")
    assert unheld.recipe.quality.limits == {"kl": 0.0}


def test_a_build_for_what_cannot_be_measured_here_is_refused_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from lowkv.recipe import WeightsConfig

    unmeasured = recipe(
        tiny_checkpoint, QualityConfig(kl=0.1, required=True), target="tensorrt", weights=WeightsConfig("float16")
    )
    with pytest.raises(LowkvError, match="no weights that Torch could load: got 'target tensorrt'"):
        build_engine(unmeasured, tmp_path / "engine")
