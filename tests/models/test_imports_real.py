"""Checkpoints as llm-compressor and ModelOpt write them today: small ones that are kept, and all of them made anew.

`data/make.py` wrote them, with the logits of transformers' model over the decoded weights; see `data/README.md`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from lowkv.errors import LowkvError
from lowkv.models.checkpoint import WeightsFormat, check_tensors, open_checkpoint
from lowkv.models.decoder import Decoder
from lowkv.models.dense import DenseAttention
from lowkv.models.inspection import inspect_checkpoint, render
from lowkv.models.quantized import Fp8Matrix, Quantization, assembled

DATA = Path(__file__).parent / "data"
KEPT = sorted(path.name for path in DATA.iterdir() if path.is_dir() and path.name[:3] in ("lc-", "mo-"))
INTERPRETERS = {"llmcompressor": "LOWKV_LLMCOMPRESSOR_PYTHON", "modelopt": "LOWKV_MODELOPT_PYTHON"}
AFFINE = "mo-fp8-kv-affine"
"""Keys and values less a bias, which is refused."""


def worst(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference from the library's logits, over their spread. FP8 matrices do not round their inputs."""
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint)
    weights = assembled(dict(WeightsFormat(dtype, torch.float32, Quantization(kind)).tensors(checkpoint)))
    exact = {
        key: Fp8Matrix(w.codes, w.scale, None, w.dtype) if isinstance(w, Fp8Matrix) else w for key, w in weights.items()
    }
    reference = json.loads((folder / "logits.json").read_text())
    tokens, expected = torch.tensor(reference["tokens"]), torch.tensor(reference["logits"])
    attention = DenseAttention(checkpoint.config)
    attention.begin_step([(0, len(tokens))])
    rows = torch.arange(len(tokens) - len(expected), len(tokens))
    with torch.inference_mode():
        got = Decoder(checkpoint.config, exact).forward(tokens, torch.arange(len(tokens)), attention, rows)
    return float((got - expected).abs().max() / expected.std())


def check_folder(folder: Path) -> None:
    kind = getattr(open_checkpoint(folder), "kind", None) or "none"
    for asked in {"none", kind}:
        assert worst(folder, asked) < 1e-4, (folder.name, asked)
        assert worst(folder, asked, torch.float16) < 0.02, (folder.name, asked)
    if "kv" in folder.name:
        scales = open_checkpoint(folder).kv_scales()
        assert scales is not None
        assert all((k > 0.001).all() and (k < 0.1).all() and v.max() < k.min() for k, v in scales.layers)
        assert "warnings" not in scales.details
        assert scales.granularity == ("head" if "head" in folder.name else "tensor")


@pytest.mark.parametrize("name", KEPT)
def test_logits_are_those_of_the_library(name: str) -> None:
    check_folder(DATA / name)


def test_a_file_of_every_kind_is_kept() -> None:
    assert len(KEPT) == 6
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 400_000


@pytest.mark.parametrize("name", KEPT)
def test_inspect_says_what_was_understood(name: str) -> None:
    plain = inspect_checkpoint(open_checkpoint(DATA / name), DATA / name)
    json.dumps(plain)
    assert plain["checkpoint"]["weights"] == ("fp8" if "fp8" in name else "int4")
    assert plain["checkpoint"]["library"].startswith("ModelOpt" if name.startswith("mo-") else "compressed-tensors")
    assert [row["matrix"] for row in plain["matrices"]][:3] == ["q_proj", "k_proj", "v_proj"]
    assert all(row["becomes"].startswith("kept: ") for row in plain["matrices"])
    assert (plain["kv"] is not None) == ("kv" in name or name == "mo-int4-awq")
    assert plain["ignored"] == plain["warnings"] == []
    assert len(render(plain)) == (2 if plain["kv"] is None else 3)


def test_the_verb_takes_checkpoints_and_engines(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main_of("inspect", str(DATA / "mo-int4-awq"))
    out = capsys.readouterr().out
    assert "ModelOpt 0.47.0" in out
    assert "kept: int4 (groups of 64, scaled inputs)" in out
    main_of("inspect", f"folder:{DATA / 'lc-fp8-static-kv-head'}", "--json")
    plain = json.loads(capsys.readouterr().out)
    assert [row["k_count"] for row in plain["kv"]["layers"]] == [2]
    main_of("inspect", str(tiny_checkpoint))
    assert "no quantizer" in capsys.readouterr().out
    with pytest.raises(LowkvError, match="no engine at"):
        main_of("inspect", str(tmp_path / "nothing"))


def main_of(*arguments: str) -> None:
    from lowkv.cli import app

    with pytest.raises(SystemExit) as stopped:
        app(list(arguments), prog_name="lowkv")
    assert stopped.value.code == 0


def test_an_engine_of_a_quantized_checkpoint(tmp_path: Path) -> None:
    """Its codes and its scales go through a build, and another scale gives other logits."""
    from safetensors.torch import load_file, save_file

    from lowkv.engine.build import build_engine
    from lowkv.engine.inspection import inspect_engine
    from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ScalesConfig, WeightsConfig

    folder = tmp_path / "model"
    shutil.copytree(DATA / "mo-int4-awq", folder)
    kv = KVCacheConfig(format="fp8", budget=2**22, scales=ScalesConfig("checkpoint"))
    recipe = Recipe("r", ModelSource("folder", str(folder)), WeightsConfig("float32", "int4", 32), kv)
    engine = build_engine(recipe, tmp_path / "engine")
    assert inspect_engine(engine)["layers"][0]["weights"] == "int4 (groups of 64)"
    recorded = engine.manifest.scales["layers"][0]
    assert 0.001 < recorded["v"] < recorded["k"] < 0.1
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.v_scale"] *= 2
    save_file(tensors, folder / "model.safetensors")
    again = build_engine(recipe, tmp_path / "again").manifest.scales["layers"][0]
    assert (again["k"], again["v"]) == (recorded["k"], pytest.approx(2 * recorded["v"]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("library", INTERPRETERS)
def test_what_the_library_writes_now_is_what_is_read(library: str, tmp_path: Path) -> None:
    interpreter = os.environ.get(INTERPRETERS[library])
    if not interpreter:
        pytest.skip(f"{INTERPRETERS[library]} names no interpreter that has {library}")
    subprocess.run([interpreter, str(DATA / "make.py"), library, str(tmp_path)], check=True, capture_output=True)
    made = sorted(tmp_path.iterdir())
    assert {path.name for path in made} >= {name for name in KEPT if name.startswith(library[0])}
    for folder in made:
        if folder.name == AFFINE:
            with pytest.raises(LowkvError, match=r"with a zero point are not supported: .*k_bias"):
                open_checkpoint(folder).kv_scales()
        else:
            check_folder(folder)
