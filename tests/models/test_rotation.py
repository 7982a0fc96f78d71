"""Rotated values: the function of the model is the same, and what is stored is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lowkv.engine import EngineDir
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import CachePlan, LayerPlan
from lowkv.models.checkpoint import Checkpoint, decoder_weights, open_checkpoint
from lowkv.models.decoder import Decoder
from lowkv.models.dense import DenseAttention
from lowkv.models.rotation import RotatedCheckpoint, hadamard, rotated_layers, with_rotated_values

TinyModels = Callable[[str], Any]


@pytest.mark.parametrize("size", [1, 2, 16, 64, 256])
def test_hadamard_is_its_own_inverse(size: int) -> None:
    matrix = hadamard(size)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5))
    torch.testing.assert_close(matrix, matrix.t())


def test_hadamard_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size 80"):
        hadamard(80)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_function_is_the_same_and_the_values_are_rotated(tiny_model: TinyModels, name: str) -> None:
    checkpoint = open_checkpoint(tiny_model(name).folder)
    config = checkpoint.config
    layer = config.layers - 1
    plain, plain_values = _run(checkpoint)
    rotated, values = _run(RotatedCheckpoint(checkpoint, frozenset({layer})))
    torch.testing.assert_close(rotated, plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(values[layer], plain_values[layer] @ hadamard(config.head_dim), atol=1e-4, rtol=0)
    assert (values[layer] - plain_values[layer]).abs().max() > 0.1
    torch.testing.assert_close(values[0], plain_values[0])


def _run(checkpoint: Checkpoint) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits of twelve tokens, and every layer's values."""
    config = checkpoint.config
    decoder = Decoder(config, dict(decoder_weights(checkpoint, torch.float32, torch.float32)))
    dense = DenseAttention(config)
    dense.begin_step([(0, 12)])
    values = {}

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        values[layer] = v.clone()
        return dense(layer, q, k, v)

    tokens = torch.arange(12) * 3 % config.vocab
    with torch.inference_mode():
        return decoder.forward(tokens, torch.arange(12), attention, torch.arange(12)), values


def test_only_layers_whose_format_rotates() -> None:
    assert rotated_layers(_plan(64, "kivi2", "kivi2plus", "k4v2plus", "fp16")) == (1, 2)
    checkpoint: Any = object()
    assert with_rotated_values(checkpoint, _plan(64, "kivi2")) is checkpoint


def test_heads_that_cannot_be_rotated_are_refused() -> None:
    with pytest.raises(LowkvError, match=r"layer 1: kivi2plus .*head_dim 80"):
        rotated_layers(_plan(80, "kivi2", "kivi2plus"))


def _plan(head_dim: int, *formats: str) -> CachePlan:
    layers = tuple(LayerPlan(name) for name in formats)
    return CachePlan(layers, 2, head_dim, 1.0, "fp16", "kivi2", 32, 128, "window", 32)


def test_an_engine_of_a_rotating_format_holds_rotated_weights(build_tiny: Callable[..., Path]) -> None:
    """The weights of rotated layers differ, and answers from a 16-bit cache do not."""
    plain, rotated = (EngineDir.open(build_tiny(kv_cache={"format": name})) for name in ("kivi2", "kivi2plus"))
    assert rotated.manifest.payload_inputs["rotated_values"] == [0, 1]
    assert "rotated_values" not in plain.manifest.payload_inputs
    logits = []
    for engine in (plain, rotated):
        decoder, dense = engine.load_decoder(), DenseAttention(engine.model_config)
        dense.begin_step([(0, 40)])
        with torch.inference_mode():
            logits.append(decoder.forward(torch.arange(40), torch.arange(40), dense, torch.arange(40)))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
    weights = [load_file(engine.path / "weights.safetensors") for engine in (plain, rotated)]
    changed = {name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])}
    assert changed == {f"layers.{layer}.{name}" for layer in (0, 1) for name in ("qkv", "output")}
