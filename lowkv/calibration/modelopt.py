"""NVIDIA ModelOpt as the calibrator: FP8 scales of keys and values, and FP8 or INT4-AWQ weights, as a checkpoint.

The checkpoint is a Hugging Face folder that TensorRT-LLM and vLLM read as well as lowkv. ModelOpt has requirements of
its own and runs in an interpreter of its own, `modelopt_job`; the text it reads is the recipe's, tokenized here. A
model that is not a Hugging Face folder (GGUF, a package) is written as one first.

The result appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lowkv.engine.progress import Progress
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.recipe import Recipe

PYTHON = "LOWKV_MODELOPT_PYTHON"
"""Environment variable: the interpreter that has ModelOpt, when it is not the one that runs lowkv."""

WINDOW = 512
"""Tokens that the model reads at once."""

_SCRIPT = Path(__file__).with_name("modelopt_job.py")

_PROBE = (
    "import json, modelopt.torch.export, modelopt.torch.quantization, transformers;"
    "print('\\n' + json.dumps([modelopt.__version__, transformers.__version__]))"
)


def calibrate(recipe: Recipe, out: Path, progress: Progress, python: Path | None = None) -> Path:
    """Writes the recipe's model, calibrated by ModelOpt, to the new folder `out`.

    Args:
        recipe: its model; `weights` says what becomes of the weights, `kv_cache.scales` on which text (`random`: on
            random tokens; any other source: on the dataset).
        out: must not exist.
        progress: watches.
        python: the interpreter that has ModelOpt; None is $LOWKV_MODELOPT_PYTHON, or this one.

    Raises:
        LowkvError: ModelOpt is not installed there or fails, or the model is not one to calibrate.
    """
    from lowkv.models.sources import open_source

    if out.exists():
        raise LowkvError(f"{out} is in the way", fix="choose another folder, or move it away yourself")
    interpreter = _interpreter(python)
    version = _version(interpreter)
    progress.begin("opening the model")
    checkpoint = open_source(recipe.model, progress.begin)
    _calibrate(checkpoint, recipe, out, progress, interpreter, version)
    return out


def open_model(recipe: Recipe, progress: Progress) -> Checkpoint:
    """The model that the recipe's engine is built from; with `calibration: modelopt` as ModelOpt exports it.

    Raises LowkvError when it cannot be had, or as `calibrate` does.
    """
    from lowkv.models.checkpoint import open_checkpoint
    from lowkv.models.sources import open_source

    progress.begin("opening the model")
    if recipe.calibration == "lowkv":
        return open_source(recipe.model, progress.begin)
    return open_checkpoint(calibrated(recipe, progress))


def calibrated(recipe: Recipe, progress: Progress) -> Path:
    """The folder of the recipe's model, calibrated by ModelOpt: kept in the cache, made when it is not there yet.

    Raises LowkvError as `calibrate` does.
    """
    from lowkv.engine.directory import checkpoint_hashes
    from lowkv.models.sources import cache_folder, open_source

    interpreter = _interpreter(None)
    version = _version(interpreter)
    progress.begin("opening the model")
    checkpoint = open_source(recipe.model, progress.begin)
    depends = {
        "modelopt": version,
        "model": checkpoint_hashes(checkpoint, progress),
        "weights": asdict(recipe.weights),
        "windows": _windows(checkpoint, recipe),
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_folder() / "modelopt" / key
    if not folder.is_dir():
        _calibrate(checkpoint, recipe, folder, progress, interpreter, version)
    return folder


def from_checkpoint(recipe: Recipe) -> Recipe:
    """The recipe of an engine that is built from the calibrated checkpoint: its scales are the checkpoint's."""
    from lowkv.recipe import ScalesConfig

    return replace(recipe, kv_cache=replace(recipe.kv_cache, scales=ScalesConfig(source="checkpoint")))


def _interpreter(python: Path | None) -> str:
    return str(python or os.environ.get(PYTHON) or sys.executable)


def _version(interpreter: str) -> str:
    """Of ModelOpt there. Raises LowkvError where it cannot be imported."""
    try:
        result = subprocess.run(
            [interpreter, "-c", _PROBE], capture_output=True, text=True, check=False, env=_offline()
        )
    except OSError as error:
        raise LowkvError(f"cannot start the interpreter {interpreter}", got=str(error)) from error
    if result.returncode:
        raise LowkvError(
            f"NVIDIA ModelOpt is not installed for {interpreter}",
            got=_last_line(result.stderr),
            expected="nvidia-modelopt and transformers",
            fix="python -m venv modelopt && modelopt/bin/pip install 'nvidia-modelopt[hf]', then --python "
            f"modelopt/bin/python, or set {PYTHON}",
        )
    return str(json.loads(result.stdout.splitlines()[-1])[0])


def _calibrate(
    checkpoint: Checkpoint, recipe: Recipe, out: Path, progress: Progress, interpreter: str, version: str
) -> None:
    from lowkv.models.checkpoint import check_tensors
    from lowkv.models.quantized import Quantization
    from lowkv.models.quantized_checkpoint import QuantizedCheckpoint

    if isinstance(checkpoint, QuantizedCheckpoint):
        raise LowkvError(
            "the recipe's model is quantized or calibrated already",
            got=checkpoint.scheme.library,
            expected="a model in floating point",
            fix="set calibration: lowkv and kv_cache.scales.source: checkpoint to use it as it is",
        )
    check_tensors(checkpoint)
    Quantization(recipe.weights.quantization, recipe.weights.group_size).check(checkpoint.config)
    windows = _windows(checkpoint, recipe)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch) / "result"
        folder.mkdir()
        job = {
            "model": str(_hf_folder(checkpoint, Path(scratch) / "model", recipe.weights.dtype, progress).absolute()),
            "out": str(folder.absolute()),
            "dtype": recipe.weights.dtype,
            "weights": recipe.weights.quantization,
            "group_size": recipe.weights.group_size,
            "windows": windows,
        }
        _run(interpreter, job, Path(scratch), progress)
        checkpoint.write_tokenizer(folder)
        _check_result(folder, version)
        folder.rename(out)


def _windows(checkpoint: Checkpoint, recipe: Recipe) -> list[list[int]]:
    """The tokens that the model reads, in windows."""
    from lowkv.calibration.routes import load_tokenizer
    from lowkv.calibration.text import bundled_dataset, dataset_tokens, random_tokens, read_dataset, windows

    wanted, tokenizer = recipe.kv_cache.scales, load_tokenizer(checkpoint)
    if wanted.source == "random":
        ids = random_tokens(tokenizer, checkpoint.config.vocab, wanted.tokens, wanted.seed)
    else:
        dataset = bundled_dataset() if wanted.text is None else read_dataset(_text_path(recipe, wanted.text))
        ids = dataset_tokens(dataset, tokenizer, wanted.tokens, wanted.seed)
    length = min(WINDOW, checkpoint.config.max_positions)
    return [window.tolist() for window in windows(ids, length, tokenizer.prefix)]


def _text_path(recipe: Recipe, text: str) -> Path:
    path = Path(text).expanduser()
    return path if recipe.model.base is None else recipe.model.base / path


def _run(interpreter: str, job: Mapping[str, Any], scratch: Path, progress: Progress) -> None:
    """Runs the job and passes its progress on. Raises LowkvError, with what it said last, when it fails."""
    (scratch / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [interpreter, "-P", str(_SCRIPT), str(scratch / "job.json")]
    with (scratch / "log").open("w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=_offline()) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    _pass_on(json.loads(line), progress)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            log.seek(0)
            raise LowkvError(
                "ModelOpt failed",
                got=_last_line(log.read()),
                expected="a calibrated checkpoint",
                fix="see its requirements; `calibration: lowkv` measures scales without it",
            )


def _pass_on(told: Mapping[str, Any], progress: Progress) -> None:
    if "stage" in told:
        progress.begin(told["stage"], told.get("total"))
    else:
        progress.advance(told["advance"])


def _check_result(folder: Path, version: str) -> None:
    """Raises LowkvError for an export that lowkv would not build from."""
    from lowkv.models.checkpoint import check_tensors, open_checkpoint
    from lowkv.models.quantized_checkpoint import QuantizedCheckpoint

    result = open_checkpoint(folder)
    check_tensors(result)
    if not isinstance(result, QuantizedCheckpoint) or result.found_scales.warnings or not result.found_scales.any:
        raise LowkvError(
            "ModelOpt exported no usable scales of keys and values",
            got=f"ModelOpt {version}",
            expected="a scale for K and V of every layer",
            fix="use another version of nvidia-modelopt",
        )


def _offline() -> dict[str, str]:
    return dict(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1]


# -- a Hugging Face folder -------------------------------------------------------------------------------------------


def _hf_folder(checkpoint: Checkpoint, folder: Path, dtype: str, progress: Progress) -> Path:
    """The folder of a checkpoint that is one, or `folder`, made of one that is not.

    Of a folder only config and weights are linked to: nothing else that lies there is seen by transformers.
    """
    from lowkv.models.hf_folder import write_hf_folder
    from lowkv.models.safetensors_checkpoint import SafetensorsCheckpoint

    folder.mkdir()
    if isinstance(checkpoint, SafetensorsCheckpoint):
        for path in (*checkpoint.folder.glob("*.safetensors*"), checkpoint.folder / "config.json"):
            (folder / path.name).symlink_to(path.resolve())
        return folder
    return write_hf_folder(checkpoint, folder, dtype, progress)
