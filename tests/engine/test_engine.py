"""Engine directories: built whole, the same every time, and refused when anything about them is not as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowkv.engine import EngineDir, build_engine
from lowkv.engine.directory import FORMAT_VERSION, MANIFEST, Manifest, read_manifest
from lowkv.engine.targets import TARGETS
from lowkv.errors import LowkvError
from lowkv.models.checkpoint import decoder_weights, open_checkpoint
from lowkv.models.decoder import Decoder
from lowkv.models.dense import DenseAttention
from lowkv.recipe import KVCacheConfig, LmHeadConfig, ModelSource, Recipe, WeightsConfig


@pytest.fixture
def recipe(tiny_checkpoint: Path) -> Recipe:
    return Recipe("tiny", ModelSource("folder", str(tiny_checkpoint)), kv_cache=KVCacheConfig(format="kivi2"))


@pytest.fixture
def engine(recipe: Recipe, tmp_path: Path) -> Path:
    return build_engine(recipe, tmp_path / "engine").path


class Recorder:
    """A Progress that notes what it is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.done: dict[str, int] = {}

    def begin(self, stage: str, total: int | None = None) -> None:
        self.stages.append((stage, total))

    def advance(self, amount: int) -> None:
        stage = self.stages[-1][0]
        self.done[stage] = self.done.get(stage, 0) + amount


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit_manifest(engine: Path, change: Callable[[dict[str, Any]], object], digest: bool = True) -> None:
    """Changes engine.json as another lowkv would have written it (or, without digest, as a person would)."""
    path = engine / MANIFEST
    body = json.loads(path.read_text())
    change(body)
    path.chmod(0o644)
    if digest:
        version = body.pop("format_version")
        del body["digest"]
        text = replace(read_manifest(engine), **{k: body[k] for k in body if k != "files"}).to_json()
        text = text.replace(f'"format_version": {FORMAT_VERSION}', f'"format_version": {version}')
        path.write_text(text)
    else:
        path.write_text(json.dumps(body))


def test_an_engine_gives_back_what_it_was_built_from(recipe: Recipe, engine: Path, tiny_checkpoint: Path) -> None:
    opened = EngineDir.open(engine)
    checkpoint = open_checkpoint(tiny_checkpoint)
    assert opened.recipe == recipe
    assert opened.model_config == checkpoint.config
    assert opened.cache_plan.layers[0].format == "kivi2"
    assert opened.manifest.scales == {"source": "none", "layers": None}
    assert opened.weight_bytes == (engine / "weights.safetensors").stat().st_size
    assert opened.tokenizer().decode(opened.tokenizer().encode("héllo")) == "héllo"
    assert opened.tokenizer().eos_ids == checkpoint.config.eos
    expected = Decoder(checkpoint.config, dict(decoder_weights(checkpoint, torch.float32, torch.float32)))
    tokens, positions = torch.arange(5), torch.arange(5)
    logits = []
    for decoder in (expected, opened.load_decoder()):
        attention = DenseAttention(decoder.config)
        attention.begin_step([(0, 5)])
        logits.append(decoder.forward(tokens, positions, attention, positions))
    assert torch.equal(*logits)


@pytest.mark.parametrize(("body", "head"), [("bfloat16", "float32"), ("float16", "float16")])
def test_weights_are_stored_in_the_dtypes_of_the_recipe(recipe: Recipe, tmp_path: Path, body: str, head: str) -> None:
    recipe = replace(recipe, weights=WeightsConfig(body), lm_head=LmHeadConfig(head))
    decoder = build_engine(recipe, tmp_path / "engine").load_decoder()
    assert (str(decoder.dtype), str(decoder.head_dtype)) == (f"torch.{body}", f"torch.{head}")


def test_a_head_that_is_narrower_than_the_body_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match=r"lm_head\.dtype and weights\.dtype do not go together"):
        build_engine(replace(recipe, lm_head=LmHeadConfig("float16")), tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_the_same_input_gives_the_same_bytes(recipe: Recipe, tmp_path: Path) -> None:
    first = build_engine(recipe, tmp_path / "a" / "engine").path
    second = build_engine(recipe, tmp_path / "b" / "engine").path
    assert contents(first) == contents(second)
    assert str(tmp_path) not in (first / MANIFEST).read_text()


def test_progress_covers_the_whole_payload(recipe: Recipe, tmp_path: Path) -> None:
    progress = Recorder()
    build_engine(recipe, tmp_path / "engine", progress)
    totals = {stage: total for stage, total in progress.stages if total}
    assert {"converting weights", "hashing the engine", "hashing the model"} <= set(totals)
    assert progress.done == totals


def test_an_engine_that_is_up_to_date_is_not_built_again(recipe: Recipe, engine: Path) -> None:
    before = (engine / MANIFEST).stat().st_mtime_ns
    progress = Recorder()
    build_engine(recipe, engine, progress)
    assert (engine / MANIFEST).stat().st_mtime_ns == before
    assert "converting weights" not in dict(progress.stages)


def test_another_engine_is_replaced_only_if_forced(recipe: Recipe, engine: Path) -> None:
    other = replace(recipe, kv_cache=KVCacheConfig(format="fp8"))
    with pytest.raises(LowkvError, match=r"holds another engine.*--force"):
        build_engine(other, engine)
    assert EngineDir.open(engine).recipe == recipe
    build_engine(other, engine, force=True)
    assert EngineDir.open(engine).recipe == other
    assert [path.name for path in engine.parent.iterdir()] == ["engine"]


def test_a_damaged_engine_is_rebuilt_only_if_forced(recipe: Recipe, engine: Path) -> None:
    (engine / "weights.safetensors").unlink()
    with pytest.raises(LowkvError, match=r"weights\.safetensors is missing"):
        build_engine(recipe, engine)
    build_engine(recipe, engine, force=True)
    EngineDir.open(engine)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_not_an_engine_is_never_replaced(recipe: Recipe, tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(LowkvError, match="is in the way: it is not an engine"):
        build_engine(recipe, tmp_path, force=force)
    assert (tmp_path / "thesis.txt").exists()


def test_an_empty_folder_is_built_into(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    EngineDir.open(build_engine(recipe, tmp_path / "engine").path)


def test_neighbours_that_differ_in_the_cache_share_their_weights(recipe: Recipe, engine: Path) -> None:
    progress = Recorder()
    other = build_engine(replace(recipe, kv_cache=KVCacheConfig(format="fp16")), engine.with_name("other"), progress)
    assert "converting weights" not in dict(progress.stages)
    assert (engine / "weights.safetensors").samefile(other.path / "weights.safetensors")
    assert other.cache_plan.layers[0].format == "fp16"
    EngineDir.open(other.path)
    halves = replace(recipe, weights=WeightsConfig("float16"))
    third = build_engine(halves, engine.with_name("third")).path
    assert not (engine / "weights.safetensors").samefile(third / "weights.safetensors")


def test_the_weights_of_a_damaged_neighbour_are_not_taken(recipe: Recipe, engine: Path) -> None:
    good = contents(engine)
    flip(engine / "weights.safetensors", -100)
    other = build_engine(replace(recipe, kv_cache=KVCacheConfig(format="fp16")), engine.with_name("other")).path
    assert contents(other)["weights.safetensors"] == good["weights.safetensors"]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["weights.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_missing_altered_and_truncated_files_are_refused_by_name(engine: Path, name: str) -> None:
    data = (engine / name).read_bytes()
    flip(engine / name, -3)
    with pytest.raises(
        LowkvError, match=rf"{name} was altered .*: got 'SHA-256 \w+', expected \w+; build the engine again"
    ):
        EngineDir.open(engine)
    (engine / name).write_bytes(data[:-1])
    for verify in (True, False):
        with pytest.raises(
            LowkvError, match=rf"{name} has the wrong size: got '{len(data) - 1} bytes', expected {len(data)}"
        ):
            EngineDir.open(engine, verify=verify)
    (engine / name).unlink()
    with pytest.raises(LowkvError, match=f"{name} is missing from the engine"):
        EngineDir.open(engine, verify=False)


def test_a_manifest_is_refused_when_cut_or_edited(engine: Path) -> None:
    path = engine / MANIFEST
    text = path.read_text()
    path.chmod(0o644)
    for keep in (0, 10, len(text) // 2, len(text) - 3):
        path.write_text(text[:keep])
        with pytest.raises(LowkvError, match=r"engine\.json is cut short"):
            EngineDir.open(engine)
    path.write_text(text)
    edit_manifest(engine, lambda body: body["recipe"]["kv_cache"].update(format="fp16"), digest=False)
    with pytest.raises(LowkvError, match=r"engine\.json was altered after the build: got 'digest .*change the recipe"):
        EngineDir.open(engine)
    path.unlink()
    with pytest.raises(LowkvError, match=r"is not an engine, or its build did not finish: engine\.json is missing"):
        EngineDir.open(engine)


def test_a_newer_format_another_target_and_other_versions_are_refused(engine: Path) -> None:
    good = (engine / MANIFEST).read_text()
    for change, message in (
        (lambda body: body.update(format_version=99), "has another format: got 'format_version 99'"),
        (lambda body: body.update(target="tpu"), "engine target is not known: got 'tpu', expected cpu"),
        (lambda body: body.update(requires={"weights_layout": "0"}), "weights_layout differs: got 'weights_layout 0"),
    ):
        edit_manifest(engine, change)
        with pytest.raises(LowkvError, match=message):
            EngineDir.open(engine)
        (engine / MANIFEST).write_text(good)
    EngineDir.open(engine)


def test_no_engine_at_all(tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match=r"no engine at .*nothing"):
        EngineDir.open(tmp_path / "nothing")


def test_a_build_that_fails_leaves_nothing(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowkv.models.safetensors_checkpoint import SafetensorsCheckpoint

    def fails(self: SafetensorsCheckpoint, name: str) -> torch.Tensor:
        raise LowkvError("the disk is on fire")

    monkeypatch.setattr(SafetensorsCheckpoint, "tensor", fails)
    with pytest.raises(LowkvError, match="on fire"):
        build_engine(recipe, tmp_path / "engine")
    assert list(tmp_path.iterdir()) == []


_BUILD = """
import sys, time
from pathlib import Path
from lowkv.engine import build_engine
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe

class Stuck:
    def begin(self, stage, total=None):
        if stage == sys.argv[3]:
            print("here", flush=True)
            time.sleep(600)
    def advance(self, amount):
        pass

recipe = Recipe("tiny", ModelSource("folder", sys.argv[1]), kv_cache=KVCacheConfig(format="kivi2"))
build_engine(recipe, sys.argv[2], Stuck())
"""


def test_a_killed_build_leaves_nothing_that_looks_like_an_engine(recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    command = [sys.executable, "-c", _BUILD, recipe.model.spec, str(out), "hashing the engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            (scratch,) = tmp_path.iterdir()
            assert (scratch / "weights.safetensors").is_file()
            assert not out.exists()
            # A second build of the same engine, while the first is at work, leaves that one's folder alone.
            build_engine(replace(recipe, name="other"), out)
            assert scratch.is_dir()
        finally:
            process.kill()
    assert scratch.is_dir()
    with pytest.raises(LowkvError, match="build did not finish"):
        EngineDir.open(scratch)
    build_engine(recipe, out, force=True)
    assert list(tmp_path.iterdir()) == [out]


def test_weights_are_mapped_and_not_copied(recipe: Recipe, tmp_path: Path) -> None:
    engine = build_engine(recipe, tmp_path / "engine")
    decoder = engine.load_decoder()
    maps = Path("/proc/self/maps").read_text()
    assert str(engine.path / "weights.safetensors") in maps
    assert decoder.logits(torch.zeros(1, decoder.config.hidden)).shape == (1, decoder.config.vocab)


def test_every_target_is_one_that_recipes_accept() -> None:
    for name in TARGETS:
        recipe = Recipe("r", ModelSource.parse("gguf:m.gguf"), WeightsConfig("float16"), target=name)
        assert recipe.target == name


def test_a_manifest_survives_json(engine: Path) -> None:
    manifest = read_manifest(engine)
    assert Manifest.from_json(manifest.to_json(), engine / MANIFEST) == manifest
