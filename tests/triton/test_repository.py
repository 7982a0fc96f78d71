from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import lowkv
from lowkv.errors import LowkvError
from lowkv.triton.config import config_from_pbtxt
from lowkv.triton.repository import Repository, write_repository


def test_written_repository_opens(engine: Path, tmp_path: Path) -> None:
    out = write_repository(engine, tmp_path / "repo", budget=1 << 20, threads=2, max_waiting=9)
    opened = Repository.open(out)
    assert opened.model_name == "tiny"
    assert opened.engine == engine.resolve()
    assert opened.threads == 2
    assert opened.triton.http_port == 8000
    said = opened.config.parameters
    assert said["kv_cache.budget_bytes"] == str(1 << 20)
    assert said["kv_cache.layers"] == "k4v2 x1 + kivi2 x1"
    assert said["kv_cache.group_size"] == "32"
    assert said["kv_cache.residual_length"] == "128"
    assert said["kv_cache.sink_tokens"] == "32"
    assert float(said["kv_cache.effective_bits"]) < 8
    assert said["serving.max_waiting"] == "9"
    assert said["compute"] == "cpu"
    assert said["executor"] == "torch"
    assert said["compute.sm"] == "any"
    assert opened.config.gpus == ()
    assert said["lowkv_version"] == lowkv.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == [
        "tiny/1/model.py",
        "tiny/config.pbtxt",
    ]


@pytest.mark.parametrize(("wanted", "written"), [(None, (0,)), ([1, 3], (1, 3))])
def test_an_engine_for_gpus_gets_its_instances_there(
    gpu_engine: Path, tmp_path: Path, wanted: list[int] | None, written: tuple[int, ...]
) -> None:
    opened = Repository.open(write_repository(gpu_engine, tmp_path / "repo", gpus=wanted))
    assert opened.config.gpus == written
    assert opened.config.parameters["compute"] == "cuda"


@pytest.mark.parametrize("wanted", [[], [0, 0], [-1]])
def test_impossible_gpus_are_refused(gpu_engine: Path, tmp_path: Path, wanted: list[int]) -> None:
    with pytest.raises(LowkvError, match="GPU ids are out of range"):
        write_repository(gpu_engine, tmp_path / "repo", gpus=wanted)
    assert not list(tmp_path.iterdir())


def test_gpus_for_an_engine_of_the_cpu_are_refused(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match=r"runs on the CPU: got 'GPUs 0', .*leave --gpus out"):
        write_repository(engine, tmp_path / "repo", gpus=[0])


def test_tree_can_be_moved_as_a_whole(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "a" / "engine")
    write_repository(tmp_path / "a" / "engine", tmp_path / "a" / "repo")
    (tmp_path / "a").rename(tmp_path / "b")
    assert Repository.open(tmp_path / "b" / "repo").engine == tmp_path / "b" / "engine"


def test_copy_is_self_contained(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    out = write_repository(tmp_path / "engine", tmp_path / "repo", copy=True, model_name="other")
    shutil.rmtree(tmp_path / "engine")
    opened = Repository.open(out)
    assert opened.engine == out / "other" / "1" / "engine"
    assert opened.model_name == "other"


def test_existing_places(engine: Path, tmp_path: Path) -> None:
    out = write_repository(engine, tmp_path / "repo")
    before = (out / "tiny" / "config.pbtxt").read_text()
    with pytest.raises(LowkvError, match="--force"):
        write_repository(engine, out)
    write_repository(engine, out, force=True, max_waiting=3)
    assert (out / "tiny" / "config.pbtxt").read_text() != before
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(LowkvError, match="left alone"):
        write_repository(engine, tmp_path / "home", force=True)
    assert (tmp_path / "home" / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    write_repository(engine, tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "home", "repo"]


def test_a_failed_write_leaves_what_was_there(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write_repository(engine, tmp_path / "repo")
    before = (out / "tiny" / "config.pbtxt").read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(OSError, match="No space"):
        write_repository(engine, out, copy=True, force=True)
    assert (out / "tiny" / "config.pbtxt").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]


def test_missing_or_other_engine_is_refused(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    out = write_repository(tmp_path / "engine", tmp_path / "repo")
    (tmp_path / "engine").rename(tmp_path / "away")
    with pytest.raises(LowkvError, match="not where it was"):
        Repository.open(out)
    (tmp_path / "away").rename(tmp_path / "engine")
    manifest = tmp_path / "engine" / "engine.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text())))
    with pytest.raises(LowkvError, match="built again"):
        Repository.open(out)


@pytest.mark.parametrize("content", [None, {}, {"m/config.pbtxt": 'name: "m"'}])
def test_other_folders_are_refused(content: dict[str, str] | None, tmp_path: Path) -> None:
    place = tmp_path / "repo"
    for name, text in (content or {}).items():
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text(text)
    if content is not None:
        place.mkdir(exist_ok=True)
    with pytest.raises(LowkvError):
        Repository.open(place)


def test_config_on_disk_is_what_triton_will_read(repository: Path) -> None:
    config = config_from_pbtxt((repository / "tiny" / "config.pbtxt").read_text())
    assert config == Repository.open(repository).config
