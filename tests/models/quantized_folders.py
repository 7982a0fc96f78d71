"""Quantized Hugging Face folders for tests, packed by plain loops: each layout again, from its definition.

Every `pack_*` returns the tensors of a matrix and what they mean: W [out, in] in float32, computed from codes and
scales one formula at a time. Nothing here is shared with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEARS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}


def write_folder(
    folder: Path, pack: Callable[[torch.Generator, int, int], Packed], quantization: dict[str, Any] | None
) -> dict[str, Tensor]:
    """Writes a checkpoint whose matrices `pack(generator, out, in)` makes; returns what its tensors mean."""
    generator = torch.Generator().manual_seed(5)
    files: dict[str, Tensor] = {}

    def plain(name: str, *shape: int, around: float = 0.0) -> None:
        files[name] = (torch.randn(shape, generator=generator) * 0.3 + around).half()

    plain("model.embed_tokens.weight", 64, 64)
    plain("model.norm.weight", 64, around=1.0)
    meant = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        plain(prefix + "input_layernorm.weight", 64, around=1.0)
        plain(prefix + "post_attention_layernorm.weight", 64, around=1.0)
        for linear, (rows, size) in LINEARS.items():
            parts, meant[f"{prefix}{linear}.weight"] = pack(generator, rows, size)
            files |= {f"{prefix}{linear}.{part}": tensor for part, tensor in parts.items()}
    folder.mkdir(exist_ok=True)
    config = CONFIG | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(files, folder / "model.safetensors")
    return {name: files[name].float() for name in files if name.endswith(("norm.weight", "tokens.weight"))} | meant


def words(nibbles: list[int]) -> int:
    """Eight codes of 0 to 15, the first in the lowest bits, as the int32 that has these bits."""
    value = sum(code << (4 * index) for index, code in enumerate(nibbles))
    return value - 2**32 if value >= 2**31 else value


def codes_and_scales(generator: torch.Generator, rows: int, size: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes [out, in] and zeros [out, groups] of 0 to 15, scales [out, groups] float16."""
    codes = torch.randint(0, 16, (rows, size), generator=generator)
    zeros = torch.randint(0, 16, (rows, groups), generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) * 0.04 + 0.005).half()
    return codes, zeros, scales


def decoded(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: list[int]) -> Tensor:
    """W [out, in], value by value."""
    weight = torch.empty(codes.shape)
    for i, group in enumerate(group_of):
        weight[:, i] = (codes[:, i] - zeros[:, group]).float() * scales[:, group].float()
    return weight


def pack_awq(group_size: int) -> Callable[[torch.Generator, int, int], Packed]:
    """AutoAWQ's gemm: nibble n of a word is output AWQ[n] of its eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(row: list[int]) -> list[int]:
        return [words([row[start + n] for n in order]) for start in range(0, len(row), 8)]

    def pack(generator: torch.Generator, rows: int, size: int) -> Packed:
        codes, zeros, scales = codes_and_scales(generator, rows, size, size // group_size)
        parts = {
            "qweight": torch.tensor([interleaved(column) for column in codes.t().tolist()], dtype=torch.int32),
            "qzeros": torch.tensor([interleaved(column) for column in zeros.t().tolist()], dtype=torch.int32),
            "scales": scales.t().contiguous(),
        }
        return parts, decoded(codes, zeros, scales, [i // group_size for i in range(size)])

    return pack


def grouped(
    generator: torch.Generator, rows: int, size: int, group_size: int, symmetric: bool, shuffled: bool
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """`codes_and_scales`, and the group of every input: in order, or shuffled as act-order leaves them."""
    codes, zeros, scales = codes_and_scales(generator, rows, size, size // group_size)
    group_of = [i // group_size for i in range(size)]
    if shuffled:
        group_of = [group_of[i] for i in torch.randperm(size, generator=generator).tolist()]
    return codes, torch.full_like(zeros, 8) if symmetric else zeros, scales, group_of


def pack_gptq(
    group_size: int, *, v2: bool = False, symmetric: bool = False, shuffled: bool = False
) -> Callable[[torch.Generator, int, int], Packed]:
    """AutoGPTQ's: codes eight inputs to a word, zero points eight outputs to a word, less one in the first format."""

    def pack(generator: torch.Generator, rows: int, size: int) -> Packed:
        codes, zeros, scales, group_of = grouped(generator, rows, size, group_size, symmetric, shuffled)
        columns = codes.tolist()
        qweight = [[words(columns[o][start : start + 8]) for o in range(rows)] for start in range(0, size, 8)]
        qzeros = []
        for column in zeros.t().tolist():
            unsigned = [words(column[start : start + 8]) % 2**32 for start in range(0, rows, 8)]
            if not v2:  # the whole word less 0x11111111, as the library does
                unsigned = [(word - 0x11111111) % 2**32 for word in unsigned]
            qzeros.append([word - 2**32 if word >= 2**31 else word for word in unsigned])
        parts = {
            "qweight": torch.tensor(qweight, dtype=torch.int32),
            "qzeros": torch.tensor(qzeros, dtype=torch.int32),
            "scales": scales.t().contiguous(),
            "g_idx": torch.tensor(group_of, dtype=torch.int32),
        }
        return parts, decoded(codes, zeros, scales, group_of)

    return pack


def pack_rows(
    group_size: int, *, symmetric: bool = True, shuffled: bool = False
) -> Callable[[torch.Generator, int, int], Packed]:
    """compressed-tensors' pack-quantized: eight inputs to a word; zero points eight outputs to a word."""

    def pack(generator: torch.Generator, rows: int, size: int) -> Packed:
        codes, zeros, scales, group_of = grouped(generator, rows, size, group_size, symmetric, shuffled)
        packed = [[words(row[start : start + 8]) for start in range(0, size, 8)] for row in codes.tolist()]
        parts = {
            "weight_packed": torch.tensor(packed, dtype=torch.int32),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, size]),
        }
        if not symmetric:
            columns = zeros.t().tolist()
            packed = [[words(column[start : start + 8]) for column in columns] for start in range(0, rows, 8)]
            parts["weight_zero_point"] = torch.tensor(packed, dtype=torch.int32)
        if shuffled:
            parts["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        return parts, decoded(codes, zeros, scales, group_of)

    return pack


def pack_float8(*, per_output: bool, static: bool) -> Callable[[torch.Generator, int, int], Packed]:
    def pack(generator: torch.Generator, rows: int, size: int) -> Packed:
        codes = (torch.randn(rows, size, generator=generator) * 100).to(torch.float8_e4m3fn)
        scale = torch.rand((rows, 1) if per_output else (1,), generator=generator) * 1e-4 + 1e-5
        parts = {"weight": codes, "weight_scale": scale}
        if static:
            parts["input_scale"] = torch.rand(1, generator=generator) * 0.01 + 0.01
        return parts, codes.float() * scale

    return pack


def pack_dense(generator: torch.Generator, rows: int, size: int) -> Packed:
    weight = (torch.randn(rows, size, generator=generator) * 0.1).half()
    return {"weight": weight}, weight.float()


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": kind}
    plain = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    return plain | {"ignore": ["lm_head"]} | more


def int4_weights(group_size: int, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}


def float8_weights(strategy: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}


def kv_scheme(**changes: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False} | changes
