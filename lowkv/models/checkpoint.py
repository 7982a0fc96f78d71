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
    from lowkv.models.quantized import Fp8Matrix, Int4Matrix, MatrixForm, Quantization
    from lowkv.models.quantized_checkpoint import QuantizedCheckpoint
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
        """One tensor in floating point, [out, in], with Hugging Face's values (see `ModelConfig.norm_offset`)."""
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
    """Opens a Hugging Face folder, quantized or not, or a `.gguf` file.

    Raises:
        LowkvError: nothing is there, or the model is not one that lowkv computes, or its weights are quantized in a way
            that lowkv does not read.
    """
    from lowkv.models.gguf_checkpoint import GgufCheckpoint
    from lowkv.models.imports.detect import find_scheme
    from lowkv.models.quantized_checkpoint import QuantizedCheckpoint
    from lowkv.models.safetensors_checkpoint import SafetensorsCheckpoint, read_json

    if path.is_dir():
        files = SafetensorsCheckpoint(path)
        scheme = find_scheme(path, read_json(path / "config.json"), read_json)
        return files if scheme is None else QuantizedCheckpoint(files, scheme)
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
    norms = norm_names(config)
    widths = {"q": config.q_width, "k": config.kv_width, "v": config.kv_width}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (config.hidden,) for name in norms.values()}
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


def norm_names(config: ModelConfig) -> dict[str, str]:
    """A layer's norms over the hidden size: the decoder's name -> Hugging Face's, whose meaning varies."""
    if not config.post_norms:
        return {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }


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
        quantization: of the layers' matrices, which are rounded once, from the checkpoint's own values. Matrices that
            are quantized in the checkpoint keep their codes, where the recipe asks for that form; see `kept_forms`.
    """
    import torch

    from lowkv.models.quantized import Quantization

    config, form = checkpoint.config, quantization or Quantization()
    kept, (source, _) = kept_forms(checkpoint, form), _quantized(checkpoint)
    norms = norm_names(config)

    def vector(name: str) -> Tensor:
        return checkpoint.tensor(name).to(dtype)

    def norm(name: str) -> Tensor:
        weight = checkpoint.tensor(name)
        return (weight.float() + config.norm_offset if config.norm_offset else weight).to(dtype)

    def layer_norm(layer: int, name: str) -> tuple[str, Tensor]:
        return f"layers.{layer}.{name}", norm(f"model.layers.{layer}.{norms[name]}.weight")

    def matrix(name: str, prefix: str, *parts: str) -> tuple[str, Tensor | Int4Matrix | Fp8Matrix]:
        """[out, in] each -> [in, sum of out]"""
        if name in kept:
            assert source is not None
            matrix = None if isinstance(kept[name], str) else source.matrix([f"{prefix}{p}_proj" for p in parts], dtype)
            if matrix is not None:
                return name, matrix
        keep = form.kind != "none" and name not in kept  # round the checkpoint's values once: to 4 or 8 bits
        tensors = [checkpoint.tensor(f"{prefix}{part}_proj.weight") for part in parts]
        columns = [(tensor if keep else tensor.to(dtype)).t() for tensor in tensors]
        dense = torch.cat(columns, 1) if len(columns) > 1 else columns[0]
        return name, dense.contiguous() if name in kept else form.matrix(dense, dtype, name)

    head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    yield "lm_head", checkpoint.tensor(head).to(head_dtype).t().contiguous()
    if not config.tied_embeddings:
        yield "embedding", vector("model.embed_tokens.weight")
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = theirs + "self_attn.", theirs + "mlp."
        yield layer_norm(layer, "attention_norm")
        yield matrix(ours + "qkv", attention, "q", "k", "v")
        if config.qkv_bias:
            yield ours + "qkv_bias", torch.cat([vector(f"{attention}{name}_proj.bias") for name in "qkv"])
        if config.qk_norm:
            yield ours + "q_norm", norm(attention + "q_norm.weight")
            yield ours + "k_norm", norm(attention + "k_norm.weight")
        yield matrix(ours + "output", attention, "o")
        if config.post_norms:
            yield layer_norm(layer, "attention_post_norm")
        yield layer_norm(layer, "mlp_norm")
        yield matrix(ours + "gate_up", mlp, "gate", "up")
        yield matrix(ours + "down", mlp, "down")
        if config.post_norms:
            yield layer_norm(layer, "mlp_post_norm")
    yield "norm", norm("model.norm.weight")


def kept_forms(checkpoint: Checkpoint, quantization: Quantization) -> dict[str, MatrixForm | str]:
    """Matrices of the decoder that are not rounded here because the checkpoint is quantized, in the recipe's form.

    Each has the form that its codes keep, or the reason (words that follow "because") for which it is decoded to the
    body's dtype instead. Empty when the checkpoint is in floating point, and when the recipe wants all of it decoded.

    Raises:
        LowkvError: the checkpoint is quantized in another form than the recipe's, or damaged.
    """
    source, rotated = _quantized(checkpoint)
    if source is None:
        return {}
    source.check(quantization)
    if quantization.kind == "none" or source.kind is None:
        return {}
    forms: dict[str, MatrixForm | str] = {}
    for layer in range(source.config.layers):
        for name, linears in matrix_parts(layer).items():
            turned = layer in rotated and name.endswith((".qkv", ".output"))
            forms[name] = "its values are rotated" if turned else source.kept_form(linears)
    return forms


def _quantized(checkpoint: Checkpoint) -> tuple[QuantizedCheckpoint | None, frozenset[int]]:
    """The quantized checkpoint, if it is one, and the layers that are read from it with rotated values."""
    from lowkv.models.quantized_checkpoint import QuantizedCheckpoint
    from lowkv.models.rotation import RotatedCheckpoint

    if isinstance(checkpoint, RotatedCheckpoint):
        return _quantized(checkpoint.inner)[0], checkpoint.layers
    return (checkpoint if isinstance(checkpoint, QuantizedCheckpoint) else None), frozenset()


def matrix_parts(layer: int) -> dict[str, tuple[str, ...]]:
    """A layer's matrices in the decoder -> the checkpoint's linears (without `.weight`) that lie in each."""
    parts = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    return {
        f"layers.{layer}.{name}": tuple(f"model.layers.{layer}.{linear}" for linear in linears)
        for name, linears in parts.items()
    }


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

    def layout(
        self, config: ModelConfig, checkpoint: Checkpoint | None = None
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of every tensor that is stored, in the order of `tensors`.

        Args:
            config: the model's.
            checkpoint: whose tensors they are: a quantized one may keep its own forms. None: one in floating point.

        Raises:
            LowkvError: the model's matrices do not divide into the format's groups, the checkpoint is quantized in
                another form, or the model does not compute in this dtype.
        """
        import torch

        from lowkv.models.decoder import MATRICES, weight_shapes
        from lowkv.models.quantized import MatrixForm

        if self.dtype == torch.float16 and not config.fits_float16:
            raise LowkvError(
                "this model's activations grow beyond 65,504, where float16 ends: its answers would be NaN",
                got="weights.dtype float16",
                expected="bfloat16 or float32",
                fix="set weights.dtype: bfloat16, and kv_cache.model_dtype: bfloat16 on a GPU",
            )
        kept = {} if checkpoint is None else kept_forms(checkpoint, self.quantization)
        if not kept:
            self.quantization.check(config)
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, shape in weight_shapes(config).items():
            if name.rpartition(".")[2] in MATRICES:
                form = kept.get(name, self.quantization.form)
                layout |= (MatrixForm() if isinstance(form, str) else form).layout(name, shape, self.dtype)
            else:
                layout[name] = (shape, self.head_dtype if name == "lm_head" else self.dtype)
        return layout

    def tensors(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a checkpoint that passed `check_tensors`, one weight at a time."""
        from lowkv.models.quantized import stored_tensors

        for name, weight in decoder_weights(checkpoint, self.dtype, self.head_dtype, self.quantization):
            yield from stored_tensors(name, weight)


def conversion_stage(checkpoint: Checkpoint, weights: WeightsFormat) -> str:
    """What a build says while it writes weights: also what becomes of those that come quantized."""
    stage, (source, _) = "converting weights", _quantized(checkpoint)
    if source is None or source.kind is None:
        return stage
    dtype = str(weights.dtype).removeprefix("torch.")
    if weights.quantization.kind == "none":
        return f"{stage}: the checkpoint's {source.kind} is decoded to {dtype}"
    forms = kept_forms(checkpoint, weights.quantization)
    decoded = sum(isinstance(form, str) for form in forms.values())
    said = f", {decoded} of {len(forms)} matrices are decoded to {dtype}" if decoded else ""
    return f"{stage}: the checkpoint's {source.kind} is kept{said}"
