"""A tiny random Llama as an engine, its model repository, and a real Triton server on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ServingConfig
from lowkv.triton.client import GenerateClient
from lowkv.triton.repository import write_repository
from lowkv.triton.server import TritonServer

CONTEXT = 2048
MAX_SEQUENCES = 16
MAX_WAITING = 40


def write_checkpoint(folder: Path) -> None:
    """A Hugging Face folder with random weights and a tokenizer with one token per byte."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from lowkv.models.checkpoint import tensor_shapes
    from lowkv.models.config import ModelConfig

    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(alphabet) + 1,
        "bos_token_id": None,
        "eos_token_id": len(alphabet),
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in tensor_shapes(ModelConfig.from_hf_config(config)).items()
    }
    save_file(weights, folder / "model.safetensors")


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lowkv.engine.build import build_engine

    folder = tmp_path_factory.mktemp("triton")
    write_checkpoint(folder / "checkpoint")
    recipe = Recipe(
        name="tiny",
        model=ModelSource("folder", str(folder / "checkpoint")),
        kv_cache=KVCacheConfig(format="kivi2", budget=8 * 2**20, overrides={0: "k4v2"}),
        serving=ServingConfig(max_sequences=MAX_SEQUENCES, max_tokens_per_step=128),
    )
    return build_engine(recipe, folder / "engines" / "tiny").path


@pytest.fixture(scope="session")
def repository(engine: Path) -> Path:
    return write_repository(engine, engine.parent.parent / "repos" / "tiny", max_waiting=MAX_WAITING)


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, http_port=0, grpc_port=0, metrics_port=0, exit_timeout=3) as running:
        yield running


@pytest.fixture
def client(server: TritonServer) -> GenerateClient:
    return GenerateClient(server.http_url, server.model_name, timeout=60)
