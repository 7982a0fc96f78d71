"""An engine directory: `engine.json`, tokenizer files and the target's payload.

Nothing of it is used before it is verified. `engine.json` lists every other file with its size and SHA-256,
and carries a digest of itself, so that an edited, cut or half-copied engine is refused with the file's name
instead of serving something else than it says. It holds no dates and no paths of the machine that built it:
the same input gives the same bytes.

Some files cannot be made the same twice (TensorRT numbers a plan's dynamic dimensions by where they happen to lie in
memory). Their sizes and hashes stand in `varying.json` instead, which names the `engine.json` that it belongs to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.calibration.scales import KVScales, scaled_parts
from lowkv.engine.progress import NoProgress, Progress
from lowkv.engine.targets import find_decoder_target, find_target
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import CachePlan
from lowkv.models.config import ModelConfig
from lowkv.models.tokenizer import TOKENIZER_FILES
from lowkv.recipe import Recipe, recipe_from_mapping

if TYPE_CHECKING:
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.decoder import Decoder
    from lowkv.models.tokenizer import Tokenizer

FORMAT_VERSION = 2
MANIFEST = "engine.json"
VARYING = "varying.json"
REPORT = "report.json"
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
    """Versions that must match: some when the engine is opened, the others when it runs (see `Target`)."""
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]
    cache_plan: Mapping[str, Any]
    scales: Mapping[str, Any]
    """See `lowkv.calibration.scales.KVScales.to_mapping`; `NO_SCALES` where no format takes any."""
    source: Mapping[str, str]
    """SHA-256 of every file of the checkpoint that the engine was made from."""
    payload_inputs: Mapping[str, Any]
    """What else the payload depends on (see `Target.payload_inputs`)."""
    files: Mapping[str, FileRecord]
    varying: tuple[str, ...] = ()
    """Files whose bytes differ from build to build; `varying.json` has their records."""
    chosen: Mapping[str, Any] | None = None
    """Why the KV format is what it is, where the recipe said `auto` (see `lowkv.calibration.auto.settled`)."""

    @property
    def digest(self) -> str:
        """What identifies this manifest, in hexadecimal."""
        return _digest(self._body())

    def to_json(self) -> str:
        """The file's text: sorted, digest included."""
        return _signed(self._body())

    def _body(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION} | asdict(self) | {"varying": list(self.varying)}

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """Raises `LowkvError` for text that is not a whole, unaltered manifest of a known format version."""
        body = _read_signed(text, path)
        version = body.get("format_version")
        if version != FORMAT_VERSION:
            raise LowkvError(
                f"{path} has another format",
                got=f"format_version {version}",
                expected=str(FORMAT_VERSION),
                fix="use the lowkv that built it, or build the engine again",
            )
        _check_digest(body, path)
        del body["format_version"]
        body["files"] = _records(body["files"])
        return cls(**body | {"varying": tuple(body.get("varying", ()))})


class EngineDir:
    """A verified engine on disk. Use `EngineDir.open`, or `lowkv.engine.build.build_engine` to make one."""

    def __init__(self, path: Path, manifest: Manifest, files: Mapping[str, FileRecord]) -> None:
        self.path = path
        self.manifest = manifest
        self.files = files
        """Every file but the two that list them."""
        self.recipe: Recipe = recipe_from_mapping(manifest.recipe)
        self.model_config: ModelConfig = ModelConfig.from_mapping(manifest.model)
        self.cache_plan: CachePlan = CachePlan.from_mapping(dict(manifest.cache_plan))
        self.scales: KVScales | None = _scales(manifest, self.cache_plan)
        """Of 8-bit keys and values; None where no format takes any."""

    @classmethod
    def open(cls, path: str | Path, verify: bool = True, progress: Progress | None = None) -> EngineDir:
        """Opens an engine directory.

        Args:
            path: the directory.
            verify: hash every file. Without, files are only checked for presence and size.
            progress: watches the hashing.

        Raises:
            LowkvError: the engine is missing, incomplete, altered, of a newer format, for another target, or of
                another form than this lowkv reads. The message names the file, what was got, what was expected, and
                what to do. Whether it can run here is not looked at.
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
        files = read_records(path, manifest)
        if verify:
            progress.begin("verifying the engine", sum(record.bytes for record in files.values()))
        for name, record in files.items():
            check_file(path / name, record, verify, progress)
        return cls(path, manifest, files)

    def load_decoder(self, device: str = "cpu") -> Decoder:
        """The model on a Torch device; on the CPU its weights are mapped from the engine's files, so do not change
        those while it runs. Raises `LowkvError` for a target that Torch does not run.
        """
        return find_decoder_target(self.manifest.target).load_decoder(self.path, self.model_config, device)

    @cached_property
    def report(self) -> Mapping[str, Any] | None:
        """What the target's builder reported of the payload; None where there is nothing to report."""
        if REPORT not in self.files:
            return None
        report: Mapping[str, Any] = json.loads((self.path / REPORT).read_text(encoding="utf-8"))
        return report

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; its `eos_ids` include the model config's."""
        from lowkv.models.tokenizer import Tokenizer

        return Tokenizer.load(self.path, self.model_config.eos)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the payload: what the weights take in memory once all of them have been used."""
        return sum(record.bytes for name, record in self.files.items() if name not in TOKENIZER_FILES)


def _scales(manifest: Manifest, plan: CachePlan) -> KVScales | None:
    return KVScales.from_mapping(manifest.scales, plan) if any(scaled_parts(plan)) else None


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


def read_records(path: Path, manifest: Manifest) -> dict[str, FileRecord]:
    """Every file's record: the manifest's and those of `varying.json`. Raises `LowkvError`."""
    if not manifest.varying:
        return dict(manifest.files)
    file = path / VARYING
    try:
        body = _read_signed(file.read_text(encoding="utf-8"), file)
    except OSError as error:
        raise LowkvError(f"{file} is missing from the engine", fix=_REBUILD) from error
    _check_digest(body, file)
    records = _records(body["files"])
    if body["engine"] != manifest.digest or set(records) != set(manifest.varying):
        raise LowkvError(
            f"{file} belongs to another engine",
            got=f"{', '.join(records)} of engine {body['engine']}",
            expected=f"{', '.join(manifest.varying)} of engine {manifest.digest}",
            fix=_REBUILD,
        )
    return dict(manifest.files) | records


def varying_json(manifest: Manifest, records: Mapping[str, FileRecord]) -> str:
    """The text of `varying.json` beside that manifest."""
    return _signed({"engine": manifest.digest, "files": {name: asdict(record) for name, record in records.items()}})


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


def checkpoint_hashes(checkpoint: Checkpoint, progress: Progress) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint, by name."""
    progress.begin("hashing the model", sum(path.stat().st_size for path in checkpoint.files))
    return {path.name: sha256(path, progress) for path in checkpoint.files}


def _records(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, FileRecord]:
    return {name: FileRecord(**record) for name, record in plain.items()}


def _signed(body: Mapping[str, Any]) -> str:
    return json.dumps({**body, "digest": _digest(body)}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _read_signed(text: str, path: Path) -> dict[str, Any]:
    try:
        body = json.loads(text)
        _ = body["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise LowkvError(f"{path} is cut short or not an engine's manifest", fix=_REBUILD) from error
    return dict(body)


def _check_digest(body: dict[str, Any], path: Path) -> None:
    """Takes the digest out of the body, and raises `LowkvError` where it is not the body's."""
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise LowkvError(
            f"{path} was altered after the build",
            got=f"digest {digest}",
            expected=_digest(body),
            fix=f"change the recipe, not the engine, and {_REBUILD}",
        )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
