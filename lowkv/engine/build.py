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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import lowkv
from lowkv.engine.directory import MANIFEST, EngineDir, FileRecord, Manifest, check_file, read_manifest, sha256
from lowkv.engine.progress import NoProgress, Progress
from lowkv.engine.targets import find_target
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import CachePlan
from lowkv.models.checkpoint import Checkpoint
from lowkv.models.sources import open_source
from lowkv.recipe import Recipe


def build_engine(recipe: Recipe, out: str | Path, progress: Progress | None = None, force: bool = False) -> EngineDir:
    """Builds the recipe's engine at `out`.

    An engine that is there already and is what the recipe would give is verified and returned as it is. Any
    other is replaced only if `force`; a folder that is not an engine never is.

    Raises:
        LowkvError: the model cannot be had or is not supported, the recipe does not fit it, the disk is full, or
            `out` is taken.
    """
    out, progress = Path(out).absolute(), progress or NoProgress()
    progress.begin("opening the model")
    checkpoint = open_source(recipe.model, progress.begin)
    wanted = _manifest_without_files(recipe, checkpoint, progress)
    if out.exists():
        existing = _existing(out, wanted, progress, force)
        if existing is not None:
            return existing
    out.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_folder(out) as folder:
        files = _link_payload(out.parent, folder, wanted, progress)
        if files is None:
            files = _write_payload(checkpoint, recipe, folder, progress)
        (folder / MANIFEST).write_text(replace(wanted, files=files).to_json(), encoding="utf-8")
        _to_disk(folder)
        _rename(folder, out)
    return EngineDir.open(out, verify=False)


def _manifest_without_files(recipe: Recipe, checkpoint: Checkpoint, progress: Progress) -> Manifest:
    target = find_target(recipe.target)
    config = checkpoint.config
    plan = CachePlan.from_config(config, recipe.kv_cache)
    progress.begin("hashing the model", sum(path.stat().st_size for path in checkpoint.files))
    return Manifest(
        created_by=f"lowkv {lowkv.__version__}",
        target=recipe.target,
        requires=dict(target.requires),
        recipe=recipe.to_mapping(),
        model=config.to_mapping(),
        cache_plan=plan.to_mapping(),
        scales={"source": "unit", "values": None},
        source={path.name: sha256(path, progress) for path in checkpoint.files},
        payload_inputs=dict(target.payload_inputs(recipe, plan)),
        files={},
    )


def _existing(out: Path, wanted: Manifest, progress: Progress, force: bool) -> EngineDir | None:
    """The engine at `out` if it is the wanted one; None if it may be replaced; else an error."""
    if not (out / MANIFEST).is_file():
        if out.is_dir() and not any(out.iterdir()):
            return None
        raise LowkvError(
            f"{out} is in the way: it is not an engine", fix="choose another path, or move it away yourself"
        )
    try:
        manifest = read_manifest(out)
        if replace(manifest, files={}) == wanted:
            return EngineDir.open(out, progress=progress)
    except LowkvError:
        if force:
            return None
        raise
    if force:
        return None
    raise LowkvError(
        f"{out} holds another engine",
        got=f"{manifest.created_by}, another recipe or model",
        fix="use --force to replace it",
    )


def _write_payload(checkpoint: Checkpoint, recipe: Recipe, folder: Path, progress: Progress) -> dict[str, FileRecord]:
    target = find_target(recipe.target)
    needed, free = target.payload_bytes(checkpoint.config, recipe), shutil.disk_usage(folder).free
    if needed > free:
        raise LowkvError(
            f"the disk of {folder.parent} is too full", got=f"{free} bytes free", expected=f"{needed} for the engine"
        )
    names = checkpoint.write_tokenizer(folder) + target.write_payload(checkpoint, recipe, folder, progress)
    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    progress.begin("hashing the engine", sum(sizes.values()))
    return {name: FileRecord(size, sha256(folder / name, progress)) for name, size in sizes.items()}


def _link_payload(parent: Path, folder: Path, wanted: Manifest, progress: Progress) -> dict[str, FileRecord] | None:
    """Hard-links the files of a neighbouring engine with the same payload; None if there is none."""
    for neighbour in sorted(path.parent for path in parent.glob(f"*/{MANIFEST}")):
        try:
            manifest = read_manifest(neighbour)
            if neighbour.name.startswith(".") or _payload_key(manifest) != _payload_key(wanted):
                continue
            progress.begin(f"sharing the weights of {neighbour.name}", sum(r.bytes for r in manifest.files.values()))
            for name, record in manifest.files.items():
                os.link(neighbour / name, folder / name)
                check_file(folder / name, record, verify=True, progress=progress)
        except (LowkvError, OSError):
            # The neighbour is damaged or being replaced, or the file system has no links: build instead.
            for path in folder.iterdir():
                path.unlink()
            continue
        return dict(manifest.files)
    return None


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
    folder.chmod(0o755)
    for path in (*folder.iterdir(), folder):
        if path != folder:
            path.chmod(0o444)
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
