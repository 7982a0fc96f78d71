"""The `parameters` block of config.pbtxt: what the model reads at start, and what anybody may read of it.

`/v2/models/NAME/config` shows them, so that a client, a dashboard or a load test can see which KV format it is
really talking to, without trusting the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv import __version__
from lowkv.engine.directory import MANIFEST
from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.engine.directory import EngineDir

DEFAULT_MAX_WAITING = 512


@dataclass(frozen=True)
class ModelParameters:
    """What the model needs to start."""

    engine: str
    """The engine directory, relative to the model's folder, or absolute."""
    engine_sha256: str
    """Of engine.json, which in turn holds the hash of every other file."""
    budget: int
    threads: int | None = None
    max_waiting: int = DEFAULT_MAX_WAITING

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelParameters:
        """From a model configuration in JSON form, as Triton hands it to a model."""
        values = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        return cls.from_parameters(values)

    @classmethod
    def from_parameters(cls, values: Mapping[str, str]) -> ModelParameters:
        """The inverse of what `model_parameters` writes.

        Raises:
            LowkvError: a parameter is missing or not a number.
        """
        try:
            return cls(
                engine=values["engine"],
                engine_sha256=values["engine_sha256"],
                budget=int(values["kv_cache.budget_bytes"]),
                threads=int(values["serving.threads"]) or None,
                max_waiting=int(values["serving.max_waiting"]),
            )
        except KeyError as error:
            raise LowkvError(
                f"config.pbtxt has no parameter {error.args[0]}", fix="write the repository again: lowkv repo ENGINE"
            ) from None
        except ValueError as error:
            raise LowkvError(f"a parameter of config.pbtxt is not a number: {error}") from None

    def find_engine(self, model_folder: Path) -> Path:
        """The engine directory, seen to be the one that the repository was written for.

        Raises:
            LowkvError: it is not there, or it is another one now.
        """
        path = (model_folder.absolute() / self.engine).resolve()
        manifest = path / MANIFEST
        if not manifest.is_file():
            raise LowkvError(
                "the engine of this model repository is not where it was",
                got=str(path),
                expected="an engine directory",
                fix="move it back, write the repository again, or make it self-contained: lowkv repo ENGINE --copy",
            )
        if sha256_of(manifest) != self.engine_sha256:
            raise LowkvError(
                f"the engine {path} was built again after the model repository had been written",
                fix="write the repository again: lowkv repo ENGINE --force",
            )
        return path


def model_parameters(
    engine: EngineDir, where: str, *, budget: int, threads: int | None, max_waiting: int
) -> dict[str, str]:
    """All parameters of an engine's configuration, in the order in which they are written.

    `where` is the engine's path as the model shall look for it.
    """
    recipe, plan = engine.recipe, engine.cache_plan
    context = recipe.serving.max_model_len or engine.model_config.max_positions
    values: dict[str, object] = {
        "engine": where,
        "engine_sha256": sha256_of(engine.path / MANIFEST),
        "lowkv_version": __version__,
        "recipe": recipe.name,
        "compute": recipe.target,
        "compute.sm": engine.manifest.requires.get("sm", "any"),  # GPU generation, times ten
        "executor": "tensorrt" if recipe.target == "tensorrt" else "torch",
        "model.source": str(recipe.model) if recipe.model.kind in ("pypi", "hf") else recipe.model.kind,
        "model.architecture": engine.model_config.architecture,
        "weights.dtype": recipe.weights.dtype,
        "weights.quantization": recipe.weights.quantization,
        "lm_head.dtype": recipe.lm_head.effective,
        "kv_cache.format": plan.default,
        "kv_cache.layers": plan.summary(),
        "kv_cache.model_dtype": plan.hot,
        "kv_cache.group_size": plan.group_size,
        "kv_cache.residual_length": plan.residual_length,
        "kv_cache.residual": plan.residual,
        "kv_cache.sink_tokens": plan.sink_tokens,
        "kv_cache.budget_bytes": budget,
        "kv_cache.bytes_per_token": f"{plan.bytes_per_token:g}",
        "kv_cache.effective_bits": f"{plan.effective_bits(context):.3f}",
        "serving.max_model_len": context,
        "serving.max_sequences": recipe.serving.max_sequences,
        "serving.max_tokens_per_step": recipe.serving.max_tokens_per_step,
        "serving.policy": recipe.serving.policy,
        "serving.max_waiting": max_waiting,
        "serving.threads": threads or 0,  # 0: every core
    }
    return {key: str(value) for key, value in values.items()}


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
