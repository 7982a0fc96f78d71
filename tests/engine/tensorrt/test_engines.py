"""TensorRT engine directories: whole or not at all, the same every time, refused when anything is not as it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvattention.gpu.compile import KernelSet
from kvattention.gpu.launches import layer_scales
from kvattention.gpu.variants import needed
from kvattention.tensorrt import INPUTS, libraries, register
from lowkv.cli import main
from lowkv.engine import EngineDir, build_engine
from lowkv.engine.directory import MANIFEST, VARYING
from lowkv.engine.tensorrt.target import KERNELS, ONNX, PLAN
from lowkv.errors import LowkvError
from lowkv.recipe import KVCacheConfig, Recipe, TritonConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tensorrt_recipe: Callable[..., Recipe]) -> Recipe:
    return tensorrt_recipe("kivi2")


@pytest.fixture(scope="module")
def built(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole engine; tests that change it change a copy."""
    return build_engine(recipe, tmp_path_factory.mktemp("built") / "engine").path


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "engine"))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_is_in_an_engine(built: Path) -> None:
    engine = EngineDir.open(built)
    variants = needed(engine.cache_plan.layer_specs(), engine.model_config.heads)
    cubins = {f"{KERNELS}/{variant.name}.cubin" for variant in variants}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    payload = {PLAN, "report.json", f"{KERNELS}/kernels.json"} | cubins
    assert files(built) == {MANIFEST, VARYING} | tokenizer | payload
    assert set(engine.files) == tokenizer | payload
    assert engine.weight_bytes == sum((built / name).stat().st_size for name in payload)
    assert all((built / name).stat().st_mode & 0o777 == 0o444 for name in files(built))
    assert engine.report is not None
    assert [layer["fields"]["k_codec"] for layer in engine.report["attention"]] == ["int2", "int2"]
    kernels = KernelSet.open(built / KERNELS, 89)
    assert {kernels.load(variant).sm for variant in variants} == {89}
    assert str(built.parent) not in (built / MANIFEST).read_text()


def test_the_same_input_gives_the_same_engine(recipe: Recipe, built: Path, tmp_path: Path) -> None:
    """In another process, with other hashes. The plan aside, whose bytes TensorRT makes anew every time: that is why
    engine.json does not hold its hash.
    """
    second = tmp_path / "second"
    command = [sys.executable, "-c", _BUILD, json.dumps(recipe.to_mapping()), str(second), "nothing"]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert files(second) == files(built)
    differ = {name for name in files(built) if (second / name).read_bytes() != (built / name).read_bytes()}
    assert differ <= {PLAN, VARYING}
    assert (second / MANIFEST).read_bytes() == (built / MANIFEST).read_bytes()


def test_an_engine_that_is_there_is_left_alone(recipe: Recipe, engine: Path) -> None:
    before = (engine / PLAN).stat().st_mtime_ns
    build_engine(recipe, engine)
    assert (engine / PLAN).stat().st_mtime_ns == before
    with pytest.raises(LowkvError, match=r"holds another engine: got '.*without its ONNX file'; use --force"):
        build_engine(recipe, engine, keep_onnx=True)
    for path in (engine, *engine.rglob("*")):
        path.chmod(0o755)


def test_neighbours_that_differ_in_nothing_tensorrt_sees_share_their_payload(recipe: Recipe, engine: Path) -> None:
    other = build_engine(replace(recipe, name="other", triton=TritonConfig("other")), engine.with_name("other"))
    assert (engine / PLAN).samefile(other.path / PLAN)
    kernel = next(name for name in other.files if name.endswith(".cubin"))
    assert (engine / kernel).samefile(other.path / kernel)
    EngineDir.open(other.path)


@pytest.mark.parametrize("name", [PLAN, "report.json", f"{KERNELS}/move.cubin", f"{KERNELS}/kernels.json"])
def test_altered_and_missing_files_are_refused_by_name(engine: Path, name: str) -> None:
    path = engine / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(LowkvError, match=rf"{name} was altered after the build"):
        EngineDir.open(engine)
    path.unlink()
    with pytest.raises(LowkvError, match=rf"{name} is missing from the engine"):
        EngineDir.open(engine, verify=False)


def test_the_plan_of_another_engine_is_refused(engine: Path, tmp_path: Path) -> None:
    """Even with its own varying.json, whose hashes are right: that names the engine.json that it was built with."""
    other = Path(shutil.copytree(engine, tmp_path / "other"))
    path = engine / VARYING
    body = json.loads(path.read_text())
    path.chmod(0o644)
    path.write_text(json.dumps(body | {"engine": "0" * 64}))
    with pytest.raises(LowkvError, match=rf"{VARYING} was altered after the build"):
        EngineDir.open(engine)
    _foreign(path, other)
    with pytest.raises(LowkvError, match=rf"{VARYING} belongs to another engine: got 'model\.plan of engine 0000"):
        EngineDir.open(engine)
    path.unlink()
    with pytest.raises(LowkvError, match=rf"{VARYING} is missing from the engine"):
        EngineDir.open(engine)


def _foreign(path: Path, engine: Path) -> None:
    """A whole and unaltered varying.json, of another engine."""
    from lowkv.engine import directory

    records = json.loads((engine / VARYING).read_text())["files"]
    path.write_text(directory._signed({"engine": "0" * 64, "files": records}))


def test_an_engine_opens_where_there_is_no_tensorrt(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It can be looked into and packed; what cannot be done is run it."""
    monkeypatch.setattr(libraries, "installed", tuple)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    engine = EngineDir.open(built)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(built), "--json"])
    assert ended.value.code == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["engine_inspector"] == {"available": False, "reason": "not available without a GPU"}
    with pytest.raises(SystemExit) as ended:
        main(["repo", str(built), "--out", str(tmp_path / "repo"), "--copy"])
    assert ended.value.code == 0
    with pytest.raises(LowkvError, match="no weights that Torch could load"):
        engine.load_decoder()


def test_keep_onnx(recipe: Recipe, tmp_path: Path) -> None:
    import onnx

    engine = build_engine(recipe, tmp_path / "engine", keep_onnx=True)
    assert ONNX in engine.manifest.files
    model = onnx.load(engine.path / ONNX)
    assert sum(node.op_type == "PagedAttention" for node in model.graph.node) == 2
    # One without it is content with this one.
    before = (engine.path / PLAN).stat().st_mtime_ns
    assert build_engine(recipe, tmp_path / "engine").path == engine.path
    assert (engine.path / PLAN).stat().st_mtime_ns == before


@pytest.mark.long
@pytest.mark.parametrize(("name", "codecs"), [("kivi2plus", ("int2c", "int2")), ("fp8-channels", ("e4m3", "e4m3"))])
def test_narrowed_ranges_and_scales_per_channel_are_built_in(
    name: str, codecs: tuple[str, str], tensorrt_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    engine = build_engine(tensorrt_recipe(name), tmp_path / "engine", keep_onnx=True)
    assert engine.report is not None
    fields = [layer["fields"] for layer in engine.report["attention"]]
    assert [(layer["k_codec"], layer["v_codec"]) for layer in fields] == [codecs] * 2
    specs = engine.cache_plan.layer_specs(None if engine.scales is None else engine.scales.layers)
    kernels = KernelSet.open(engine.path / KERNELS, 89)
    assert set(kernels.names) == {variant.name for variant in needed(specs, engine.model_config.heads)}
    values = _scales_in_network(engine.path / ONNX)
    assert values.shape == (2, 2, 16 + 1)  # layers, KV heads, K's channels and V
    np.testing.assert_array_equal(values, layer_scales(specs))
    assert (np.ptp(values[..., :-1], axis=2) > 0).all() == (name == "fp8-channels")


def _scales_in_network(path: Path) -> np.ndarray:
    """What the plugins of the parsed network are given, a layer after the other."""
    trt = libraries.import_tensorrt()
    register(trt, None)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(path))
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    constants = {}
    for layer in layers:
        if layer.type == trt.LayerType.CONSTANT:
            layer.__class__ = trt.IConstantLayer
            constants[layer.get_output(0).name] = layer
    given = [layer.get_input(INPUTS.index("scales")) for layer in layers if layer.type == trt.LayerType.PLUGIN_V3]
    return np.stack([np.array(constants[tensor.name].weights).reshape(tuple(tensor.shape)) for tensor in given])


def test_only_tensorrt_engines_have_an_onnx_file(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match=r"no ONNX file to keep: got 'target cpu'"):
        build_engine(replace(recipe, target="cpu"), tmp_path / "engine", keep_onnx=True)
    assert list(tmp_path.iterdir()) == []


def test_recipes_that_cannot_be_built_here_leave_nothing(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sm, message in ((90, r"cannot build for this GPU .*got 'SM90'"), (None, "no GPU here to build for")):
        with pytest.raises(LowkvError, match=message):
            build_engine(replace(recipe, tensorrt=replace(recipe.tensorrt, sm=sm)), tmp_path / "engine")
    monkeypatch.setattr(libraries, "installed", tuple)
    with pytest.raises(LowkvError, match=r"TensorRT is not installed"):
        build_engine(recipe, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


_BUILD = """
import json, sys, time
from lowkv.engine import build_engine
from lowkv.recipe import recipe_from_mapping

class Stuck:
    def begin(self, stage, total=None):
        if stage.startswith(sys.argv[3]):
            print("here", flush=True)
            time.sleep(600)
    def advance(self, amount):
        pass

build_engine(recipe_from_mapping(json.loads(sys.argv[1])), sys.argv[2], Stuck())
"""


def test_a_build_killed_in_the_middle_leaves_nothing(recipe: Recipe, built: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    command = [sys.executable, "-c", _BUILD, json.dumps(recipe.to_mapping()), str(out), "TensorRT for SM89: optimizing"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            (scratch,) = tmp_path.iterdir()
            assert not out.exists()
        finally:
            process.kill()
    with pytest.raises(LowkvError, match="build did not finish"):
        EngineDir.open(scratch)
    # The next build of the same engine clears up behind it (and shares the payload of one that is beside it).
    shutil.copytree(built, tmp_path / "beside")
    build_engine(replace(recipe, name="other", triton=TritonConfig("other")), out)
    assert {path.name for path in tmp_path.iterdir()} == {"beside", "engine"}


def inspected(engine: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """(tables, JSON) of `lowkv inspect`."""
    texts = []
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["inspect", str(engine), *options])
        assert ended.value.code == 0
        texts.append(capsys.readouterr().out)
    return texts[0], json.loads(texts[1])


def test_inspect_shows_a_tensorrt_engine(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, plain = inspected(built, capsys)
    assert plain["engine"]["requires"]["sm"] == "89"
    assert [(plugin["layer"], plugin["k_codec"], plugin["v_codec"]) for plugin in plain["plugins"]] == [
        (0, "int2", "int2"),
        (1, "int2", "int2"),
    ]
    assert [(layer["format"], layer["weights"]) for layer in plain["layers"]] == [("kivi2", "float16")] * 2
    assert plain["lm_head"]["effective"] == "float32"
    assert [profile["name"] for profile in plain["profiles"]] == ["prefill", "decode"]
    assert {binding["name"] for binding in plain["inputs"]} >= {"tokens", "arena", "table"}
    for words in ("SM89", "tensorrt_rtx 1.", "PagedAttention version 2, 2 instances, 6 kernels", "float32, stored as"):
        assert words in text
    for words in ("plugin instance", "prefill, at most", "not available without a GPU", "? x 8"):
        assert words in text


@pytest.mark.parametrize(
    ("weights", "shown"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float32", "quantization": "int4", "group_size": 32}, "int4 (groups of 32)"),
        ({"dtype": "float32", "quantization": "fp8"}, "fp8"),
    ],
)
def test_inspect_shows_an_engine_of_weights(
    weights: dict[str, Any], shown: str, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = replace(
        recipe,
        target="cpu",
        weights=replace(recipe.weights, **weights),
        kv_cache=KVCacheConfig(format="kivi2", skip_layers=(0,), budget=8 * 2**20),
    )
    text, plain = inspected(build_engine(cpu, tmp_path / "engine").path, capsys)
    assert [(layer["format"], layer["weights"]) for layer in plain["layers"]] == [("fp16", shown), ("kivi2", shown)]
    assert plain["layers"][0]["reason"] == "skip_layers: 0"
    assert plain["lm_head"] == {"stored": "float32", "effective": "float32"}
    assert "inputs" not in plain
    assert shown in text
    assert "TensorRT" not in text
