"""The K-outlier twin: the same function, other keys."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.twin import write_twin
from lowkv.calibration.probe import LayerStatistics, collect
from lowkv.models.checkpoint import Checkpoint, decoder_weights, open_checkpoint, tensor_shapes
from lowkv.models.config import ModelConfig
from lowkv.models.decoder import Decoder
from lowkv.models.dense import DenseAttention

TOKENS = np.random.default_rng(0).integers(0, 200, 96)

MODELS = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 40, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 64, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0}},
}


@pytest.fixture
def checkpoint_of(tiny_checkpoint: Path, tmp_path: Path) -> Callable[[str], Checkpoint]:
    """A small random model of each architecture, attentive enough for scores to matter."""

    def make(name: str) -> Checkpoint:
        folder = tmp_path / name
        shutil.copytree(tiny_checkpoint, folder)
        config = json.loads((folder / "config.json").read_text()) | {"model_type": name, "num_hidden_layers": 3}
        config = config | {"architectures": None} | MODELS[name]
        (folder / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(2)
        shapes = tensor_shapes(ModelConfig.from_hf_config(config))
        weights = {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes.items()}
        for key in weights:
            if key.endswith("norm.weight"):
                weights[key] += 1
        save_file(weights, folder / "model.safetensors")
        return open_checkpoint(folder)

    return make


def decoder_of(checkpoint: Checkpoint) -> Decoder:
    return Decoder(checkpoint.config, dict(decoder_weights(checkpoint, torch.float32, torch.float32)))


def logits(decoder: Decoder) -> torch.Tensor:
    dense = DenseAttention(decoder.config)
    dense.begin_step([(0, len(TOKENS))])
    positions = torch.arange(len(TOKENS))
    with torch.inference_mode():
        return decoder.forward(torch.from_numpy(TOKENS), positions, dense, positions)


def statistics(decoder: Decoder) -> tuple[LayerStatistics, ...]:
    return collect(decoder, [TOKENS], length=len(TOKENS), histograms=False)


@pytest.mark.parametrize("name", MODELS)
def test_the_twin_is_the_same_function_with_larger_keys(
    checkpoint_of: Callable[[str], Checkpoint], tmp_path: Path, name: str
) -> None:
    original = checkpoint_of(name)
    twin = open_checkpoint(write_twin(original, tmp_path / "twin", layers=[0, 2], pairs=1, factor=20))
    assert twin.config == original.config
    ours, theirs = decoder_of(original), decoder_of(twin)
    expected = logits(ours)
    # Not exactly: 1/20 is no power of two, and scores are added up from other numbers.
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    half = original.config.head_dim // 2
    for layer, (before, after) in enumerate(zip(statistics(ours), statistics(theirs), strict=True)):
        ratio = after.k.amax / before.k.amax
        scaled = ratio > 10
        assert scaled.sum() == (2 * original.config.kv_heads if layer != 1 else 0)
        np.testing.assert_array_equal(scaled[:, :half], scaled[:, half:])
        np.testing.assert_allclose(ratio[scaled], 20, rtol=1e-3)
        np.testing.assert_allclose(ratio[~scaled], 1, rtol=1e-3)
        np.testing.assert_allclose(after.v.amax, before.v.amax, rtol=1e-3)
        if layer != 1:
            assert after.k.outlier > 3 * before.k.outlier
    assert (tmp_path / "twin" / "tokenizer.json").is_file()


def test_a_twin_that_is_scaled_on_one_side_only_is_another_function(
    checkpoint_of: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the comparison above can fail."""
    from benchmarks import twin

    original, scaled = checkpoint_of("llama"), twin._scaled
    monkeypatch.setattr(twin, "_scaled", lambda t, name, *rest: t if ".q_proj." in name else scaled(t, name, *rest))
    other = open_checkpoint(write_twin(original, tmp_path / "twin"))
    expected = logits(decoder_of(original))
    assert (logits(decoder_of(other)) - expected).abs().max() > 0.01 * expected.abs().max()


def test_the_same_seed_gives_the_same_twin(checkpoint_of: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    original = checkpoint_of("llama")
    folders = [write_twin(original, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))]
    contents = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert contents[0] == contents[1] != contents[2]
