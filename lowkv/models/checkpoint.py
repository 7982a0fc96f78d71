"""Checkpoints: where a model's weights are read from, and how they become the decoder's.

A checkpoint shows its tensors under Hugging Face's names and shapes ([out, in]), whatever its file format, so
that missing, surplus and wrong-shaped tensors are found in one place, before the first is read. Tensors are
then read, fused and transposed one at a time: peak memory is one tensor, not one model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lowkv.calibration.scales import KVScales
    from lowkv.models.config import ModelConfig
    from lowkv.models.quantized import Fp8Matrix, Int4Matrix, Quantization
    from lowkv.recipe import Recipe


class Checkpoint(Protocol):
    """An opened checkpoint; nothing but its headers has been read."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the engine's payload depends on."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face name."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor in floating point, [out, in]."""
        ...

    def kv_scales(self) -> KVScales | None:
        """The scales of 8-bit keys and values that the checkpoint was calibrated with; None when it carries none.

        They are multipliers for the codec that their `details["codec"]` names (`e4m3` unless it says otherwise).
        """
        ...

    def write_tokenizer(self, folder: Path) -> tuple[str, ...]:
        """Writes what `Tokenizer.load(folder)` needs; returns the file names. Same input, same bytes."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a Hugging Face folder or a `.gguf` file.

    Raises:
        LowkvError: nothing is there, or the model is not one that lowkv computes.
    """
    from lowkv.models.gguf_checkpoint import GgufCheckpoint
    from lowkv.models.safetensors_checkpoint import SafetensorsCheckpoint

    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise LowkvError(f"no checkpoint at {path}", expected="a Hugging Face folder or a .gguf file")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of every tensor that a checkpoint of this model must have."""
    shapes = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    widths = {"q": config.q_width, "k": config.kv_width, "v": config.kv_width}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (config.hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (config.hidden,)
        for name, width in widths.items():
            shapes[prefix + f"self_attn.{name}_proj.weight"] = (width, config.hidden)
            if config.qkv_bias:
                shapes[prefix + f"self_attn.{name}_proj.bias"] = (width,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[prefix + "self_attn.o_proj.weight"] = (config.hidden, config.q_width)
        shapes[prefix + "mlp.gate_proj.weight"] = (config.intermediate, config.hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (config.intermediate, config.hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (config.hidden, config.intermediate)
    return shapes


_NOT_WEIGHTS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Old checkpoints carry this table; it is computed from the config."""


def check_tensors(checkpoint: Checkpoint) -> None:
    """Compares a checkpoint's tensors with its config.

    Raises:
        LowkvError: naming the first tensor that is missing, not known, or of the wrong shape.
    """
    config, present, expected = checkpoint.config, checkpoint.shapes(), tensor_shapes(checkpoint.config)
    missing = [name for name in expected if name not in present]
    if missing:
        raise LowkvError(
            f"the checkpoint lacks tensor {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""),
            expected=f"the tensors of a {config.architecture} model of {config.layers} layers",
            fix="use a complete checkpoint",
        )
    for name, shape in expected.items():
        if tuple(present[name]) != shape:
            raise LowkvError(
                f"tensor {name} does not fit the model's config", got=tuple(present[name]), expected=f"shape {shape}"
            )
    ignored = {"lm_head.weight"} if config.tied_embeddings else set()
    surplus = [
        name for name in present if name not in expected and name not in ignored and not _NOT_WEIGHTS.fullmatch(name)
    ]
    if surplus:
        raise LowkvError(
            f"the checkpoint has tensor {surplus[0]}" + (f" and {len(surplus) - 1} more" if surplus[1:] else ""),
            expected=f"only those of a {config.architecture} model",
            fix="lowkv would leave them out and compute another model; use a checkpoint of a supported model",
        )


def decoder_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, head_dtype: torch.dtype, quantization: Quantization | None = None
) -> Iterator[tuple[str, Tensor | Int4Matrix | Fp8Matrix]]:
    """The tensors of `lowkv.models.decoder.weight_shapes`, in its order, one at a time.

    Args:
        checkpoint: passed `check_tensors`.
        dtype: of the body.
        head_dtype: of `lm_head`, and so of tied embeddings.
        quantization: of the layers' matrices, which are rounded once, from the checkpoint's own values.
    """
    import torch

    from lowkv.models.quantized import Quantization

    config, form = checkpoint.config, quantization or Quantization()

    def vector(name: str) -> Tensor:
        return checkpoint.tensor(name).to(dtype)

    def matrix(name: str, prefix: str, *parts: str) -> tuple[str, Tensor | Int4Matrix | Fp8Matrix]:
        """[out, in] each -> [in, sum of out]"""
        keep = form.kind != "none"  # round the checkpoint's values once: to 4 or 8 bits
        tensors = [checkpoint.tensor(f"{prefix}{part}_proj.weight") for part in parts]
        columns = [(tensor if keep else tensor.to(dtype)).t() for tensor in tensors]
        return name, form.matrix(torch.cat(columns, 1) if len(columns) > 1 else columns[0], dtype, name)

    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    yield "lm_head", checkpoint.tensor(head).to(head_dtype).t().contiguous()
    if not config.tied_embeddings:
        yield "embedding", vector("model.embed_tokens.weight")
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        yield ours + "attention_norm", vector(theirs + "input_layernorm.weight")
        yield matrix(ours + "qkv", attention, "q", "k", "v")
        if config.qkv_bias:
            yield ours + "qkv_bias", torch.cat([vector(f"{attention}{name}_proj.bias") for name in "qkv"])
        if config.qk_norm:
            yield ours + "q_norm", vector(attention + "q_norm.weight")
            yield ours + "k_norm", vector(attention + "k_norm.weight")
        yield matrix(ours + "output", attention, "o")
        yield ours + "mlp_norm", vector(theirs + "post_attention_layernorm.weight")
        yield matrix(ours + "gate_up", mlp, "gate", "up")
        yield matrix(ours + "down", mlp, "down")
    yield "norm", vector("model.norm.weight")


@dataclass(frozen=True)
class WeightsFormat:
    """How an engine stores a model's weights."""

    dtype: torch.dtype
    """Of the body."""
    head_dtype: torch.dtype
    """Of `lm_head`, and so of tied embeddings."""
    quantization: Quantization

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> WeightsFormat:
        """Raises LowkvError for dtypes that do not go together."""
        import torch

        from lowkv.models.quantized import Quantization

        body, head = recipe.weights.dtype, recipe.lm_head.effective
        if head not in (body, "float32"):
            raise LowkvError(
                "lm_head.dtype and weights.dtype do not go together",
                got=f"lm_head {head}, weights {body}",
                expected=f"lm_head.dtype float32 or {body}",
            )
        quantization = Quantization(recipe.weights.quantization, recipe.weights.group_size)
        return cls(getattr(torch, body), getattr(torch, head), quantization)

    def layout(self, config: ModelConfig) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of every tensor that is stored, in the order of `tensors`.

        Raises LowkvError when the model's matrices do not divide into the format's groups.
        """
        from lowkv.models.decoder import MATRICES, weight_shapes

        self.quantization.check(config)
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, shape in weight_shapes(config).items():
            if name.rpartition(".")[2] in MATRICES:
                layout |= self.quantization.layout(name, shape, self.dtype)
            else:
                layout[name] = (shape, self.head_dtype if name == "lm_head" else self.dtype)
        return layout

    def tensors(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a checkpoint that passed `check_tensors`, one weight at a time."""
        from lowkv.models.quantized import stored_tensors

        for name, weight in decoder_weights(checkpoint, self.dtype, self.head_dtype, self.quantization):
            yield from stored_tensors(name, weight)
