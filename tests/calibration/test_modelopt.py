"""NVIDIA ModelOpt as the calibrator: what it is given, what becomes of its answer, and the real one where it is."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowkv.calibration import modelopt, modelopt_job
from lowkv.engine.build import build_engine
from lowkv.engine.progress import NoProgress
from lowkv.errors import LowkvError
from lowkv.models.checkpoint import open_checkpoint
from lowkv.models.quantized_checkpoint import QuantizedCheckpoint
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ScalesConfig, WeightsConfig

STAND_IN = """
import json, os, shutil, sys
job = json.load(open(sys.argv[1]))
if os.environ.get("STAND_IN_FAILS"):
    print(json.dumps({"stage": "ModelOpt: loading the model"}), flush=True)
    sys.exit("RuntimeError: out of memory")
from safetensors.torch import load_file, save_file
import torch
print(json.dumps({"stage": "ModelOpt: reading the text", "total": sum(map(len, job["windows"]))}))
print(json.dumps({"advance": len(job["windows"][0])}))
tensors = load_file(job["model"] + "/model.safetensors")
for layer in range(2):
    for index, part in enumerate("kv"):
        scale = torch.tensor(float(os.environ.get("STAND_IN_SCALE", 0.01 * (index + 1))))
        tensors[f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"] = scale
save_file(tensors, job["out"] + "/model.safetensors")
config = json.load(open(job["model"] + "/config.json"))
scheme = {"num_bits": 8, "type": "float", "dynamic": False}
config["quantization_config"] = {"quant_method": "modelopt", "kv_cache_scheme": scheme}
json.dump(config, open(job["out"] + "/config.json", "w"))
shutil.copyfile(sys.argv[1], os.environ["STAND_IN_SAW"])
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This interpreter, whose ModelOpt is a script; the file that has the job when it is through."""
    script = tmp_path / "lib" / "job.py"
    script.parent.mkdir()
    script.write_text(STAND_IN)
    monkeypatch.setattr(modelopt, "_SCRIPT", script)
    monkeypatch.setattr(modelopt, "_version", lambda interpreter: "0.0")
    monkeypatch.setenv("STAND_IN_SAW", str(tmp_path / "saw.json"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "saw.json"


def recipe_of(folder: Path, source: str = "random", **changes: Any) -> Recipe:
    kv = KVCacheConfig(format="fp8", budget=8 * 2**20, scales=ScalesConfig(source=source, tokens=64))  # type: ignore[arg-type]
    return replace(Recipe("tiny", ModelSource("folder", str(folder)), kv_cache=kv), **changes)


def test_the_result_is_a_checkpoint_with_scales(stand_in: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    weights = WeightsConfig("float32", "int4", 32)
    out = modelopt.calibrate(recipe_of(tiny_checkpoint, weights=weights), tmp_path / "out", NoProgress())
    job = json.loads(stand_in.read_text())
    assert (job["weights"], job["group_size"], job["dtype"]) == ("int4", 32, "float32")
    assert sum(map(len, job["windows"])) == 64
    scales = open_checkpoint(out).kv_scales()
    assert scales is not None
    assert [round(float(v[0]), 4) for _, v in scales.layers] == [0.02, 0.02]
    assert (out / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    with pytest.raises(LowkvError, match="out is in the way"):
        modelopt.calibrate(recipe_of(tiny_checkpoint), out, NoProgress())
    with pytest.raises(LowkvError, match=r"quantized or calibrated already: got 'ModelOpt'"):
        modelopt.calibrate(recipe_of(out), tmp_path / "again", NoProgress())


def test_a_dataset_is_what_modelopt_reads(stand_in: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("calibrate " * 20)
    recipe = recipe_of(tiny_checkpoint)
    kv = replace(recipe.kv_cache, scales=ScalesConfig("dataset", text=str(text), tokens=32))
    modelopt.calibrate(replace(recipe, kv_cache=kv), tmp_path / "out", NoProgress())
    assert json.loads(stand_in.read_text())["windows"][0][:10] == [
        json.loads((tiny_checkpoint / "tokenizer.json").read_text())["model"]["vocab"][char.replace(" ", "Ġ")]
        for char in "calibrate "
    ]


def test_a_build_calibrates_once_and_uses_the_scales(
    stand_in: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tiny_checkpoint, calibration="modelopt")
    engine = build_engine(recipe, tmp_path / "engines" / "one")
    recorded = engine.manifest.scales
    assert recorded["source"] == "checkpoint"
    assert [(round(layer["k"], 4), round(layer["v"], 4)) for layer in recorded["layers"]] == [(0.01, 0.02)] * 2
    assert engine.manifest.recipe["calibration"] == "modelopt"
    assert engine.manifest.recipe["model"] == f"folder:{tiny_checkpoint}"
    monkeypatch.setenv("STAND_IN_FAILS", "1")  # it would not survive another run
    build_engine(recipe, tmp_path / "engines" / "two")


def test_what_goes_wrong_is_said_and_nothing_stays(
    stand_in: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_SCALE", "1.0")
    with pytest.raises(LowkvError, match="exported no usable scales"):
        modelopt.calibrate(recipe_of(tiny_checkpoint), tmp_path / "out", NoProgress())
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(LowkvError, match=r"ModelOpt failed: got 'RuntimeError: out of memory'"):
        modelopt.calibrate(recipe_of(tiny_checkpoint), tmp_path / "out", NoProgress())
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_an_interpreter_without_modelopt_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match=r"ModelOpt is not installed for .*No module named 'modelopt'.*pip install"):
        modelopt.calibrate(recipe_of(tiny_checkpoint), tmp_path / "out", NoProgress(), Path(sys.executable))
    with pytest.raises(LowkvError, match="cannot start the interpreter /nowhere"):
        modelopt.calibrate(recipe_of(tiny_checkpoint), tmp_path / "out", NoProgress(), Path("/nowhere"))


@pytest.mark.parametrize(("weights", "group_size"), [("none", None), ("fp8", None), ("int4", 32)])
def test_presets_are_joined(weights: str, group_size: int | None) -> None:
    presets = SimpleNamespace(
        FP8_KV_CFG={"quant_cfg": [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {}}]},
        FP8_DEFAULT_CFG={"quant_cfg": [{"quantizer_name": "*weight_quantizer", "cfg": {}}], "algorithm": "max"},
        INT4_AWQ_CFG={
            "quant_cfg": [{"quantizer_name": "*weight_quantizer", "cfg": {"block_sizes": {-1: 128}}}],
            "algorithm": {"method": "awq_lite"},
        },
    )
    config = modelopt_job._config(presets, {"weights": weights, "group_size": 32})
    assert config["quant_cfg"][-1]["quantizer_name"] == "*[kv]_bmm_quantizer"
    assert config["quant_cfg"][0]["quantizer_name"] == ("*" if weights == "none" else "*weight_quantizer")
    assert (config["quant_cfg"][0].get("cfg") or {}).get("block_sizes") == (group_size and {-1: group_size})
    assert presets.INT4_AWQ_CFG["quant_cfg"][0]["cfg"]["block_sizes"] == {-1: 128}  # the library's own stays


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def test_the_real_modelopt(quantization: Any, tiny_checkpoint: Path, tmp_path: Path) -> None:
    interpreter = os.environ.get(modelopt.PYTHON)
    if not interpreter:
        pytest.skip(f"{modelopt.PYTHON} names no interpreter that has nvidia-modelopt")
    weights = WeightsConfig("float32", quantization, 32)
    recipe = recipe_of(tiny_checkpoint, weights=weights)
    out = modelopt.calibrate(recipe, tmp_path / "out", NoProgress(), Path(interpreter))
    checkpoint = open_checkpoint(out)
    assert isinstance(checkpoint, QuantizedCheckpoint)
    assert (checkpoint.kind or "none") == quantization
    scales = checkpoint.kv_scales()
    assert scales is not None
    assert not scales.missing
    engine = build_engine(
        modelopt.from_checkpoint(replace(recipe, model=ModelSource("folder", str(out)))), tmp_path / "e"
    )
    assert engine.manifest.scales["source"] == "checkpoint"
