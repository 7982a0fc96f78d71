"""Recipes of the tiny model for TensorRT, one for every kind of engine, and their exported networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lowkv.engine.progress import NoProgress
from lowkv.kvcache.plan import CachePlan
from lowkv.models.checkpoint import Checkpoint, open_checkpoint
from lowkv.models.config import ModelConfig
from lowkv.models.sources import open_source
from lowkv.recipe import (
    KVCacheConfig,
    ModelSource,
    Recipe,
    ScalesConfig,
    ServingConfig,
    TensorRTConfig,
    WeightsConfig,
    load_recipe,
)

KV_CACHES: dict[str, dict[str, Any]] = {
    "fp16": {"format": "fp16"},
    "fp8": {"format": "fp8"},
    "k4v2": {"format": "k4v2"},
    "kivi2": {"format": "kivi2"},
    "mixed": {"format": "kivi2", "skip_layers": (0,), "overrides": {1: "kivi4"}},
    "int4-kivi2": {"format": "kivi2"},
    "fp8-query": {"format": "fp8", "fp8_query": True},
    "fp8-weights": {"format": "fp8"},
    "fp8-channels": {"format": "fp8", "scales": ScalesConfig("random", "channel", tokens=64)},
    "kivi2plus": {"format": "kivi2plus"},
}

QUANTIZATIONS: dict[str, Any] = {"int4-kivi2": "int4", "fp8-weights": "fp8"}


@pytest.fixture(scope="session")
def tensorrt_recipe(tiny_checkpoint: Path) -> Callable[..., Recipe]:
    """tensorrt_recipe("kivi2", sm=80): the recipe of that engine."""

    def recipe(name: str, sm: int = 89) -> Recipe:
        return Recipe(
            name="tiny",
            model=ModelSource("folder", str(tiny_checkpoint)),
            weights=WeightsConfig("float16", QUANTIZATIONS.get(name, "none"), 32),
            kv_cache=KVCacheConfig(budget=8 * 2**20, **KV_CACHES[name]),
            serving=ServingConfig(max_sequences=8, max_tokens_per_step=64, max_model_len=1024),
            target="tensorrt",
            tensorrt=TensorRTConfig(sm),
        )

    return recipe


@dataclass(frozen=True)
class Exported:
    """A network on the disk, and what it was made from."""

    onnx: Path
    recipe: Recipe
    config: ModelConfig
    plan: CachePlan

    @classmethod
    def of(cls, checkpoint: Checkpoint, recipe: Recipe, folder: Path) -> Exported:
        from lowkv.engine.tensorrt.export import export_onnx

        plan = CachePlan.from_config(checkpoint.config, recipe.kv_cache)
        onnx = export_onnx(checkpoint, checkpoint.config, plan, recipe, folder / "model.onnx", NoProgress())
        return cls(onnx, recipe, checkpoint.config, plan)

    def build(self, out: Path, sm: int = 89, **changes: Any) -> dict[str, Any]:
        """Builds it as `lowkv build` does, kernels aside; returns the report."""
        from lowkv.engine.tensorrt.backend import choose_backend
        from lowkv.engine.tensorrt.builder import build_plan

        values: dict[str, Any] = {"onnx": self.onnx, "recipe": self.recipe, "plan": self.plan, "progress": NoProgress()}
        values |= changes
        return build_plan(out=out, config=self.config, backend=choose_backend(sm)[0], sm=sm, **values)


@pytest.fixture(scope="session")
def exported(
    tensorrt_recipe: Callable[..., Recipe], tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Exported]:
    """exported("kivi2"): that engine's network, exported the first time it is asked for."""
    found: dict[str, Exported] = {}

    def export(name: str) -> Exported:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            found[name] = Exported.of(open_checkpoint(tiny_checkpoint), tensorrt_recipe(name), folder)
        return found[name]

    return export


@pytest.fixture(scope="session")
def export_smollm2(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """export_smollm2("smollm2-kivi2-tensorrt", format="fp8"): the network of that recipe, its kv_cache changed."""

    def export(name: str, **kv_cache: Any) -> Exported:
        recipe = load_recipe(root / "build" / "recipes" / f"{name}.yaml")
        recipe = replace(recipe, kv_cache=replace(recipe.kv_cache, **kv_cache))
        return Exported.of(open_source(recipe.model), recipe, tmp_path_factory.mktemp(name))

    return export
