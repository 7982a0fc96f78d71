"""An engine directory: `engine.json`, tokenizer files and the target's payload.

Nothing of it is used before it is verified. `engine.json` lists every other file with its size and SHA-256,
and carries a digest of itself, so that an edited, cut or half-copied engine is refused with the file's name
instead of serving something else than it says. It holds no dates and no paths of the machine that built it:
the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.engine.progress import NoProgress, Progress
from lowkv.engine.targets import find_target
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import CachePlan
from lowkv.models.config import ModelConfig
from lowkv.models.tokenizer import TOKENIZER_FILES
from lowkv.recipe import Recipe, recipe_from_mapping

if TYPE_CHECKING:
    from lowkv.models.decoder import Decoder
    from lowkv.models.tokenizer import Tokenizer

FORMAT_VERSION = 1
MANIFEST = "engine.json"
_REBUILD = "build the engine again with `lowkv build --force`"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """What `engine.json` says of one file beside it."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of `engine.json`."""

    created_by: str
    """`lowkv` and its version."""
    target: str
    requires: Mapping[str, str]
    """Versions that must match when the engine is loaded."""
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    cache_plan: Mapping[str, Any]
    scales: Mapping[str, Any]
    """`source`: where the FP8 scales come from (`unit`: all 1.0); `values`: them."""
    source: Mapping[str, str]
    """SHA-256 of every file of the checkpoint that the engine was made from."""
    payload_inputs: Mapping[str, Any]
    """What else the payload depends on (see `Target.payload_inputs`)."""
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """The file's text: sorted, digest included."""
        body = {"format_version": FORMAT_VERSION} | asdict(self)
        return json.dumps(body | {"digest": _digest(body)}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """Raises `LowkvError` for text that is not a whole, unaltered manifest of a known format version."""
        try:
            body = json.loads(text)
            version = body["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise LowkvError(f"{path} is cut short or not an engine's manifest", fix=_REBUILD) from error
        if version != FORMAT_VERSION:
            raise LowkvError(
                f"{path} has another format",
                got=f"format_version {version}",
                expected=str(FORMAT_VERSION),
                fix="use the lowkv that built it, or build the engine again",
            )
        digest = body.pop("digest", None)
        if digest != _digest(body):
            raise LowkvError(
                f"{path} was altered after the build",
                got=f"digest {digest}",
                expected=_digest(body),
                fix=f"change the recipe, not the engine, and {_REBUILD}",
            )
        del body["format_version"]
        body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
        return cls(**body)


class EngineDir:
    """A verified engine on disk. Use `EngineDir.open`, or `lowkv.engine.build.build_engine` to make one."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.recipe: Recipe = recipe_from_mapping(manifest.recipe)
        self.model_config: ModelConfig = ModelConfig.from_mapping(manifest.model)
        self.cache_plan: CachePlan = CachePlan.from_mapping(dict(manifest.cache_plan))

    @classmethod
    def open(cls, path: str | Path, verify: bool = True, progress: Progress | None = None) -> EngineDir:
        """Opens an engine directory.

        Args:
            path: the directory.
            verify: hash every file. Without, files are only checked for presence and size.
            progress: watches the hashing.

        Raises:
            LowkvError: the engine is missing, incomplete, altered, of a newer format, for another target, or needs
                other versions than are here. The message names the file, what was got, what was expected, and what
                to do.
        """
        path = Path(path)
        manifest = read_manifest(path)
        target = find_target(manifest.target)
        for name, version in target.requires.items():
            if manifest.requires.get(name) != version:
                raise LowkvError(
                    f"{path} does not fit this lowkv: {name} differs",
                    got=f"{name} {manifest.requires.get(name)} ({manifest.created_by})",
                    expected=version,
                    fix=_REBUILD,
                )
        progress = progress or NoProgress()
        if verify:
            progress.begin("verifying the engine", sum(record.bytes for record in manifest.files.values()))
        for name, record in manifest.files.items():
            check_file(path / name, record, verify, progress)
        return cls(path, manifest)

    def load_decoder(self) -> Decoder:
        """The model; its weights are mapped from the engine's files, so do not change those while it runs."""
        return find_target(self.manifest.target).load_decoder(self.path, self.model_config)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; its `eos_ids` include the model config's."""
        from lowkv.models.tokenizer import Tokenizer

        return Tokenizer.load(self.path, self.model_config.eos)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the payload: what the weights take in memory once all of them have been used."""
        return sum(record.bytes for name, record in self.manifest.files.items() if name not in TOKENIZER_FILES)


def read_manifest(path: Path) -> Manifest:
    """`engine.json` of a directory, checked in itself. Raises `LowkvError`."""
    if not path.is_dir():
        raise LowkvError(f"no engine at {path}", expected="a directory that `lowkv build` wrote")
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LowkvError(
            f"{path} is not an engine, or its build did not finish: {MANIFEST} is missing",
            fix="build it with `lowkv build`",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise LowkvError(f"cannot read {file}", got=str(error), fix=_REBUILD) from error
    return Manifest.from_json(text, file)


def check_file(path: Path, record: FileRecord, verify: bool, progress: Progress) -> None:
    """Compares a file with its record: size always, SHA-256 if `verify`. Raises `LowkvError` naming the
    file.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise LowkvError(f"{path} is missing from the engine", fix=_REBUILD) from error
    if size != record.bytes:
        raise LowkvError(
            f"{path} has the wrong size", got=f"{size} bytes", expected=f"{record.bytes} bytes", fix=_REBUILD
        )
    if verify:
        digest = sha256(path, progress)
        if digest != record.sha256:
            raise LowkvError(
                f"{path} was altered after the build", got=f"SHA-256 {digest}", expected=record.sha256, fix=_REBUILD
            )


def sha256(path: Path, progress: Progress) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
