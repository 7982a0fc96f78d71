"""The decoder, in Torch, over ragged tokens: one definition for every architecture of `ModelConfig`.

The tokens of all sequences of a step lie in one row of length T, each with its position; only attention knows
which sequence a token belongs to, and attention is a callable that the caller brings (the paged KV cache, or
`lowkv.models.dense`). Everything else works token by token, so prefill, decode and mixtures of them are the
same call.

Weights are kept as [in, out] and applied as `x @ w`: on CPU that is twice as fast as `F.linear` at 8 to 32
rows and no slower elsewhere. Q, K and V are one matrix, gate and up another. A layer's matrices may be quantized
(`lowkv.models.quantized`); all that changes here is who multiplies. Tied embeddings are stored once, as the
[hidden, vocab] logits matrix; looking 256 tokens up gathers columns, which costs two milliseconds.

Call it under `torch.inference_mode()`; it does not enter that itself, so that it can be traced and exported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from lowkv.errors import LowkvError
from lowkv.models.quantized import add_matmul, matmul

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.models.config import Activation, ModelConfig, RopeConfig
    from lowkv.models.quantized import QuantizedMatrix

Attention = Callable[[int, "Tensor", "Tensor", "Tensor"], "Tensor"]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]: stores k and v, then attends.

q and k are rotated already; all three are contiguous and of the body's dtype.
"""


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor  # [hidden]
    qkv: Tensor | QuantizedMatrix  # [hidden, (Hq + 2 Hkv) D]
    qkv_bias: Tensor | None  # [(Hq + 2 Hkv) D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    output: Tensor | QuantizedMatrix  # [Hq D, hidden]
    attention_post_norm: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor | QuantizedMatrix  # [hidden, 2 intermediate], gate first
    down: Tensor | QuantizedMatrix  # [intermediate, hidden]
    mlp_post_norm: Tensor | None  # [hidden]


MATRICES = ("qkv", "output", "gate_up", "down")
"""A layer's weights that may be quantized."""

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a `Decoder` of this config takes, in the order it uses them.

    `embedding` [vocab, hidden] is absent when tied; `lm_head` is [hidden, vocab] always.
    """
    qkv = config.q_width + 2 * config.kv_width
    shapes: dict[str, tuple[int, ...]] = {"lm_head": (config.hidden, config.vocab)}
    if not config.tied_embeddings:
        shapes["embedding"] = (config.vocab, config.hidden)
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        shapes[prefix + "attention_norm"] = (config.hidden,)
        shapes[prefix + "qkv"] = (config.hidden, qkv)
        if config.qkv_bias:
            shapes[prefix + "qkv_bias"] = (qkv,)
        if config.qk_norm:
            shapes[prefix + "q_norm"] = (config.head_dim,)
            shapes[prefix + "k_norm"] = (config.head_dim,)
        shapes[prefix + "output"] = (config.q_width, config.hidden)
        if config.post_norms:
            shapes[prefix + "attention_post_norm"] = (config.hidden,)
        shapes[prefix + "mlp_norm"] = (config.hidden,)
        shapes[prefix + "gate_up"] = (config.hidden, 2 * config.intermediate)
        shapes[prefix + "down"] = (config.intermediate, config.hidden)
        if config.post_norms:
            shapes[prefix + "mlp_post_norm"] = (config.hidden,)
    shapes["norm"] = (config.hidden,)
    return shapes


class Decoder:
    """A model's layers with their weights. Stateless: positions and the KV cache come from outside.

    Args:
        config: what the model is.
        weights: every tensor of `weight_shapes(config)`. `layers.*`, `norm` and `embedding` share one dtype, the body's
            (float32, bfloat16 or float16); `lm_head` may be float32 beside a 16-bit body: then logits are computed in
            float32. The MATRICES of a layer may be quantized ones whose products have that dtype.
        frequencies: `rotary_frequencies(config)`, for a caller that has them on the right device already, or traces
            them.

    Raises:
        LowkvError: a tensor is missing, not known, or of the wrong shape or dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor | QuantizedMatrix],
        frequencies: Tensor | None = None,
    ) -> None:
        tensors = _checked_weights(config, weights)
        self.config = config
        self.dtype: torch.dtype = tensors["norm"].dtype
        self.head_dtype: torch.dtype = tensors["lm_head"].dtype
        self.device: torch.device = tensors["norm"].device
        self._lm_head = tensors["lm_head"]  # [hidden, vocab]
        self._embedding = tensors.get("embedding")  # [vocab, hidden]; None when tied
        self._norm = tensors["norm"]
        self._layers = tuple(_layer(tensors, weights, f"layers.{index}.") for index in range(config.layers))
        if frequencies is None:
            frequencies = rotary_frequencies(config).to(self.device)
        self._inverse_frequencies = frequencies  # [ropes, D / 2] float32
        self._activation = _ACTIVATIONS[config.activation]
        # Rounded first: Torch multiplies 16-bit tensors by numbers in float32.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype).item()

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """Logits after the tokens at `rows`.

        Args:
            tokens: [T] integer token ids.
            positions: [T] integers, each token's position in its own sequence.
            attention: called once per layer, in order.
            rows: [S] integer indices into the T tokens.

        Returns:
            [S, vocab] float32.
        """
        return self.logits(self.hidden(tokens, positions, attention).index_select(0, rows))

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """The residual stream after the last layer, [T, hidden], before the final norm."""
        config = self.config
        heads, kv_heads, size, eps = config.heads, config.kv_heads, config.head_dim, config.rms_eps
        rotated, split = heads + kv_heads, config.q_width + config.kv_width
        width, inner = (config.hidden,), config.intermediate
        rotations = self._rotations(positions)
        count = tokens.shape[0]

        x = self._embedded(tokens)
        for index, layer in enumerate(self._layers):
            normed = functional.rms_norm(x, width, layer.attention_norm, eps)
            qkv = matmul(normed, layer.qkv)
            if layer.qkv_bias is not None:
                qkv = qkv + layer.qkv_bias
            qk = qkv[:, :split].view(count, rotated, size)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = functional.rms_norm(qk[:, :heads], (size,), layer.q_norm, eps)
                k = functional.rms_norm(qk[:, heads:], (size,), layer.k_norm, eps)
                qk = torch.cat((q, k), 1)
            cos, sin = rotations[config.rope_index(index)]
            # Q and K turn together: (a, b) -> (a cos - b sin, b cos + a sin) over the two halves of a head.
            qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
            mixed = attention(
                index,
                qk[:, :heads].contiguous(),
                qk[:, heads:].contiguous(),
                qkv[:, split:].contiguous().view(count, kv_heads, size),
            )
            x = self._added(x, mixed.reshape(count, -1), layer.output, layer.attention_post_norm)
            normed = functional.rms_norm(x, width, layer.mlp_norm, eps)
            gate_up = matmul(normed, layer.gate_up)
            gated = self._activation(gate_up[:, :inner]) * gate_up[:, inner:]
            x = self._added(x, gated, layer.down, layer.mlp_post_norm)
        return x

    def _added(self, x: Tensor, y: Tensor, matrix: Tensor | QuantizedMatrix, norm: Tensor | None) -> Tensor:
        """`x + y @ matrix`, the product normalized first where the model does so."""
        if norm is None:
            return add_matmul(x, y, matrix)
        return x + functional.rms_norm(matmul(y, matrix), (self.config.hidden,), norm, self.config.rms_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] of the residual stream -> [S, vocab] float32."""
        normed = functional.rms_norm(hidden, (self.config.hidden,), self._norm, self.config.rms_eps)
        return (normed.to(self.head_dtype) @ self._lm_head).float()

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The tokens' embeddings in the body's dtype, [T, hidden]."""
        if self._embedding is not None:
            embedded = self._embedding.index_select(0, tokens)
        else:
            embedded = self._lm_head.index_select(1, tokens).t().to(self.dtype).contiguous()
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    def _rotations(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cos and sin of every token's angles, [T, 1, D], per rotary embedding; sin is negative in D's first half."""
        angles = positions.to(torch.float32)[:, None, None] * self._inverse_frequencies  # [T, ropes, D / 2]
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat((cos, cos), -1).to(self.dtype)
        sin = torch.cat((-sin, sin), -1).to(self.dtype)
        ropes = [slice(index, index + 1) for index in range(len(self.config.ropes))]
        return [(cos[:, rope], sin[:, rope]) for rope in ropes]


def candidates(logits: Tensor, count: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """What sampling sees of a step: the best `count` logits of each row and the log-sum-exp of all.

    Args:
        logits: [S, vocab] float32.
        count: at most this many; a smaller vocabulary gives all of it.

    Returns:
        values [S, count] float32, largest first; ids [S, count] int32; log-sum-exp [S] float32.
    """
    values, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return values, ids.to(torch.int32), logits.logsumexp(-1)


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """`inverse_frequencies` of each of the model's rotary embeddings, [ropes, head_dim / 2] float32."""
    return torch.stack([inverse_frequencies(rope, config.head_dim) for rope in config.ropes])


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Rotation per position of each pair of channels, [head_dim / 2] float32, computed as transformers does."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "divisors":
        return plain / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # over the length that the model was first trained on
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (turns - low) / (high - low)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    return torch.where(turns < low, plain / rope.factor, torch.where(turns > high, plain, blended))


def _layer(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor | QuantizedMatrix], prefix: str) -> _Layer:
    def matrix(name: str) -> Tensor | QuantizedMatrix:
        weight = weights[prefix + name]
        return weight if isinstance(weight, torch.Tensor) else weight.prepared()

    return _Layer(
        attention_norm=tensors[prefix + "attention_norm"],
        qkv=matrix("qkv"),
        qkv_bias=tensors.get(prefix + "qkv_bias"),
        q_norm=tensors.get(prefix + "q_norm"),
        k_norm=tensors.get(prefix + "k_norm"),
        output=matrix("output"),
        attention_post_norm=tensors.get(prefix + "attention_post_norm"),
        mlp_norm=tensors[prefix + "mlp_norm"],
        gate_up=matrix("gate_up"),
        down=matrix("down"),
        mlp_post_norm=tensors.get(prefix + "mlp_post_norm"),
    )


def _checked_weights(config: ModelConfig, weights: Mapping[str, Tensor | QuantizedMatrix]) -> dict[str, Tensor]:
    """Raises LowkvError for weights that are not this model's; returns those that are Tensors."""
    shapes = weight_shapes(config)
    for name in sorted(set(weights) ^ set(shapes)):
        problem = "is missing" if name in shapes else "is not one of this model"
        raise LowkvError(f"tensor {name} {problem}", expected=f"the {len(shapes)} tensors of the config")
    body = weights["norm"].dtype
    if body not in (torch.float32, torch.bfloat16, torch.float16):
        raise LowkvError(
            "the decoder does not compute in this dtype",
            got=str(body),
            expected="float32, bfloat16 or float16",
        )
    tensors = {}
    for name, shape in shapes.items():
        weight = weights[name]
        if tuple(weight.shape) != shape:
            raise LowkvError(f"tensor {name} has the wrong shape", got=tuple(weight.shape), expected=str(shape))
        allowed = (body, torch.float32) if name == "lm_head" else (body,)
        if weight.dtype not in allowed:
            raise LowkvError(
                f"tensor {name} has the wrong dtype",
                got=str(weight.dtype),
                expected=" or ".join(map(str, allowed)),
            )
        if isinstance(weight, torch.Tensor):
            tensors[name] = weight
        elif name.rpartition(".")[2] not in MATRICES:
            raise LowkvError(f"tensor {name} is quantized", got=type(weight).__name__, expected="a Tensor")
    return tensors
