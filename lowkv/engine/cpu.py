"""Target `cpu`: the Torch decoder on this machine's cores.

Its payload is `weights.safetensors`, in the decoder's own layout.
The file is mapped, not read: weights take no memory twice, start-up is quick, and several servers that serve
the same file share its pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    import torch

    from lowkv.engine.progress import Progress
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.config import ModelConfig
    from lowkv.models.decoder import Decoder
    from lowkv.recipe import Recipe

WEIGHTS = "weights.safetensors"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class CpuTarget:
    """Implements `lowkv.engine.targets.Target`."""

    requires: Mapping[str, str] = {"weights_layout": "1"}
    """Raised whenever `decoder.weight_shapes` changes its names, shapes or their meaning."""

    def payload_inputs(self, recipe: Recipe, plan: CachePlan) -> Mapping[str, Any]:
        return {"weights": recipe.weights.dtype, "lm_head": recipe.lm_head.dtype}

    def payload_bytes(self, config: ModelConfig, recipe: Recipe) -> int:
        head = config.head_count()
        return head * _BYTES[recipe.lm_head.dtype] + (config.weight_count() - head) * _BYTES[recipe.weights.dtype]

    def write_payload(
        self, checkpoint: Checkpoint, recipe: Recipe, folder: Path, progress: Progress
    ) -> tuple[str, ...]:
        from math import prod

        from lowkv.engine.weights_file import write_weights
        from lowkv.models.checkpoint import check_tensors, decoder_weights
        from lowkv.models.decoder import weight_shapes

        body, head = _dtypes(recipe)
        check_tensors(checkpoint)
        layout = {
            name: (shape, head if name == "lm_head" else body)
            for name, shape in weight_shapes(checkpoint.config).items()
        }
        progress.begin("converting weights", sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values()))
        write_weights(folder / WEIGHTS, layout, decoder_weights(checkpoint, body, head), progress.advance)
        return (WEIGHTS,)

    def load_decoder(self, folder: Path, config: ModelConfig) -> Decoder:
        from safetensors.torch import load_file

        from lowkv.models.decoder import Decoder

        return Decoder(config, load_file(folder / WEIGHTS))


def _dtypes(recipe: Recipe) -> tuple[torch.dtype, torch.dtype]:
    import torch

    body, head = recipe.weights.dtype, recipe.lm_head.dtype
    if head not in (body, "float32"):
        raise LowkvError(
            "lm_head.dtype and weights.dtype do not go together",
            got=f"lm_head {head}, weights {body}",
            expected=f"lm_head.dtype float32 or {body}",
        )
    return getattr(torch, body), getattr(torch, head)
