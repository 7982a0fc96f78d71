"""Models written as Hugging Face folders are read back as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lowkv.engine.progress import NoProgress
from lowkv.errors import LowkvError
from lowkv.models.checkpoint import check_tensors, open_checkpoint, tensor_shapes
from lowkv.models.config import ModelConfig, RopeConfig
from lowkv.models.hf_folder import hf_config, write_hf_folder

ROPES = [
    RopeConfig(500000.0),
    RopeConfig(10000.0, "linear", 4.0),
    RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64),
]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ROPES)
def test_a_written_config_is_read_back(architecture: Any, rope: RopeConfig) -> None:
    windows = {"mistral": (16, 16, 16), "qwen2": (None, 16, 16)}.get(architecture, (None,) * 3)
    config = ModelConfig(
        architecture, 3, 64, 4, 2, 16, 96, 131, 1e-5, rope, 512, architecture != "qwen2",
        architecture == "qwen2", architecture == "qwen3", windows, 1, (2, 3),
    )  # fmt: skip
    assert ModelConfig.from_hf_config(json.loads(json.dumps(hf_config(config)))) == config


@pytest.mark.parametrize("rope", ROPES[:2])
@pytest.mark.parametrize("scalar", [None, 168.0])
def test_gemma_s_two_rotary_embeddings_are_read_back(rope: RopeConfig, scalar: float | None) -> None:
    config = ModelConfig(
        "gemma3_text", 3, 64, 4, 1, 32, 96, 131, 1e-6, rope, 512, True, False, True, (16, 16, None), 2, (1, 106),
        activation="gelu_tanh", post_norms=True, norm_offset=1.0, embedding_scale=8.0, query_scalar=scalar,
        local_rope=RopeConfig(20000.0),
    )  # fmt: skip
    assert ModelConfig.from_hf_config(json.loads(json.dumps(hf_config(config)))) == config
    with pytest.raises(LowkvError, match="another scaling for the layers with a window"):
        hf_config(replace(config, local_rope=RopeConfig(20000.0, "linear", 2.0)))


def test_a_rotary_embedding_without_a_config_is_refused(tiny_checkpoint: Path) -> None:
    config = open_checkpoint(tiny_checkpoint).config
    odd = replace(config, rope=RopeConfig(10000.0, "divisors", divisors=(1.0,) * 8))
    with pytest.raises(LowkvError, match="rotary embedding cannot be written"):
        hf_config(odd)


def test_a_checkpoint_of_another_kind_is_written_as_a_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    write_hf_folder(checkpoint, tmp_path, "float16", NoProgress())
    again = open_checkpoint(tmp_path)
    check_tensors(again)
    assert again.config == checkpoint.config
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == tensor_shapes(checkpoint.config).keys()
    assert all(torch.equal(tensor, checkpoint.tensor(name).half()) for name, tensor in written.items())
