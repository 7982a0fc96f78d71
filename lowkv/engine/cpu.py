"""Targets `cpu` and `cuda`: the Torch decoder, on this machine's cores or on its GPU.

Their payload is `weights.safetensors`, in the decoder's own layout, quantized matrices as `lowkv.models.quantized`
stores them. On the CPU the file is mapped, not read: weights take no memory twice, start-up is quick, and several
servers that serve the same file share its pages. Quantized matrices are the exception: each server decodes (or, for
Torch's INT4 kernel, reorders) them for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.models.checkpoint import WeightsFormat, check_tensors, conversion_stage
from lowkv.models.rotation import rotated_layers

if TYPE_CHECKING:
    from lowkv.calibration.scales import KVScales
    from lowkv.engine.progress import Progress
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.config import ModelConfig
    from lowkv.models.decoder import Decoder
    from lowkv.recipe import Recipe

WEIGHTS = "weights.safetensors"


class CpuTarget:
    """Implements `lowkv.engine.targets.Target`."""

    requires: Mapping[str, str] = {"weights_layout": "1"}
    """Raised whenever `decoder.weight_shapes` changes its names, shapes or their meaning."""

    varying: tuple[str, ...] = ()

    def built_with(self, recipe: Recipe) -> Mapping[str, str]:
        return {}

    def payload_inputs(self, recipe: Recipe, plan: CachePlan, scales: KVScales | None) -> Mapping[str, Any]:
        """Scales are read from the manifest: engines that differ in them share their weights."""
        return weights_inputs(recipe, plan)

    def payload_bytes(self, checkpoint: Checkpoint, recipe: Recipe) -> int:
        return weights_bytes(checkpoint, WeightsFormat.from_recipe(recipe))

    def write_payload(
        self, checkpoint: Checkpoint, recipe: Recipe, scales: KVScales | None, folder: Path, progress: Progress
    ) -> tuple[str, ...]:
        from lowkv.models.weights_file import write_weights

        weights = WeightsFormat.from_recipe(recipe)
        check_tensors(checkpoint)
        layout = weights.layout(checkpoint.config, checkpoint)
        total = sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())
        progress.begin(conversion_stage(checkpoint, weights), total)
        write_weights(folder / WEIGHTS, layout, weights.tensors(checkpoint), progress.advance)
        return (WEIGHTS,)

    def load_decoder(self, folder: Path, config: ModelConfig, device: str = "cpu") -> Decoder:
        from safetensors.torch import load_file

        from lowkv.models.decoder import Decoder
        from lowkv.models.quantized import assembled

        return Decoder(config, assembled(load_file(folder / WEIGHTS, device=device)))


def weights_inputs(recipe: Recipe, plan: CachePlan) -> dict[str, Any]:
    """What the stored weights depend on beside the checkpoint."""
    inputs: dict[str, Any] = {"weights": recipe.weights.dtype, "lm_head": recipe.lm_head.effective}
    if recipe.weights.quantization != "none":
        inputs["quantization"] = recipe.weights.quantization
    if recipe.weights.quantization == "int4":
        inputs["group_size"] = recipe.weights.group_size
    if rotated := rotated_layers(plan):
        inputs["rotated_values"] = list(rotated)
    return inputs


def weights_bytes(checkpoint: Checkpoint, weights: WeightsFormat) -> int:
    """Bytes of the stored weights."""
    layout = weights.layout(checkpoint.config, checkpoint)
    return sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())
