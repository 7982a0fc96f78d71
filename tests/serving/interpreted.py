"""Run in a process of its own, under TRITON_INTERPRET=1: one model served by the CPU's kernels and by the GPU's.

A random two-layer model, attended to far more than trained ones are, so that what is in the cache matters. Prints JSON:

    tokens      answers of the CPU's executor, of the GPU's (interpreted), of the CPU's with an FP16 cache
    gpu         largest difference between the candidates' log-probabilities, GPU to CPU
    format      the same, FP16 cache to this plan's: what a wrong cache would at least be off by
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch

from kvattention import Attention, select
from kvattention.gpu.attention import GpuAttention
from kvattention.gpu.torch_device import TorchDevice
from lowkv.kvcache import CachePlan, KVCache
from lowkv.models.config import ModelConfig
from lowkv.models.decoder import Decoder, weight_shapes
from lowkv.recipe import KVCacheConfig, ServingConfig
from lowkv.serving import SamplingParams, ServingEngine
from lowkv.serving.torch_executor import TorchExecutor

VOCAB = 97
MIXED = KVCacheConfig(format="k4v2", overrides={1: "fp8"}, residual_length=0, sink_tokens=0)
PROMPTS = (70, 3, 30)
"""In chunks beside decoding sequences; cold blocks written at once, and sealed later."""


class NoText:
    """Prompts are token ids, answers are read as such."""

    eos_ids = ()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return []

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return "x" * len(ids)


def decoder() -> Decoder:
    config = ModelConfig.from_hf_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": VOCAB,
            "eos_token_id": 0,
        }
    )
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.2
        for name, shape in weight_shapes(config).items()
    }
    return Decoder(config, {name: weight.half() for name, weight in weights.items()})


def served(model: Decoder, kv: KVCacheConfig, attention: Attention) -> tuple[list[list[int]], np.ndarray]:
    """(answers, log-probabilities of all tokens that were candidates, step by step)."""
    cache = KVCache(CachePlan.from_config(model.config, kv), 2**21, attention)
    executor = TorchExecutor(model, cache)
    seen: list[np.ndarray] = []

    def execute(*arguments: Any) -> Any:
        found = TorchExecutor.execute(executor, *arguments)
        for values, ids, lse in zip(found.values, found.ids, found.lse, strict=True):
            row = np.empty(VOCAB)
            row[ids] = values - lse
            seen.append(row)
        return found

    executor.execute = execute  # type: ignore[method-assign]
    limits = ServingConfig(max_tokens_per_step=48, max_sequences=3)
    engine = ServingEngine(executor, NoText(), limits, vocab=VOCAB, max_model_len=2048)  # type: ignore[arg-type]
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in PROMPTS]
    answers = engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
    cache.check_integrity()
    return [answer.token_ids for answer in answers], np.array(seen)


def main() -> None:
    model = decoder()
    cpu, on_cpu = served(model, MIXED, select("cpu", threads=1))
    gpu, on_gpu = served(model, MIXED, GpuAttention(TorchDevice("cpu")))
    fp16, in_fp16 = served(model, KVCacheConfig(format="fp16"), select("cpu", threads=1))
    print(
        json.dumps(
            {
                "tokens": {"cpu": cpu, "gpu": gpu, "fp16": fp16},
                "gpu": float(np.abs(on_gpu - on_cpu).max()),
                "format": float(np.abs(in_fp16[: len(PROMPTS)] - on_cpu[: len(PROMPTS)]).max()),
            }
        )
    )


if __name__ == "__main__":
    main()
