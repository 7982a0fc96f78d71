"""The payload of the Torch targets: what is written for a recipe's weights, and that it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from kvattention import select
from lowkv.engine import EngineDir, build_engine
from lowkv.engine.targets import find_target
from lowkv.errors import LowkvError
from lowkv.kvcache import KVCache
from lowkv.models.checkpoint import WeightsFormat, open_checkpoint
from lowkv.models.decoder import Decoder
from lowkv.models.quantized import assembled
from lowkv.recipe import KVCacheConfig, LmHeadConfig, ModelSource, Recipe, WeightsConfig
from lowkv.serving.torch_executor import TorchExecutor

FORMS: dict[str, dict[str, Any]] = {
    "int4": {"quantization": "int4", "group_size": 32},
    "int4-64": {"quantization": "int4", "group_size": 64},
    "fp8": {"quantization": "fp8"},
}


@pytest.fixture
def recipe(tiny_checkpoint: Path) -> Recipe:
    return Recipe(
        "tiny",
        ModelSource("folder", str(tiny_checkpoint)),
        kv_cache=KVCacheConfig(format="kivi2", residual_length=32, sink_tokens=0),
    )


def serve(engine: EngineDir, decoder: Decoder, steps: list[list[int]]) -> list[np.ndarray]:
    """Logits of one sequence that is fed step by step."""
    cache = KVCache(engine.cache_plan, 2**23, select("cpu"))
    executor, sequence, logits = TorchExecutor(decoder, cache), cache.add(), []
    for tokens in steps:
        step = cache.prepare([(sequence, len(tokens))])
        logits.append(executor.logits(np.array(tokens), step, np.arange(len(tokens))).numpy())
        cache.commit(step)
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_an_engine_with_quantized_weights_serves_them(recipe: Recipe, tmp_path: Path, form: str, dtype: str) -> None:
    recipe = replace(recipe, weights=WeightsConfig(dtype, **FORMS[form]), lm_head=LmHeadConfig("float32"))
    engine = build_engine(recipe, tmp_path / "engine")
    opened = EngineDir.open(engine.path)
    decoder = opened.load_decoder()
    assert (str(decoder.dtype), str(decoder.head_dtype)) == (f"torch.{dtype}", "torch.float32")
    config = opened.model_config
    weights = WeightsFormat.from_recipe(recipe)
    direct = Decoder(config, assembled(dict(weights.tensors(open_checkpoint(Path(recipe.model.spec))))))
    steps = [list(range(100)), [7], [9, 11], [3]]  # three blocks are sealed to 2 bits on the way
    for got, expected in zip(serve(opened, decoder, steps), serve(opened, direct, steps), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_payload_is_as_large_as_was_said(recipe: Recipe, tmp_path: Path, form: str) -> None:
    recipe = replace(recipe, weights=WeightsConfig("float16", **FORMS[form]))
    engine = build_engine(recipe, tmp_path / "engine")
    said = find_target("cpu").payload_bytes(open_checkpoint(Path(recipe.model.spec)), recipe)
    file = engine.path / "weights.safetensors"
    assert 0 <= file.stat().st_size - said < 2 * 4096  # the header, to the end of its page
    with safe_open(file, "pt") as opened:
        names = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 # it has no __iter__
        assert names["layers.0.qkv.codes"].get_dtype() == ("F8_E4M3" if form == "fp8" else "U8")
        assert names["lm_head"].get_dtype() == "F32"
        assert names["layers.1.mlp_norm"].get_dtype() == "F16"


def test_engines_share_weights_only_when_they_are_rounded_alike(recipe: Recipe, tmp_path: Path) -> None:
    inodes = []
    for index, weights in enumerate([{}, {"group_size": 32}, FORMS["int4"], FORMS["int4-64"], FORMS["fp8"]]):
        engine = build_engine(replace(recipe, weights=WeightsConfig("float32", **weights)), tmp_path / str(index))
        inodes.append((engine.path / "weights.safetensors").stat().st_ino)
    assert inodes[0] == inodes[1]  # a group size that nothing uses
    assert len(set(inodes)) == 4


def test_groups_that_do_not_divide_the_model_are_refused_before_anything_is_written(
    recipe: Recipe, tmp_path: Path
) -> None:
    recipe = replace(recipe, weights=WeightsConfig("float32", "int4", 128))
    with pytest.raises(LowkvError, match=r"do not divide the model's hidden: .* use weights\.group_size 32 or 64"):
        build_engine(recipe, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_decoders_are_loaded_to_a_device(recipe: Recipe, tmp_path: Path) -> None:
    engine = build_engine(recipe, tmp_path / "engine")
    target: Any = find_target("cpu")
    assert target.load_decoder(engine.path, engine.model_config, device="cpu").device == torch.device("cpu")
