"""What `kv_cache.format: auto` stands for, alone and through a build."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.twin import write_twin
from lowkv.calibration import auto, probe
from lowkv.calibration.auto import COSTS, LIMIT, choose
from lowkv.cli import main
from lowkv.engine import build_engine
from lowkv.kvcache.plan import CachePlan
from lowkv.models.checkpoint import open_checkpoint
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ScalesConfig, ServingConfig


@dataclass(frozen=True)
class Geometry:
    """A model of four layers."""

    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    softmax_scale: float = 0.125
    windows: tuple[int | None, ...] = (None,) * 4


LONG = 8192
SHORT = 200
CALM = dict.fromkeys(range(4), 5.0)
WILD = {0: 80.0, 1: 5.0, 2: 90.0, 3: 6.0}


def bits(name: str, length: int, **settings: Any) -> float:
    return CachePlan.from_config(Geometry(), KVCacheConfig(format=name, **settings)).effective_bits(length)


@pytest.mark.parametrize("length", [SHORT, 700, LONG])
def test_the_smallest_of_the_formats_within_the_limit(length: int) -> None:
    choice = choose(Geometry(), KVCacheConfig(), length)
    best = choice.kv_cache.format
    assert COSTS[best] <= LIMIT
    for name, cost in COSTS.items():
        assert cost > LIMIT or bits(name, length) >= bits(best, length)


def test_costs_are_the_worst_of_the_documented_ones() -> None:
    text = (Path(__file__).parents[2] / "docs" / "quality.md").read_text(encoding="utf-8")
    for name, cost in COSTS.items():
        rows = re.findall(rf"^\| \*{{0,2}}{name}\*{{0,2}} \| [0-9.]+ \| ([0-9.]+) \[", text, re.MULTILINE)
        assert len(rows) == 3 - (name == "k4v2")  # two models, and the twin of one
        assert cost == max(map(float, rows))


def test_length_decides() -> None:
    assert choose(Geometry(), KVCacheConfig(), LONG).kv_cache.format == "k4v2plus"
    assert choose(Geometry(), KVCacheConfig(), SHORT).kv_cache.format == "fp8"


def test_what_else_the_recipe_sets_is_kept() -> None:
    asked = KVCacheConfig(group_size=64, sink_tokens=64, skip_layers=("first:1",), overrides={3: "int8"})
    choice = choose(Geometry(), asked, LONG)
    assert choice.kv_cache == replace(asked, format=choice.kv_cache.format)


def test_heads_that_cannot_be_rotated_get_a_format_without_rotation() -> None:
    assert choose(Geometry(head_dim=80), KVCacheConfig(), LONG).kv_cache.format == "kivi4"


def test_outliers_give_an_8_bit_format_scales_per_channel_and_leave_the_others_alone() -> None:
    for length, calm, wild in (
        (SHORT, ScalesConfig(), ScalesConfig(source="dataset", granularity="channel")),
        (LONG, ScalesConfig(), ScalesConfig()),
    ):
        assert choose(Geometry(), KVCacheConfig(), length, CALM).kv_cache.scales == calm
        choice = choose(Geometry(), KVCacheConfig(), length, WILD)
        assert choice.kv_cache.scales == wild
        assert "K has outliers in 2 of 4 layers" in choice.why[1]
        assert "90 times" in choice.why[1]
    assert "K has no outliers" in choose(Geometry(), KVCacheConfig(), LONG, CALM).why[1]


def test_scales_of_the_recipes_own_are_kept() -> None:
    own = KVCacheConfig(scales=ScalesConfig(source="random", granularity="tensor"))
    choice = choose(Geometry(), own, SHORT, WILD)
    assert choice.kv_cache.scales == own.scales
    assert "the recipe's own scales are kept" in choice.why[1]


# -- builds --------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe_of() -> Callable[..., Recipe]:
    def make(folder: Path, **kv: Any) -> Recipe:
        return Recipe(
            "tiny",
            ModelSource("folder", str(folder)),
            kv_cache=KVCacheConfig(**({"budget": 8 * 2**20} | kv)),
            serving=ServingConfig(max_sequences=4, max_tokens_per_step=128, max_model_len=1024),
        )

    return make


def test_a_build_settles_the_format_and_says_why(
    recipe_of: Callable[..., Recipe], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(recipe_of(tiny_checkpoint), tmp_path / "engines" / "one")
    name = engine.recipe.kv_cache.format
    assert name == engine.cache_plan.default != "auto"
    chosen = engine.manifest.chosen
    assert chosen is not None
    assert chosen["why"][0].startswith(f"{name}: ")
    assert len(chosen["outliers"]) == engine.model_config.layers

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was looked at again")

    monkeypatch.setattr(probe, "collect", fail)
    again = build_engine(recipe_of(tiny_checkpoint), tmp_path / "engines" / "one")
    assert again.manifest == engine.manifest
    beside = build_engine(recipe_of(tiny_checkpoint, budget=16 * 2**20), tmp_path / "engines" / "two")
    assert beside.manifest.chosen == chosen


def test_a_twin_with_outliers_is_noticed(
    recipe_of: Callable[..., Recipe], tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = write_twin(open_checkpoint(tiny_checkpoint), tmp_path / "twin")
    engines = {
        name: build_engine(recipe_of(path), tmp_path / name) for name, path in (("o", tiny_checkpoint), ("t", twin))
    }
    outliers = {
        name: np.array(list((engine.manifest.chosen or {})["outliers"].values())) for name, engine in engines.items()
    }
    assert outliers["o"].max() < auto.OUTLIER < outliers["t"].max()
    main_and_exit(["inspect", str(tmp_path / "t")])
    assert "K has outliers" in capsys.readouterr().out


def main_and_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0


def test_an_engine_whose_recipe_names_a_format_records_no_choice(
    recipe_of: Callable[..., Recipe], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    assert build_engine(recipe_of(tiny_checkpoint, format="kivi4"), tmp_path / "e").manifest.chosen is None
