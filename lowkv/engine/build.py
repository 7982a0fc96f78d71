"""Building an engine directory from a recipe.

The build happens in a hidden folder beside the result and is renamed when everything in it is on the disk:
whoever looks at the result's path sees a whole engine or none. The folder is locked while its build lives;
what a killed build leaves behind holds no lock and is removed by the next one.

Engines in one folder whose payloads depend on the same things (the same checkpoint and dtypes, only another
KV format) share the payload's files by hard link: after the first, each takes a second and no space.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import lowkv
from lowkv.calibration.auto import settled
from lowkv.calibration.modelopt import from_checkpoint, open_model
from lowkv.calibration.routes import scales_for
from lowkv.calibration.scales import NO_SCALES, KVScales
from lowkv.engine.directory import (
    MANIFEST,
    VARYING,
    EngineDir,
    FileRecord,
    Manifest,
    check_file,
    checkpoint_hashes,
    read_manifest,
    read_records,
    sha256,
    varying_json,
)
from lowkv.engine.progress import NoProgress, Progress
from lowkv.engine.targets import Target, find_decoder_target, find_target
from lowkv.engine.tensorrt.target import ONNX, TensorRTTarget
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import CachePlan
from lowkv.models.checkpoint import Checkpoint
from lowkv.models.rotation import with_rotated_values
from lowkv.recipe import Recipe


def build_engine(
    recipe: Recipe,
    out: str | Path,
    progress: Progress | None = None,
    force: bool = False,
    *,
    keep_onnx: bool = False,
) -> EngineDir:
    """Builds the recipe's engine at `out`.

    An engine that is there already and is what the recipe would give is verified and returned as it is. Any
    other is replaced only if `force`; a folder that is not an engine never is. `keep_onnx` keeps the exported model
    in it (target tensorrt).

    Raises:
        LowkvError: the model cannot be had or is not supported, the recipe does not fit it or cannot be built here,
            the disk is full, `out` is taken, or the engine breaks a limit that its recipe requires.
    """
    out, progress = Path(out).absolute(), progress or NoProgress()
    target = _target(recipe, keep_onnx)
    checkpoint = open_model(recipe, progress)
    source = checkpoint_hashes(checkpoint, progress)
    recorded = list(_recorded(out))
    recipe, chosen = settled(recipe, checkpoint, source, [other.chosen for other in recorded], progress)
    scales, wanted = _manifest_without_files(target, recipe, checkpoint, source, recorded, progress)
    wanted = replace(wanted, chosen=chosen)
    if out.exists():
        existing = _existing(out, wanted, progress, force, keep_onnx)
        if existing is not None:
            return existing
    out.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_folder(out) as folder:
        files = _link_payload(out.parent, folder, wanted, progress, keep_onnx)
        if files is None:
            turned = with_rotated_values(checkpoint, CachePlan.from_mapping(dict(wanted.cache_plan)))
            files = _write_payload(target, turned, recipe, scales, folder, progress)
        _write_manifest(folder, wanted, files)
        _to_disk(folder)
        if recipe.quality.required:
            _gate(folder, progress)
        _rename(folder, out)
    return EngineDir.open(out, verify=False)


def _gate(folder: Path, progress: Progress) -> None:
    """Measures the engine in `folder`. Raises LowkvError when it breaks a limit of its recipe."""
    # Evaluation stands above engines; only here does a build look up to it.
    from lowkv.evaluation import gate

    gate.check(EngineDir.open(folder, verify=False), progress)


def _target(recipe: Recipe, keep_onnx: bool) -> Target:
    target = find_target(recipe.target)
    if recipe.quality.required:
        find_decoder_target(recipe.target)  # what cannot be measured here is refused before it is built
    if not keep_onnx:
        return target
    if not isinstance(target, TensorRTTarget):
        raise LowkvError(
            "there is no ONNX file to keep", got=f"target {recipe.target}", expected="a recipe with target: tensorrt"
        )
    return replace(target, keep_onnx=True)


def _manifest_without_files(
    target: Target,
    recipe: Recipe,
    checkpoint: Checkpoint,
    source: Mapping[str, str],
    recorded: Sequence[Manifest],
    progress: Progress,
) -> tuple[KVScales | None, Manifest]:
    """The manifest of the engine to be, and the scales in it, which are measured here unless an engine has them."""
    config = checkpoint.config
    plan = CachePlan.from_config(config, recipe.kv_cache)
    built_with = target.built_with(recipe)
    measured = recipe if recipe.calibration == "lowkv" else from_checkpoint(recipe)
    scales = scales_for(checkpoint, measured, plan, source, [other.scales for other in recorded], progress)
    return scales, Manifest(
        created_by=f"lowkv {lowkv.__version__}",
        target=recipe.target,
        requires=dict(target.requires) | dict(built_with),
        recipe=recipe.to_mapping(),
        model=config.to_mapping(),
        cache_plan=plan.to_mapping(),
        scales=dict(NO_SCALES) if scales is None else scales.to_mapping(plan),
        source=source,
        payload_inputs=dict(target.payload_inputs(recipe, plan, scales)),
        files={},
        varying=target.varying,
    )


def _recorded(out: Path) -> Iterator[Manifest]:
    """The manifest of the engine at `out` and of those beside it, as far as they can be read."""
    for path in (out, *sorted(path.parent for path in out.parent.glob(f"*/{MANIFEST}"))):
        try:
            yield read_manifest(path)
        except LowkvError:  # no engine, or a damaged one: whoever needs it will say so
            continue


def _existing(out: Path, wanted: Manifest, progress: Progress, force: bool, keep_onnx: bool) -> EngineDir | None:
    """The engine at `out` if it is the wanted one; None if it may be replaced; else an error."""
    if not (out / MANIFEST).is_file():
        if out.is_dir() and not any(out.iterdir()):
            return None
        raise LowkvError(
            f"{out} is in the way: it is not an engine", fix="choose another path, or move it away yourself"
        )
    try:
        manifest = read_manifest(out)
        if replace(manifest, files={}) == wanted and (ONNX in manifest.files or not keep_onnx):
            return EngineDir.open(out, progress=progress)
    except LowkvError:
        if force:
            return None
        raise
    if force:
        return None
    raise LowkvError(
        f"{out} holds another engine",
        got=f"{manifest.created_by}, {_difference(manifest, wanted)}",
        fix="use --force to replace it",
    )


def _difference(manifest: Manifest, wanted: Manifest) -> str:
    """What an engine has that is not as wanted, in words."""
    if manifest.requires != wanted.requires:
        return ", ".join(f"{name} {value}" for name, value in manifest.requires.items())
    if replace(manifest, files={}) == wanted:
        return "without its ONNX file"
    return "another recipe or model"


def _write_payload(
    target: Target, checkpoint: Checkpoint, recipe: Recipe, scales: KVScales | None, folder: Path, progress: Progress
) -> dict[str, FileRecord]:
    needed, free = target.payload_bytes(checkpoint, recipe), shutil.disk_usage(folder).free
    if needed > free:
        raise LowkvError(
            f"the disk of {folder.parent} is too full", got=f"{free} bytes free", expected=f"{needed} for the engine"
        )
    names = checkpoint.write_tokenizer(folder) + target.write_payload(checkpoint, recipe, scales, folder, progress)
    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    progress.begin("hashing the engine", sum(sizes.values()))
    return {name: FileRecord(size, sha256(folder / name, progress)) for name, size in sizes.items()}


def _write_manifest(folder: Path, wanted: Manifest, files: dict[str, FileRecord]) -> None:
    manifest = replace(wanted, files={name: files[name] for name in sorted(files) if name not in wanted.varying})
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    if wanted.varying:
        records = {name: files[name] for name in wanted.varying}
        (folder / VARYING).write_text(varying_json(manifest, records), encoding="utf-8")


def _link_payload(
    parent: Path, folder: Path, wanted: Manifest, progress: Progress, keep_onnx: bool
) -> dict[str, FileRecord] | None:
    """Hard-links the files of a neighbouring engine with the same payload; None if there is none."""
    for neighbour in sorted(path.parent for path in parent.glob(f"*/{MANIFEST}")):
        try:
            manifest = read_manifest(neighbour)
            if neighbour.name.startswith(".") or _payload_key(manifest) != _payload_key(wanted):
                continue
            files = read_records(neighbour, manifest)
            if keep_onnx and ONNX not in files:
                continue
            progress.begin(f"sharing the weights of {neighbour.name}", sum(record.bytes for record in files.values()))
            for name, record in files.items():
                (folder / name).parent.mkdir(exist_ok=True)
                os.link(neighbour / name, folder / name)
                check_file(folder / name, record, verify=True, progress=progress)
        except (LowkvError, OSError):
            # The neighbour is damaged or being replaced, or the file system has no links: build instead.
            _empty(folder)
            continue
        return files
    return None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _payload_key(manifest: Manifest) -> tuple[object, ...]:
    """Engines that agree in this have the same files, `engine.json` aside."""
    return (
        manifest.created_by,
        manifest.target,
        manifest.requires,
        manifest.model,
        manifest.source,
        manifest.payload_inputs,
    )


@contextmanager
def _scratch_folder(out: Path) -> Iterator[Path]:
    """A locked folder beside `out`, gone afterwards unless it was renamed; stale ones are removed first."""
    prefix = f".{out.name}.building-"
    for stale in out.parent.glob(f"{prefix}*"):
        _remove_if_unlocked(stale)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_if_unlocked(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:  # its build has just finished
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another build of the same engine is at work there
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _to_disk(folder: Path) -> None:
    """Makes the files read-only (neighbours may share them) and durable."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o755 if path.is_dir() else 0o444)
        _sync(path)


def _rename(folder: Path, out: Path) -> None:
    if out.exists():
        # A folder cannot be renamed over a full one. The old engine goes aside under a name that the next
        # build would clean up, should this one die between the two renames.
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
        out.rename(aside / out.name)
        folder.rename(out)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        folder.rename(out)
    _sync(out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
