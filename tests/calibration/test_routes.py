"""Every route from a recipe to scales, through a build; and that what an engine records is what its kernels use."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvattention import CODECS
from kvattention.codec import decode_plain, encode_plain
from lowkv.calibration import probe, routes
from lowkv.calibration.scales import KVScales
from lowkv.cli import main
from lowkv.engine import EngineDir, build_engine
from lowkv.engine.directory import MANIFEST, read_manifest
from lowkv.engine.inspection import inspect_engine
from lowkv.errors import LowkvError
from lowkv.models.dense import DenseAttention
from lowkv.models.safetensors_checkpoint import SafetensorsCheckpoint
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ScalesConfig, ServingConfig, WeightsConfig
from lowkv.serving.executor import open_executor

TEXT = "The keys and values of a sentence are what the tokens after it will read. " * 20


@pytest.fixture
def recipe_of(tiny_checkpoint: Path) -> Callable[..., Recipe]:
    """recipe_of(source="random", ...): the tiny model with FP8 keys and values, scales as given."""

    def make(format: str = "fp8", target: str = "cpu", **scales: Any) -> Recipe:  # noqa: A002
        return Recipe(
            "tiny",
            ModelSource("folder", str(tiny_checkpoint)),
            weights=WeightsConfig("float32" if target == "cpu" else "float16"),
            kv_cache=KVCacheConfig(format=format, scales=ScalesConfig(**({"tokens": 256} | scales)), budget=8 * 2**20),
            serving=ServingConfig(max_sequences=4, max_tokens_per_step=128, max_model_len=1024),
            target=target,
        )

    return make


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A growing list of the tokens of every run of the model."""
    counted: list[int] = []
    collect = probe.collect

    def counting(decoder: Any, windows: Any, **settings: Any) -> Any:
        counted.append(sum(map(len, windows)))
        return collect(decoder, windows, **settings)

    monkeypatch.setattr(probe, "collect", counting)
    return counted


def scales_in(engine: EngineDir) -> KVScales:
    assert engine.scales is not None
    return engine.scales


# -- routes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
@pytest.mark.parametrize("estimator", ["amax", "percentile", "mse"])
def test_random_tokens_give_scales_of_every_granularity(
    recipe_of: Callable[..., Recipe], tmp_path: Path, granularity: str, estimator: str
) -> None:
    recipe = recipe_of(source="random", granularity=granularity, estimator=estimator, seed=3)
    scales = scales_in(build_engine(recipe, tmp_path / "engine"))
    assert (scales.source, scales.granularity, scales.estimator) == ("random", granularity, estimator)
    assert {"text": "random tokens", "tokens": 256, "seed": 3}.items() <= scales.details.items()
    for layer, (k, v) in enumerate(scales.layers):
        different = {"tensor": (1, 1), "head": (2, 2), "channel": (32, 2)}[granularity]
        if estimator == "mse":  # on a grid, where numbers may meet
            assert 1 <= len(np.unique(v)) <= different[1] * len(np.unique(k)) <= different[1] * different[0]
        else:
            assert (len(np.unique(k)), len(np.unique(v))) == different
        for part, values in (("k", k), ("v", v)):
            largest = scales.details[f"largest_{part}"][layer]
            if estimator == "amax":
                assert values.max() == np.float32(np.float32(largest) / 448)
            assert largest / 448 / 4 < values.max() <= largest / 448 * 2


def test_the_seed_and_the_tokens_matter_and_nothing_else_does(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    def layers(folder: str, **settings: Any) -> Any:
        return build_engine(recipe_of(source="random", **settings), tmp_path / folder / "e").manifest.scales["layers"]

    first = layers("a")
    assert layers("b") == first
    assert layers("c", seed=1) != first
    assert layers("d", tokens=512) != first


def test_a_text_of_ones_own(recipe_of: Callable[..., Recipe], tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    recipe = recipe_of(source="dataset", text="text.txt")
    recipe = replace(recipe, model=ModelSource("folder", str(tiny_checkpoint), base=tmp_path))  # beside the recipe
    scales = scales_in(build_engine(recipe, tmp_path / "engines" / "one"))
    assert scales.details["text"] == "text.txt"
    assert len(scales.details["text_sha256"]) == 64
    assert "text.txt" in (tmp_path / "engines" / "one" / MANIFEST).read_text()
    (tmp_path / "text.txt").write_text(TEXT.upper())
    other = scales_in(build_engine(recipe, tmp_path / "engines" / "two"))
    assert other.details["text_sha256"] != scales.details["text_sha256"]
    assert not np.array_equal(other.layers[0][0], scales.layers[0][0])
    with pytest.raises(LowkvError, match="holds another engine"):
        build_engine(recipe, tmp_path / "engines" / "one")
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(LowkvError, match=r"too short: text\.txt: got '5 tokens'"):
        build_engine(recipe, tmp_path / "engines" / "three")


def test_no_scales_are_one_with_a_warning_that_says_what_was_seen(
    recipe_of: Callable[..., Recipe], tmp_path: Path, caplog: pytest.LogCaptureFixture, runs: list[int]
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build_engine(recipe_of(), tmp_path / "engine")
    scales = scales_in(engine)
    assert scales.source == "none"
    assert all(np.all(part == 1) for pair in scales.layers for part in pair)
    assert runs == [256]
    warning = caplog.messages[-1]
    for part in ("k", "v"):
        largest = scales.details[f"largest_{part}"]
        layer = int(np.argmax(largest))
        assert f"|{part.upper()}| {largest[layer]:.4g} (layer {layer})" in warning
    assert "e4m3 holds up to 448" in warning
    caplog.clear()
    build_engine(recipe_of(), tmp_path / "engine")
    assert "scale 1.0" in caplog.messages[-1]
    assert runs == [256]


def test_formats_that_need_no_scales_get_none(
    recipe_of: Callable[..., Recipe], tmp_path: Path, caplog: pytest.LogCaptureFixture, runs: list[int]
) -> None:
    engine = build_engine(recipe_of(format="kivi2", source="random"), tmp_path / "engine")
    assert engine.scales is None
    assert engine.manifest.scales == {"source": "none", "layers": None}
    assert runs == []
    assert caplog.messages == []


@pytest.mark.parametrize("source", ["none", "random"])
def test_integers_without_scales_are_refused(recipe_of: Callable[..., Recipe], tmp_path: Path, source: str) -> None:
    recipe = recipe_of(format="int8", source=source)
    if source == "random":
        scales = scales_in(build_engine(recipe, tmp_path / "engine"))
        assert scales.layers[1][1].max() == pytest.approx(scales.details["largest_v"][1] / 127)
    else:
        with pytest.raises(LowkvError, match=r"source none leaves int8 without scales \(K of layer 0\)"):
            build_engine(recipe, tmp_path / "engine")


# -- scales of the checkpoint --------------------------------------------------------------------------------


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> KVScales:
    """Scales that the tiny checkpoint claims to have: .5 for K, 2 for V."""
    pair = np.full((2, 16), 0.5, np.float32), np.full(2, 2.0, np.float32)
    scales = KVScales("checkpoint", "tensor", "", (pair, pair), {"written_by": "a quantizer"})
    monkeypatch.setattr(SafetensorsCheckpoint, "kv_scales", lambda self: scales)
    return scales


@pytest.mark.parametrize(("name", "factor"), [("fp8", 1.0), ("fp8_e5m2", 448 / 57344), ("int8", 448 / 127)])
def test_scales_of_the_checkpoint_are_taken_for_the_plans_codec(
    recipe_of: Callable[..., Recipe], tmp_path: Path, calibrated: KVScales, runs: list[int], name: str, factor: float
) -> None:
    scales = scales_in(build_engine(recipe_of(format=name, source="checkpoint"), tmp_path / "engine"))
    assert (scales.source, scales.details["written_by"], runs) == ("checkpoint", "a quantizer", [])
    for k, v in scales.layers:
        np.testing.assert_array_equal(k, np.float32(0.5) * np.float32(factor))
        np.testing.assert_array_equal(v, np.float32(2.0) * np.float32(factor))


def test_a_checkpoint_whose_scales_say_nothing_is_no_source_for_integers(
    recipe_of: Callable[..., Recipe],
    tmp_path: Path,
    calibrated: KVScales,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unit = replace(KVScales.unit(2, 2, 16), source="checkpoint", details={"warnings": ["all of them are 1.0"]})
    monkeypatch.setattr(SafetensorsCheckpoint, "kv_scales", lambda self: unit)
    with pytest.raises(LowkvError, match=r"source checkpoint, whose scales are all 1\.0, leaves int8 without scales"):
        build_engine(recipe_of(format="int8", source="checkpoint"), tmp_path / "int8")
    build_engine(recipe_of(source="checkpoint"), tmp_path / "fp8")
    assert caplog.messages[-1] == "scales of the checkpoint: all of them are 1.0"


def test_a_checkpoint_without_scales_is_refused(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match=r"carries no scales.*set kv_cache\.scales\.source to dataset or random"):
        build_engine(recipe_of(source="checkpoint"), tmp_path / "engine")


def test_a_checkpoint_that_lacks_a_scale_is_refused_by_layer(
    recipe_of: Callable[..., Recipe], tmp_path: Path, calibrated: KVScales, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = replace(calibrated, missing=frozenset({(1, "k")}))
    monkeypatch.setattr(SafetensorsCheckpoint, "kv_scales", lambda self: partial)
    recipe = recipe_of(source="checkpoint")
    with pytest.raises(LowkvError, match="layer 1 has no scale for K"):
        build_engine(recipe, tmp_path / "engine")
    build_engine(replace(recipe, kv_cache=replace(recipe.kv_cache, skip_layers=(1,))), tmp_path / "engine")


def test_scales_of_the_checkpoint_that_a_recipe_leaves_aside_are_mentioned(
    recipe_of: Callable[..., Recipe], tmp_path: Path, calibrated: KVScales, caplog: pytest.LogCaptureFixture
) -> None:
    build_engine(recipe_of(), tmp_path / "engine")
    assert "Set the source to checkpoint, which has them" in caplog.messages[-1]


# -- not measured twice --------------------------------------------------------------------------------------


def test_a_build_measures_only_what_no_engine_beside_it_has(
    recipe_of: Callable[..., Recipe], tmp_path: Path, runs: list[int]
) -> None:
    recipe = recipe_of(source="random")
    first = build_engine(recipe, tmp_path / "first")
    before = (first.path / MANIFEST).stat().st_mtime_ns
    build_engine(recipe, tmp_path / "first")
    assert (first.path / MANIFEST).stat().st_mtime_ns == before
    roomier = replace(recipe, kv_cache=replace(recipe.kv_cache, budget=16 * 2**20))
    assert build_engine(roomier, tmp_path / "second").manifest.scales == first.manifest.scales
    assert runs == [256]
    for number, changed in enumerate(
        (
            replace(recipe, kv_cache=replace(recipe.kv_cache, scales=ScalesConfig("random", "channel", tokens=256))),
            replace(recipe, weights=WeightsConfig("float32", "int4", 32)),
            replace(recipe, kv_cache=replace(recipe.kv_cache, skip_layers=(0,))),
            replace(recipe, serving=replace(recipe.serving, max_model_len=512)),
        )
    ):
        build_engine(changed, tmp_path / f"changed-{number}")
        assert len(runs) == 2 + number


def test_a_damaged_neighbour_is_not_asked(recipe_of: Callable[..., Recipe], tmp_path: Path, runs: list[int]) -> None:
    recipe = recipe_of(source="random")
    engine = build_engine(recipe, tmp_path / "first")
    manifest = engine.path / MANIFEST
    manifest.chmod(0o644)
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    build_engine(recipe, tmp_path / "second")
    assert runs == [256, 256]


def test_weights_are_measured_as_the_engine_holds_them(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = recipe_of(source="random")
    rounded = replace(recipe, weights=WeightsConfig("float32", "int4", 32))
    scales = [scales_in(build_engine(r, tmp_path / str(i))) for i, r in enumerate((recipe, rounded))]
    assert not np.array_equal(scales[0].layers[1][0], scales[1].layers[1][0])
    np.testing.assert_allclose(scales[0].layers[1][0], scales[1].layers[1][0], rtol=0.3)


# -- damage --------------------------------------------------------------------------------------------------


def with_scales(engine: EngineDir, change: Callable[[dict[str, Any]], object], out: Path) -> Path:
    """A copy of an engine whose recorded scales are changed, as another lowkv would have written it."""
    shutil.copytree(engine.path, out)
    plain = json.loads(json.dumps(engine.manifest.scales))
    change(plain)
    (out / MANIFEST).chmod(0o644)
    (out / MANIFEST).write_text(replace(read_manifest(out), scales=plain).to_json())
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain["layers"][1]["k"].__setitem__(0, -1.0), "the scale of K of layer 1 is not usable"),
        (lambda plain: plain["layers"][0].pop("v"), "no scale for V of layer 0"),
        (lambda plain: plain["layers"].pop(), "not complete"),
        (lambda plain: plain.update(source="unit", layers=None), "not complete"),
    ],
)
def test_an_engine_with_damaged_scales_is_not_opened(
    recipe_of: Callable[..., Recipe], tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    engine = build_engine(recipe_of(source="random"), tmp_path / "engine")
    with pytest.raises(LowkvError, match=message):
        EngineDir.open(with_scales(engine, change, tmp_path / "damaged"))


def test_inspecting_an_engine_shows_its_scales(
    recipe_of: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = recipe_of(source="random", granularity="channel", estimator="mse")
    recipe = replace(recipe, kv_cache=replace(recipe.kv_cache, skip_layers=(1,)))
    engine = build_engine(recipe, tmp_path / "engine")
    plain = inspect_engine(engine)
    assert plain["engine"]["scales"] == {
        "source": "random",
        "granularity": "channel",
        "estimator": "mse",
        "text": "random tokens",
        "tokens": 256,
        "seed": 0,
    }
    k, v = scales_in(engine).layers[0]
    assert plain["layers"][0]["scales"] == {"k": [k.min(), k.max()], "v": [v.min(), v.max()]}
    assert plain["layers"][1]["scales"] == {}
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["inspect", str(engine.path)])
    shown = capsys.readouterr().out
    assert "source random, granularity channel, estimator mse" in " ".join(shown.split())
    assert f"{k.min():.3g} to {k.max():.3g}" in shown
    without = build_engine(recipe_of(format="kivi2"), tmp_path / "kivi2")
    assert inspect_engine(without)["engine"]["scales"] is None


# -- scales are used -----------------------------------------------------------------------------------------

TOKENS = np.random.default_rng(0).integers(0, 256, 65)
"""Two blocks, which the last token reads as they are stored."""


def logits(path: Path) -> np.ndarray:
    """Of the last of TOKENS, by the executor that serves."""
    executor: Any = open_executor(EngineDir.open(path), threads=1)
    sequence = executor.cache.add()
    for part in (TOKENS[:64], TOKENS[64:]):
        step = executor.cache.prepare([(sequence, len(part))])
        found = executor.logits(np.ascontiguousarray(part), step, np.array([len(part) - 1]))
        executor.cache.commit(step)
    return found[0].numpy()


def expected_logits(engine: EngineDir, scales: KVScales, name: str) -> np.ndarray:
    """The same, computed plainly: 64 tokens, their keys and values rounded with those scales, and one more token."""
    decoder, codec = engine.load_decoder(), CODECS[name]
    dense = DenseAttention(decoder.config)
    kept: list[list[torch.Tensor]] = []

    def rounded(x: torch.Tensor, factors: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(decode_plain(codec, encode_plain(codec, x.numpy(), factors), factors))

    def first(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k.half().float(), v.half().float()  # the cache rounds to 16 bit first of all
        kept.append([rounded(k, scales.layers[layer][0]), rounded(v, scales.layers[layer][1][:, None])])
        return dense(layer, q, k, v)

    def second(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (torch.cat((old, new.half().float())) for old, new in zip(kept[layer], (k, v), strict=True))
        return dense._attend(layer, q, keys, values)

    tokens, positions = torch.from_numpy(TOKENS), torch.arange(65)
    with torch.inference_mode():
        dense.begin_step([(0, 64)])
        decoder.hidden(tokens[:64], positions[:64], first)
        return decoder.logits(decoder.hidden(tokens[64:], positions[64:], second))[0].numpy()


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineDir:
    """Of the tiny model made attentive: its own hardly looks at keys and values."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("attentive") / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("q_proj.weight", "k_proj.weight", "o_proj.weight")):
            weights[name] = weights[name] * 4
    save_file(weights, folder / "model.safetensors")
    recipe = Recipe(
        "attentive",
        ModelSource("folder", str(folder)),
        kv_cache=KVCacheConfig(format="fp8", scales=ScalesConfig("random", "channel", tokens=64), budget=8 * 2**20),
    )
    return build_engine(recipe, folder.parent / "engine")


def of(engine: EngineDir, k: Any, v: Any) -> KVScales:
    """k and v for every layer: numbers, or functions of the layer."""
    pairs = []
    for layer in range(2):
        ours, theirs = (part(layer) if callable(part) else part for part in (k, v))
        pairs.append((np.full((2, 16), ours, np.float32), np.full(2, theirs, np.float32)))
    return replace(scales_in(engine), layers=tuple(pairs))


def served(engine: EngineDir, scales: KVScales, out: Path) -> np.ndarray:
    return logits(with_scales(engine, lambda plain: plain.update(scales.to_mapping(engine.cache_plan)), out))


@pytest.mark.parametrize(("k", "v"), [(0.5, 2.0), (2.0, 0.5), (5.0, 0.001), (0.0003, 7.0)])
def test_keys_and_values_are_rounded_with_their_own_scales(
    engine: EngineDir, tmp_path: Path, k: float, v: float
) -> None:
    scales, swapped = of(engine, k, v), of(engine, v, k)
    found = served(engine, scales, tmp_path / "engine")
    right, wrong = (expected_logits(engine, these, "e4m3") for these in (scales, swapped))
    tolerance = 1e-4 * np.abs(right).max()
    np.testing.assert_allclose(found, right, rtol=0, atol=tolerance)
    assert np.abs(found - wrong).max() > 5 * tolerance


def test_every_channel_head_and_layer_has_its_own(engine: EngineDir, tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    pairs = [
        (generator.uniform(1, 20, (2, 16)).astype(np.float32), generator.uniform(1, 20, 2).astype(np.float32))
        for _ in range(2)
    ]
    scales = replace(scales_in(engine), layers=tuple(pairs))
    found = served(engine, scales, tmp_path / "engine")
    right = expected_logits(engine, scales, "e4m3")
    tolerance = 1e-4 * np.abs(right).max()
    np.testing.assert_allclose(found, right, rtol=0, atol=tolerance)
    for wrong in (
        tuple(reversed(pairs)),
        tuple((k[::-1].copy(), v) for k, v in pairs),
        tuple((k, v[::-1].copy()) for k, v in pairs),
        tuple((k[:, ::-1].copy(), v) for k, v in pairs),
    ):
        other = expected_logits(engine, replace(scales, layers=wrong), "e4m3")
        assert np.abs(found - other).max() > 5 * tolerance


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", ["k", "v"])
def test_changing_one_scale_of_one_layer_changes_the_logits(
    engine: EngineDir, tmp_path: Path, layer: int, part: str
) -> None:
    def change(plain: dict[str, Any]) -> None:
        scales = plain["layers"][layer][part]
        if part == "k":
            scales[1] = [30.0] * 16
        else:
            scales[1] = 30.0

    before = logits(engine.path)
    np.testing.assert_array_equal(before, logits(engine.path))
    after = logits(with_scales(engine, change, tmp_path / "changed"))
    assert np.abs(after - before).max() > 5e-4 * np.abs(before).max()


@pytest.mark.slow
def test_scales_are_in_the_network_of_a_tensorrt_engine(
    recipe_of: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the extra [tensorrt]")
    from lowkv.engine.tensorrt import builder, target
    from lowkv.engine.tensorrt.export import scales_name
    from lowkv.recipe import TensorRTConfig

    def no_plan(onnx: Path, out: Path, *_: Any) -> dict[str, Any]:
        out.write_bytes(b"a plan")
        return {}

    monkeypatch.setattr(builder, "build_plan", no_plan)
    monkeypatch.setattr(target, "write_kernels", lambda *_: ())
    recipe = replace(recipe_of(target="tensorrt", source="random", granularity="head"), tensorrt=TensorRTConfig(89))
    engine = build_engine(recipe, tmp_path / "engine", keep_onnx=True)
    scales = scales_in(engine)
    tensors = {
        t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(engine.path / "model.onnx")).graph.initializer
    }
    for layer, (k, v) in enumerate(scales.layers):
        found = tensors[scales_name(layer)]
        assert found.dtype == np.float32
        # [K row, V row] of one number a head, or [Hkv, D + 1]: K's channels, then V's.
        parts = found if found.shape == (2, 2) else (found[:, 0], found[:, 16])
        np.testing.assert_array_equal(parts[0], k[:, 0])
        np.testing.assert_array_equal(parts[1], v)
        assert not np.any(k[:, 0] == v)
    recipe = replace(recipe, kv_cache=replace(recipe.kv_cache, scales=ScalesConfig("random", tokens=64)))
    other = build_engine(recipe, tmp_path / "other")
    assert other.manifest.payload_inputs["scales"] != engine.manifest.payload_inputs["scales"]


def test_the_key_names_all_that_scales_depend_on(recipe_of: Callable[..., Recipe], plan_of: Callable[..., Any]) -> None:
    recipe, plan = recipe_of(source="random"), plan_of("fp8", "fp8")
    key = routes._key(recipe, plan, {"model": "1"}, None)
    assert key == routes._key(replace(recipe, name="other"), plan, {"model": "1"}, None)
    assert key != routes._key(recipe, plan, {"model": "2"}, None)
    assert key != routes._key(recipe, plan_of("fp8", "fp16"), {"model": "1"}, None)
    assert key != routes._key(replace(recipe, weights=WeightsConfig("float32", "fp8")), plan, {"model": "1"}, None)
