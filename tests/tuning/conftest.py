"""A model of four random layers, one of which matters much more than the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

FRAGILE = 2
LAYERS = 4
FORMATS = ("kivi4", "k4v2plus", "kivi2plus")

TEXT = " ".join(f"Sentence {n} is about {n * 7919 % 1009} birds and {n * 104729 % 997} bees." for n in range(120))

RECIPE = """\
# a comment that is not kept
name: given
model: folder:{folder}
kv_cache:
  format: fp16
  residual_length: 32
  sink_tokens: 0
  budget: 8MiB
serving:
  max_sequences: 7
"""


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with more layers; what attention says is loud in one of them and faint in the others."""
    import torch
    from safetensors.torch import save_file

    from lowkv.models.checkpoint import tensor_shapes
    from lowkv.models.config import ModelConfig

    folder = tmp_path_factory.mktemp("fragile")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint / name, folder)
    config = json.loads((tiny_checkpoint / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.1 if len(shape) > 1 else torch.ones(shape)
        for name, shape in tensor_shapes(ModelConfig.from_hf_config(config)).items()
    }
    for layer in range(LAYERS):
        for name in ("q", "k"):  # attention is sharp: no average hides what one key lost
            weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] *= 2
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"] *= 4 if layer == FRAGILE else 0.02
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def recipe(checkpoint: Path, tmp_path: Path) -> Path:
    """A recipe of that model."""
    path = tmp_path / "given.yaml"
    path.write_text(RECIPE.format(folder=checkpoint))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Text for a few windows."""
    path = tmp_path / "birds.txt"
    path.write_text(TEXT)
    return path
