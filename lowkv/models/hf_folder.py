"""A checkpoint of any kind as a Hugging Face folder, for what reads nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.engine.progress import Progress
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.config import ModelConfig

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def write_hf_folder(checkpoint: Checkpoint, folder: Path, dtype: str, progress: Progress) -> Path:
    """Writes a checkpoint as a Hugging Face folder: config.json, model.safetensors and the tokenizer.

    Raises LowkvError for a model whose rotary embedding no config of Hugging Face's describes.
    """
    import torch

    from lowkv.models.checkpoint import tensor_shapes
    from lowkv.models.weights_file import write_weights

    config, stored = checkpoint.config, getattr(torch, dtype)
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=2), encoding="utf-8")
    shapes = tensor_shapes(config)
    progress.begin("writing a Hugging Face folder", sum(prod(shape) for shape in shapes.values()) * stored.itemsize)
    write_weights(
        folder / "model.safetensors",
        {name: (shape, stored) for name, shape in shapes.items()},
        ((name, checkpoint.tensor(name).to(stored)) for name in shapes),
        progress.advance,
    )
    checkpoint.write_tokenizer(folder)
    return folder


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, as transformers 4 and 5 read it; `ModelConfig.from_hf_config` is the inverse."""
    if config.architecture not in _CLASSES:
        raise LowkvError(
            "this architecture is not written as a Hugging Face folder",
            got=config.architecture,
            expected=", ".join(_CLASSES),
            fix="use a Hugging Face folder of the model",
        )
    plain: dict[str, Any] = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos,
        "eos_token_id": list(config.eos) or None,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope(config),
    }
    if config.activation == "silu":
        plain["hidden_act"] = "silu"
    if config.architecture == "mistral":
        plain["sliding_window"] = config.windows[0]
    elif config.architecture in ("qwen2", "qwen3") and any(config.windows):
        plain |= {"use_sliding_window": True} | _windows(config.windows)
    elif config.architecture == "gemma3_text":
        plain |= _gemma(config)
    return plain


def _windows(windows: Sequence[int | None]) -> dict[str, Any]:
    return {
        "sliding_window": next((window for window in windows if window), 4096),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


def _gemma(config: ModelConfig) -> dict[str, Any]:
    scalar = config.query_scalar or config.head_dim
    plain = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,  # transformers wants a whole number
    }
    if config.local_rope is not None:
        if config.local_rope.kind != "default":
            raise _unwritable("another scaling for the layers with a window")
        plain["rope_local_base_freq"] = config.local_rope.theta
    return plain | _windows(config.windows)


def _rope(config: ModelConfig) -> dict[str, Any] | None:
    rope = config.rope
    if rope.kind == "default":
        return None
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    if rope.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    raise _unwritable("divisors of its frequencies, from a GGUF file")


def _unwritable(rope: str) -> LowkvError:
    return LowkvError(
        "this model's rotary embedding cannot be written to a config.json",
        got=rope,
        expected="default, linear or llama3",
        fix="use a Hugging Face folder of the model",
    )
