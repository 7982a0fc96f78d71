"""Section `serving`: the serving engine on random weights of Llama-3-8B's shape, every KV format at the same budget.

Far more requests are queued than fit, all alike. What is recorded of each format, in its share of the time:

    predicted, resident     sequences at once, as the planner counts and as the scheduler held
    tokens_per_second       output tokens while the cache was full, prompts of newcomers among the work; none if it
                            was not full in time
    step_ms, model_ms       a step in that time, and the part of it inside model and attention (with the wait for it)

Before that, the prompt's last logits through the paged FP16 cache are compared with plain causal attention in Torch:
the decoder and the kernels together, on this card.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu.report import Section, table
from kvattention.gpu.attention import GpuAttention
from kvattention.gpu.torch_device import TorchDevice
from lowkv.kvcache import CachePlan, KVCache, max_resident
from lowkv.models.config import ModelConfig
from lowkv.models.decoder import Decoder, weight_shapes
from lowkv.recipe import KVCacheConfig, ServingConfig
from lowkv.serving import Request, SamplingParams, ServingEngine
from lowkv.serving.torch_executor import TorchExecutor


@dataclass(frozen=True)
class Sizes:
    model: dict[str, Any]
    formats: tuple[str, ...]
    budget: int
    prompt: int
    output: int
    sequences: int
    tokens_per_step: int
    requests: int
    """Most of them; 0: as many as there is time for."""


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA_3_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "eos_token_id": 128001,
}
TINY = _LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "vocab_size": 97,
    "eos_token_id": 0,
}
FULL = Sizes(LLAMA_3_8B, ("fp16", "fp8", "kivi4", "k4v2", "kivi2"), 4 << 30, 1024, 128, 256, 2048, 0)
TOY = Sizes(TINY, ("fp16", "k4v2"), 40 << 10, 40, 3, 2, 48, 3)


class NoText:
    """Prompts are token ids, answers are counted."""

    eos_ids = ()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return []

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return "x" * len(ids)


def run(section: Section, device: str, rehearse: bool) -> None:
    sizes = TOY if rehearse else FULL
    config = ModelConfig.from_hf_config(sizes.model)
    weights = 2 * sum(int(np.prod(shape)) for shape in weight_shapes(config).values())
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 1 << 40
    if free < weights + sizes.budget + (4 << 30):
        section.note(f"skipped: {weights} bytes of weights and {sizes.budget} of KV cache, but {free} are free")
        return
    decoder = Decoder(config, random_weights(config, device))
    section.note(f"model: {weights / 1e9:.1f} GB of fp16 weights; KV budget {sizes.budget} bytes")
    error = logits_error(decoder, sizes, device)
    section.note(f"last logits against plain causal attention: differ by {error:.2g} of their size")
    if not error < 0.02:
        section.fail(f"logits through the paged cache differ by {error:.3g} from plain attention's, allowed 0.02")
    for index, name in enumerate(sizes.formats):
        if section.left < 8 and not rehearse:
            section.note(f"out of time before {', '.join(sizes.formats[index:])}")
            return
        section.row(**_serve(decoder, sizes, name, device, section.left / (len(sizes.formats) - index)))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def random_weights(config: ModelConfig, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm"):
            return torch.ones(shape, dtype=torch.float16, device=device)
        return torch.randn(shape, generator=generator, dtype=torch.float16, device=device).mul_(0.02)

    return {name: draw(name, shape) for name, shape in weight_shapes(config).items()}


def logits_error(decoder: Decoder, sizes: Sizes, device: str) -> float:
    """|paged - plain| / |plain| of one prompt's last logits."""
    from torch.nn.functional import scaled_dot_product_attention

    tokens = np.random.default_rng(0).integers(1, decoder.config.vocab, sizes.prompt)
    executor = _executor(decoder, "fp16", sizes, device)
    step = executor.cache.prepare([(executor.cache.add(), len(tokens))])
    paged = executor.logits(tokens, step, np.array([len(tokens) - 1]))

    def plain(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        scale = decoder.config.softmax_scale
        return scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True, scale=scale)[0].transpose(0, 1)

    with torch.inference_mode():
        ids = torch.from_numpy(tokens).to(device)
        wanted = decoder.logits(decoder.hidden(ids, torch.arange(len(tokens), device=device), plain)[-1:])
    return float((paged - wanted).norm() / wanted.norm())


def render(section: Section) -> list[str]:
    names = ["format", "effective_bits", "predicted", "resident", "tokens_per_second", "step_ms", "model_ms"]
    return table(names, [[row[name] for name in names] for row in section.rows]) if section.rows else []


def _executor(decoder: Decoder, name: str, sizes: Sizes, device: str) -> TorchExecutor:
    plan = CachePlan.from_config(decoder.config, _kv(name, sizes))
    return TorchExecutor(decoder, KVCache(plan, sizes.budget, GpuAttention(TorchDevice(device))))


def _kv(name: str, sizes: Sizes) -> KVCacheConfig:
    if sizes is TOY and name != "fp16":  # so that there are cold blocks in so short a sequence
        return KVCacheConfig(format=name, residual_length=0, sink_tokens=0)
    return KVCacheConfig(format=name)


def _serve(decoder: Decoder, sizes: Sizes, name: str, device: str, seconds: float) -> dict[str, Any]:
    """One format's row: fills the cache, then measures until its time is over."""
    executor = _executor(decoder, name, sizes, device)
    config = ServingConfig(max_sequences=sizes.sequences, max_tokens_per_step=sizes.tokens_per_step)
    vocab = decoder.config.vocab
    tokenizer: Any = NoText()
    engine = ServingEngine(executor, tokenizer, config, vocab=vocab, max_model_len=decoder.config.max_positions)
    plan = executor.cache.plan
    limits = {"max_tokens_per_step": sizes.tokens_per_step, "max_sequences": sizes.sequences}
    predicted = max_resident(plan, sizes.budget, sizes.prompt, sizes.output, **limits).sequences
    prompts = np.random.default_rng(1)
    params = SamplingParams(max_tokens=sizes.output, ignore_eos=True)
    submitted = 0

    def refill() -> None:
        nonlocal submitted
        while len(engine.scheduler.waiting) < 8 and (not sizes.requests or submitted < sizes.requests):
            prompt = prompts.integers(1, vocab, sizes.prompt).tolist()
            engine.submit(Request(str(submitted), prompt, params))
            submitted += 1

    refill()
    began = full_since = time.monotonic()
    first = engine.stats()
    full = False
    while engine.has_work and time.monotonic() - began < seconds:
        engine.step()
        refill()
        if not full:
            first, full_since = engine.stats(), time.monotonic()
            full = first.running >= predicted
    last, took = engine.stats(), time.monotonic() - full_since
    steps = last.steps_total - first.steps_total
    executor.cache.check_integrity()
    measured = full and steps > 0
    return {
        "format": name,
        "effective_bits": round(plan.effective_bits(sizes.prompt + sizes.output), 2),
        "predicted": predicted,
        "resident": last.running_peak,
        "tokens_per_second": round((last.tokens_out_total - first.tokens_out_total) / took, 1) if measured else None,
        "step_ms": round(1e3 * (last.step_seconds_total - first.step_seconds_total) / steps, 2) if measured else None,
        "model_ms": round(1e3 * (last.model_seconds_total - first.model_seconds_total) / steps, 2)
        if measured
        else None,
        "seconds": round(took, 1),
        "requests": submitted,
    }
