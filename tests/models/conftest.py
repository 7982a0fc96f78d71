"""Tiny random models of every supported architecture, made and saved by transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lowkv.models.decoder import Decoder

_COMMON = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Wide enough that logits differ clearly: greedy tokens must not hang on rounding.
    "initializer_range": 0.15,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama-rope-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 2.0},
            },
        },
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A model as transformers made it, and the folder that it saved it to."""

    reference: PreTrainedModel
    folder: Path


class Served:
    """One sequence fed through the serving executor: FP16 KV cache, CPU kernels."""

    def __init__(self, decoder: Decoder) -> None:
        from kvattention import select
        from lowkv.kvcache import CachePlan, KVCache
        from lowkv.recipe import KVCacheConfig
        from lowkv.serving.torch_executor import TorchExecutor

        plan = CachePlan.from_config(decoder.config, KVCacheConfig(format="fp16"))
        self.cache = KVCache(plan, 2**25, select("cpu"))
        self.executor = TorchExecutor(decoder, self.cache)
        self.sequence = self.cache.add()

    def feed(self, tokens: list[int]) -> Tensor:
        """Logits after each of the tokens, [n, vocab]."""
        step = self.cache.prepare([(self.sequence, len(tokens))])
        logits = self.executor.logits(np.array(tokens), step, np.arange(len(tokens)))
        self.cache.commit(step)
        return logits


@pytest.fixture(scope="session")
def rounded_cache() -> Callable[[], Any]:
    """Makes a transformers cache that rounds keys and values to FP16, as an FP16 KV cache does.

    Against plain transformers, that rounding alone moves SmolLM2's logits by up to 0.04; against this, what is left
    is the order of additions.
    """
    from transformers import DynamicCache

    class RoundedCache(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states.half().float(), value_states.half().float(), *args, **kwargs)

    return RoundedCache


@pytest.fixture
def serve() -> Callable[[Decoder], Served]:
    """serve(decoder).feed(tokens) gives logits as the serving engine computes them."""
    return Served


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """tiny_model(name) for a name of TINY_MODELS; each is made once."""
    import torch
    import transformers

    made: dict[str, TinyModel] = {}

    def make(name: str) -> TinyModel:
        if name not in made:
            family, settings = TINY_MODELS[name]
            config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
            config = getattr(transformers, config_class)(**(_COMMON | settings))
            config._attn_implementation = "eager"
            torch.manual_seed(len(name))
            model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.endswith(("norm.weight", "bias")):  # made as ones and zeros: nothing to get wrong
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = TinyModel(model, folder)
        return made[name]

    return make
