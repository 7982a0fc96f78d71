"""What an engine is built for. Each target writes its own payload; everything around it is common.

A new target is a class of the protocol `Target` in its own module and a row in `TARGETS`. Who runs an engine asks
for more than that: Torch wants a target with a decoder (`find_decoder_target`), the TensorRT executor the TensorRT
target's `check_runtime`. Opening, inspecting and packing an engine need neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lowkv.engine.cpu import CpuTarget
from lowkv.engine.tensorrt.target import TensorRTTarget
from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.calibration.scales import KVScales
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
        """Versions of the payload's form: an engine with others cannot be read, and is refused when opened."""
        ...

    @property
    def varying(self) -> tuple[str, ...]:
        """Files of the payload whose bytes are not the same in every build of the same input."""
        ...

    def built_with(self, recipe: Recipe) -> Mapping[str, str]:
        """Versions of what builds the payload here. Noted in the manifest beside `requires`.

        They matter where the engine runs, and are checked there. Raises `LowkvError` when the recipe's payload
        cannot be built on this machine.
        """
        ...

    def payload_inputs(self, recipe: Recipe, plan: CachePlan, scales: KVScales | None) -> Mapping[str, Any]:
        """All that the payload depends on beside the checkpoint, `requires` and `built_with`.

        Engines that agree in it have the same payload, and share its files when they lie side by side.
        """
        ...

    def payload_bytes(self, checkpoint: Checkpoint, recipe: Recipe) -> int:
        """Size of the payload, nearly."""
        ...

    def write_payload(
        self, checkpoint: Checkpoint, recipe: Recipe, scales: KVScales | None, folder: Path, progress: Progress
    ) -> tuple[str, ...]:
        """Writes the payload into the folder; returns the file names, `/` between folders.

        `scales` are those of 8-bit keys and values, None where the plan has none.
        """
        ...


@runtime_checkable
class DecoderTarget(Target, Protocol):
    """A target whose payload is the weights of the Torch decoder."""

    def load_decoder(self, folder: Path, config: ModelConfig, device: str = "cpu") -> Decoder:
        """The model, ready to run. The files have been verified."""
        ...


TARGETS: Mapping[str, Target] = {"cpu": CpuTarget(), "cuda": CpuTarget(), "tensorrt": TensorRTTarget()}


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


def find_decoder_target(name: object) -> DecoderTarget:
    """The target of that name, if Torch runs it. Raises `LowkvError` for another."""
    target = find_target(name)
    if not isinstance(target, DecoderTarget):
        able = [key for key, value in TARGETS.items() if isinstance(value, DecoderTarget)]
        raise LowkvError(
            "this engine holds no weights that Torch could load",
            got=f"target {name}",
            expected=" or ".join(able),
            fix=f"set `target: {able[0]}` in the recipe and build again",
        )
    return target
