"""What an engine is built for. Each target writes and loads its own payload; everything around it is common.

A new target (`tensorrt`, `tensorrt_llm`) is a class of this protocol in its own module and a row in
`TARGETS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lowkv.engine.cpu import CpuTarget
from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.engine.progress import Progress
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.config import ModelConfig
    from lowkv.models.decoder import Decoder
    from lowkv.recipe import Recipe


class Target(Protocol):
    """One kind of engine."""

    @property
    def requires(self) -> Mapping[str, str]:
        """Versions that must be the same when the engine is built and when it is loaded."""
        ...

    def payload_inputs(self, recipe: Recipe, plan: CachePlan) -> Mapping[str, Any]:
        """All that the payload depends on beside the checkpoint and `requires`.

        Engines that agree in it have the same payload, and share its files when they lie side by side.
        """
        ...

    def payload_bytes(self, config: ModelConfig, recipe: Recipe) -> int:
        """Size of the payload, nearly."""
        ...

    def write_payload(
        self, checkpoint: Checkpoint, recipe: Recipe, folder: Path, progress: Progress
    ) -> tuple[str, ...]:
        """Writes the payload into the folder; returns the file names."""
        ...

    def load_decoder(self, folder: Path, config: ModelConfig) -> Decoder:
        """The model, ready to run. The files have been verified."""
        ...


TARGETS: Mapping[str, Target] = {"cpu": CpuTarget(), "cuda": CpuTarget()}


def find_target(name: object) -> Target:
    """The target of that name. Raises `LowkvError` for one that this lowkv cannot build or load."""
    if not isinstance(name, str) or name not in TARGETS:
        raise LowkvError(
            "this engine target is not known",
            got=name,
            expected=" or ".join(TARGETS),
            fix="use the lowkv that the engine was built with, or set target in the recipe and build again",
        )
    return TARGETS[name]
