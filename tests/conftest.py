"""What every test may use: folders of the checkout, a tiny model and engines of it, and skips that say why."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowkv.openmp import limit_spinning

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout's top folder."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a two-layer random Llama (4 heads, 2 KV heads) and one token per byte."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from lowkv.models.checkpoint import tensor_shapes
    from lowkv.models.config import ModelConfig

    folder = tmp_path_factory.mktemp("checkpoint")
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
        "max_position_embeddings": 2048,
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
    return folder


@pytest.fixture(scope="session")
def build_tiny(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """build_tiny(kv_cache={...}, serving={...}, target=...) builds the tiny model; returns the engine's directory."""
    from lowkv.engine.build import build_engine
    from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ServingConfig

    folder = tmp_path_factory.mktemp("engines")

    def build(kv_cache: dict[str, Any] | None = None, serving: dict[str, Any] | None = None, **settings: Any) -> Path:
        recipe = Recipe(
            name="tiny",
            model=ModelSource("folder", str(tiny_checkpoint)),
            kv_cache=KVCacheConfig(**({"format": "kivi2", "budget": 8 * 2**20} | (kv_cache or {}))),
            serving=ServingConfig(**({"max_sequences": 16, "max_tokens_per_step": 128} | (serving or {}))),
            **settings,
        )
        return build_engine(recipe, folder / str(len(list(folder.iterdir())))).path

    return build


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Jobs that a shell starts in the background ignore SIGINT, and what they start does too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_configure() -> None:
    """As every entry point does, before anything loads Torch."""
    limit_spinning(os.environ)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where no NVIDIA driver answers, with that reason."""
    if shutil.which("nvidia-smi") is None:
        skip = pytest.mark.skip(reason="no NVIDIA GPU: nvidia-smi is not installed")
        for item in items:
            if item.get_closest_marker("gpu"):  # not item.keywords: they hold folder names too
                item.add_marker(skip)
