"""Model repositories: what `lowkv repo` writes and `lowkv serve` reads.

    REPOSITORY/
      NAME/                 one decoupled model, named by the recipe
        config.pbtxt
        1/model.py          the shim from model_repo/
        1/engine/           only with copy=True; else config.pbtxt says where the engine is

Without `copy` the engine is found by its path relative to the model's folder, so that a tree holding both can be
moved as a whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowkv.assets import asset
from lowkv.errors import LowkvError
from lowkv.recipe import TritonConfig
from lowkv.triton.config import TritonModelConfig, config_from_pbtxt
from lowkv.triton.parameters import DEFAULT_MAX_WAITING, ModelParameters, model_parameters

_VERSION = "1"
_CONFIG = "config.pbtxt"
_MARK = "lowkv_version"  # the parameter that tells our models from others


@dataclass(frozen=True)
class Repository:
    """A model repository on disk, checked as far as can be without loading it."""

    path: Path
    config: TritonModelConfig
    engine: Path
    triton: TritonConfig
    threads: int | None

    @property
    def model_name(self) -> str:
        return self.config.name

    @classmethod
    def open(cls, path: Path) -> Repository:
        """Reads a repository that `write_repository` wrote.

        Raises:
            LowkvError: it is not one, or its engine is missing or another one.
        """
        from lowkv.engine.directory import EngineDir

        folders = sorted(config.parent for config in path.glob(f"*/{_CONFIG}"))
        if len(folders) != 1:
            raise LowkvError(
                f"{path} is not a model repository of lowkv",
                got=f"{len(folders)} models" if path.is_dir() else "no such folder",
                expected="a folder with one model in it",
                fix="write one: lowkv repo ENGINE",
            )
        config = config_from_pbtxt((folders[0] / _CONFIG).read_text(encoding="utf-8"))
        if config.name != folders[0].name or _MARK not in config.parameters:
            raise LowkvError(f"{folders[0]} is not a model of lowkv", fix="write one: lowkv repo ENGINE")
        parameters = ModelParameters.from_parameters(config.parameters)
        engine = parameters.find_engine(folders[0])
        return cls(
            path=path.absolute(),
            config=config,
            engine=engine,
            triton=EngineDir.open(engine, verify=False).recipe.triton,
            threads=parameters.threads,
        )


def write_repository(
    engine: Path,
    out: Path,
    *,
    copy: bool = False,
    force: bool = False,
    model_name: str | None = None,
    budget: int | None = None,
    threads: int | None = None,
    max_waiting: int = DEFAULT_MAX_WAITING,
    gpus: Sequence[int] | None = None,
) -> Path:
    """Writes the Triton model repository of `engine` at `out` and returns `out`.

    It appears whole or not at all. `copy` puts the engine inside. `budget` (bytes of KV cache) and `threads` differ
    from the recipe's where given; `max_waiting` bounds the requests that wait for a place in the engine. `gpus` are the
    ids of the GPUs that get an instance of a GPU's engine each, with a cache of `budget` bytes each; None is the first.

    Raises:
        LowkvError: the engine is damaged, budget or `gpus` impossible, or `out` exists (without `force`, or when it is
            not a model repository, which is never removed).
    """
    from lowkv.engine.directory import EngineDir

    opened = EngineDir.open(engine, verify=True)
    recipe = opened.recipe
    name = model_name or recipe.triton.model_name or recipe.name
    if max_waiting < 1:
        raise LowkvError("max_waiting is out of range", got=max_waiting, expected="at least 1")
    out = out.absolute()
    _check_replaceable(out, force)
    out.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        new.chmod(0o755)
        version = new / name / _VERSION
        version.mkdir(parents=True)
        shutil.copyfile(asset(f"model_repo/{_VERSION}/model.py"), version / "model.py")
        if copy:
            shutil.copytree(opened.path, version / "engine")
            where = f"{_VERSION}/engine"
        else:
            where = os.path.relpath(opened.path.resolve(), (out / name).resolve())
        config = TritonModelConfig(
            name,
            model_parameters(
                opened,
                where,
                budget=recipe.kv_cache.budget if budget is None else budget,
                threads=recipe.serving.threads if threads is None else threads,
                max_waiting=max_waiting,
            ),
            gpus=_gpus(recipe.target, gpus),
        )
        text = config.to_pbtxt()
        config.check(text)
        (new / name / _CONFIG).write_text(text, encoding="utf-8")
        _replace(new, out)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return out


def _gpus(target: str, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """The instance group's GPUs: none for an engine that runs on the CPU."""
    if target == "cpu":
        if wanted:
            raise LowkvError(
                "this engine runs on the CPU",
                got=f"GPUs {', '.join(map(str, wanted))}",
                expected="no GPU ids",
                fix="leave --gpus out, or build the recipe with target: cuda or tensorrt",
            )
        return ()
    gpus = (0,) if wanted is None else tuple(wanted)
    if not gpus or len(set(gpus)) < len(gpus) or min(gpus) < 0:
        raise LowkvError("GPU ids are out of range", got=gpus, expected="different ids from 0 on, at least one")
    return gpus


def _check_replaceable(out: Path, force: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    ours = out.is_dir() and all((child / _CONFIG).is_file() for child in out.iterdir())
    if not ours:
        raise LowkvError(
            f"{out} exists and is not a model repository; it is left alone", fix="choose another place with --out"
        )
    if not force:
        raise LowkvError(f"{out} exists", fix="replace it with --force, or choose another place with --out")


def _replace(new: Path, out: Path) -> None:
    if not out.exists():
        new.rename(out)
        return
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-old-", dir=out.parent) as old:
        out.rename(Path(old) / out.name)
        new.rename(out)
