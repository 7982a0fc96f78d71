"""A Hugging Face folder as a checkpoint: `config.json`, one or several `.safetensors` files,
`tokenizer.json`.

Pickles (`pytorch_model.bin`) are never loaded, and no code of a checkpoint is ever run. Quantized tensors are not
understood here: see `lowkv.models.quantized_checkpoint`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError
from lowkv.models.config import ModelConfig, token_ids
from lowkv.models.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.calibration.scales import KVScales

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes, as safetensors names them, that weights come in unless they are quantized."""


def read_config(path: Path) -> ModelConfig:
    """The config of a Hugging Face folder, or of a bare `config.json`.

    The end-of-sequence ids of a `generation_config.json` beside it count too: chat models often list theirs
    only there.
    """
    if path.is_dir():
        path = path / "config.json"
    raw = read_json(path)
    generation = path.with_name("generation_config.json")
    if generation.is_file():
        eos = token_ids(raw.get("eos_token_id")) + token_ids(read_json(generation).get("eos_token_id"))
        raw["eos_token_id"] = list(dict.fromkeys(eos))
    return ModelConfig.from_hf_config(raw)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `LowkvError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LowkvError(f"cannot read {path}", got=str(error), expected="a JSON file") from error
    if not isinstance(value, dict):
        raise LowkvError(f"{path} is not a JSON object", got=type(value).__name__)
    return value


class SafetensorsCheckpoint:
    """Implements `lowkv.models.checkpoint.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards = _shards(folder)

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.folder)

    @property
    def files(self) -> tuple[Path, ...]:
        names = ["config.json", "generation_config.json", *TOKENIZER_FILES]
        return (*(self.folder / name for name in names if (self.folder / name).is_file()), *self._shards)

    @cached_property
    def _headers(self) -> dict[str, tuple[Path, tuple[int, ...], str]]:
        """Tensor name -> (file, shape, dtype)."""
        headers: dict[str, tuple[Path, tuple[int, ...], str]] = {}
        for shard in self._shards:
            for name, (shape, dtype) in _header(shard).items():
                headers[name] = (shard, shape, dtype)
        return headers

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape, _) in self._headers.items()}

    def stored(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype, as safetensors names it, of every tensor."""
        return self._stored

    @cached_property
    def _stored(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {name: (shape, dtype) for name, (_, shape, dtype) in self._headers.items()}

    def tensor(self, name: str) -> Tensor:
        shard, _, dtype = self._headers[name]
        if dtype not in FLOATS:
            raise LowkvError(
                f"tensor {name} of {shard} is quantized", got=dtype, expected="one of " + ", ".join(FLOATS)
            )
        return self.raw(name)

    def raw(self, name: str) -> Tensor:
        """A tensor in whatever dtype it is stored in."""
        from safetensors import safe_open

        with safe_open(self._headers[name][0], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def kv_scales(self) -> KVScales | None:
        return None

    def write_tokenizer(self, folder: Path) -> tuple[str, ...]:
        if not (self.folder / "tokenizer.json").is_file():
            raise LowkvError(
                f"{self.folder} has no tokenizer.json",
                expected="a tokenizer in the format of the tokenizers library",
                fix="write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
            )
        names = tuple(name for name in TOKENIZER_FILES if (self.folder / name).is_file())
        for name in names:
            shutil.copyfile(self.folder / name, folder / name)
        return names


def _shards(folder: Path) -> tuple[Path, ...]:
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise LowkvError(f"{folder / _INDEX} has no weight_map", fix="download the checkpoint again")
        names = sorted(set(weight_map.values()))
        for name in names:
            # The index comes with the checkpoint: it may name files beside it and nothing else.
            if Path(name).name != name or not (folder / name).is_file():
                raise LowkvError(
                    f"{folder / _INDEX} names {name}, which is not in the folder", fix="download the checkpoint again"
                )
        return tuple(folder / name for name in names)
    if (folder / _SINGLE).is_file():
        return (folder / _SINGLE,)
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    raise LowkvError(
        f"{folder} has no safetensors weights",
        got=", ".join(sorted(path.name for path in pickles)) or None,
        expected=f"{_SINGLE} or {_INDEX}",
        fix="lowkv never loads pickles; save the model again with safe_serialization=True" if pickles else None,
    )


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise LowkvError(f"cannot read {path}", got=str(error), expected="a whole safetensors file") from error
