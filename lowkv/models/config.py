"""What lowkv knows of a model: the numbers that the decoder, the cache plan and the capacity planner share.

A `ModelConfig` comes from a Hugging Face `config.json` (transformers 4 and 5 write different layouts) or from
the metadata of a GGUF file. Every property of a checkpoint that would change its output and that the decoder
does not compute is refused by name here, before any weight is read: serving a model almost right is worse
than not serving it. This module imports neither torch nor numpy, so that `lowkv plan` answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from lowkv.errors import LowkvError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3")
"""Llama 1 to 3.x and SmolLM2 are `llama`; Qwen2.5 is `qwen2`."""

_SUPPORTED = "one of llama (Llama 2, 3, 3.1, 3.2, SmolLM2), mistral, qwen2 (Qwen2, Qwen2.5), qwen3"

_WHY_NOT = {
    "deepseek_v2": "multi-head latent attention (MLA)",
    "deepseek_v3": "multi-head latent attention (MLA)",
    "minicpm3": "multi-head latent attention (MLA)",
    "mixtral": "mixture of experts",
    "qwen2_moe": "mixture of experts",
    "qwen3_moe": "mixture of experts",
    "gpt_oss": "mixture of experts",
    "jamba": "a hybrid of attention and state-space layers",
    "zamba2": "a hybrid of attention and state-space layers",
    "falcon_h1": "a hybrid of attention and state-space layers",
    "lfm2": "a hybrid of attention and convolution layers",
    "qwen3_next": "a hybrid of attention and linear-attention layers",
    "mamba": "a state-space model, which has no KV cache",
    "gemma": "scaled embeddings and GELU gates",
    "gemma2": "logit soft-capping",
    "gemma3": "local and global rotary bases",
    "gemma3_text": "local and global rotary bases",
}
"""Models that people ask for, and what the decoder lacks for them."""

_MUST_BE_ABSENT = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "q_lora_rank": "multi-head latent attention (MLA)",
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "attn_logit_softcapping": "soft-capped attention logits",
    "final_logit_softcapping": "soft-capped logits",
    "query_pre_attn_scalar": "another attention scale than 1/sqrt(head_dim)",
    "attention_multiplier": "another attention scale than 1/sqrt(head_dim)",
    "embedding_multiplier": "scaled embeddings",
    "residual_multiplier": "scaled residuals",
    "logits_scaling": "scaled logits",
    "no_rope_layers": "layers without rotary embedding",
}
"""Keys of `config.json` that change what the model computes."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: half-rotation (Hugging Face's), over the whole head.

    `kind` says how the inverse frequencies `theta ** (-2i / head_dim)` are changed: `default` not at all,
    `linear` divides them by `factor`, `llama3` is Llama 3.1's interpolation (transformers' `rope_type:
    llama3`), and `divisors` divides each by its own number (how GGUF files carry the same thing).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "divisors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float
    rope: RopeConfig
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: None, or w when a query at i sees only keys j with i - w < j <= i."""
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate",
            "vocab",
            "max_positions",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LowkvError(
                    f"the model's {name} is not a size", got=value, expected="a whole number of at least 1"
                )
        if self.heads % self.kv_heads:
            raise LowkvError(
                "the model's query heads do not divide among its KV heads",
                got=f"{self.heads} heads, {self.kv_heads} KV heads",
                expected="heads to be a multiple of KV heads",
            )
        if self.head_dim % 2:
            raise LowkvError("the model's head_dim is odd", got=self.head_dim, expected="an even number (rotary pairs)")
        if len(self.windows) != self.layers:
            raise LowkvError(
                "the model's attention windows do not match its layers",
                got=f"{len(self.windows)} windows",
                expected=f"one for each of {self.layers} layers",
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise LowkvError(
                "an attention window is not a size", got=self.windows, expected="windows of at least 1 token"
            )

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def q_width(self) -> int:
        """Columns of the query projection: heads x head_dim (not always `hidden`)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def head_count(self) -> int:
        """Parameters of the logits projection, hidden x vocab (the embedding itself when tied)."""
        return self.hidden * self.vocab

    def weight_count(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        qkv = self.q_width + 2 * self.kv_width
        layer = self.hidden * qkv + self.q_width * self.hidden  # attention
        layer += 3 * self.hidden * self.intermediate + 2 * self.hidden  # gate, up, down; two norms
        layer += qkv if self.qkv_bias else 0
        layer += 2 * self.head_dim if self.qk_norm else 0
        embeddings = self.head_count() * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.hidden

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON values; `from_mapping` gives the same config back."""
        mapping = asdict(self)
        mapping["rope"]["divisors"] = list(self.rope.divisors)
        mapping["windows"] = list(self.windows)
        mapping["eos"] = list(self.eos)
        return mapping

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ModelConfig:
        """Inverse of `to_mapping`. Raises `LowkvError` on missing or unknown keys."""
        known = {field.name for field in fields(cls)}
        if set(mapping) != known:
            raise LowkvError(
                "the model section is not one that this lowkv wrote",
                got=", ".join(sorted(set(mapping) ^ known)) + " (missing or unknown)",
                expected=", ".join(sorted(known)),
            )
        rope = dict(mapping["rope"])
        rope["divisors"] = tuple(rope["divisors"])
        values = dict(mapping) | {
            "rope": RopeConfig(**rope),
            "windows": tuple(mapping["windows"]),
            "eos": tuple(mapping["eos"]),
        }
        return cls(**values)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a Hugging Face `config.json` as written by transformers 4 or 5.

        Raises:
            LowkvError: for an architecture or a property that the decoder does not compute, naming it.
        """
        architecture = _architecture(config.get("model_type"), "model_type")
        _refuse_foreign_properties(config)
        layers = _required(config, "num_hidden_layers")
        heads = _required(config, "num_attention_heads")
        hidden = _required(config, "hidden_size")
        kv_heads = config.get("num_key_value_heads")
        if kv_heads is None:
            # Llama 1 has no such key; elsewhere transformers' default for it is one particular checkpoint's
            # value.
            kv_heads = (
                heads
                if architecture == "llama" or "num_key_value_heads" in config
                else _required(config, "num_key_value_heads")
            )
        return cls(
            architecture=architecture,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.get("head_dim") or (128 if architecture == "qwen3" else hidden // heads),
            intermediate=_required(config, "intermediate_size"),
            vocab=_required(config, "vocab_size"),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_hf_rope(config),
            max_positions=_required(config, "max_position_embeddings"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            windows=_hf_windows(architecture, config, layers),
            bos=config.get("bos_token_id"),
            eos=token_ids(config.get("eos_token_id")),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], tensors: Sequence[str], divisors: Sequence[float] = ()
    ) -> ModelConfig:
        """Reads the metadata of a GGUF file.

        Args:
            metadata: key to value, as in the file.
            tensors: names of the file's tensors: without `output.weight` the embeddings are tied.
            divisors: contents of `rope_freqs.weight` if the file has one.

        Raises:
            LowkvError: for an architecture or a property that the decoder does not compute, naming it.
        """
        architecture = _architecture(metadata.get("general.architecture"), "general.architecture")
        prefix = f"{architecture}."

        def required(key: str) -> Any:
            return _required(metadata, prefix + key)

        if metadata.get(prefix + "expert_count"):
            raise _unsupported("mixture of experts", f"{prefix}expert_count", metadata[prefix + "expert_count"])
        heads, hidden, layers = (
            required("attention.head_count"),
            required("embedding_length"),
            required("block_count"),
        )
        head_dim = metadata.get(prefix + "attention.key_length", hidden // heads)
        if metadata.get(prefix + "attention.value_length", head_dim) != head_dim:
            raise _unsupported("V heads of another size than K heads", f"{prefix}attention.value_length", head_dim)
        rotated = metadata.get(prefix + "rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise _unsupported("rotary embedding over part of a head", f"{prefix}rope.dimension_count", rotated)
        kv_heads = metadata.get(prefix + "attention.head_count_kv", heads)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise _unsupported("layers with different numbers of heads", f"{prefix}attention.head_count_kv", kv_heads)
        window = metadata.get(prefix + "attention.sliding_window") or None
        eos = token_ids(metadata.get("tokenizer.ggml.eos_token_id")) + token_ids(
            metadata.get("tokenizer.ggml.eot_token_id")
        )
        return cls(
            architecture=architecture,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=required("feed_forward_length"),
            vocab=metadata.get(prefix + "vocab_size") or len(_required(metadata, "tokenizer.ggml.tokens")),
            # The file holds float32; seven digits give back the number that was meant (1e-05).
            rms_eps=float(f"{required('attention.layer_norm_rms_epsilon'):.7g}"),
            rope=_gguf_rope(metadata, prefix, tuple(divisors)),
            max_positions=required("context_length"),
            tied_embeddings="output.weight" not in tensors,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            windows=(window,) * layers,
            bos=metadata.get("tokenizer.ggml.bos_token_id"),
            eos=tuple(dict.fromkeys(eos)),
        )


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """`eos_token_id` as checkpoints write it (nothing, one id or several) as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _unsupported(what: str, key: str, value: object) -> LowkvError:
    return LowkvError(
        f"this model needs {what} ({key}), which lowkv does not compute",
        got=value,
        expected=f"a model that is {_SUPPORTED}",
    )


def _architecture(name: object, key: str) -> Architecture:
    for architecture in ARCHITECTURES:
        if name == architecture:
            return architecture
    if name is None:
        raise LowkvError(f"the model does not say what it is: {key} is missing", expected=_SUPPORTED)
    why = f" ({_WHY_NOT[name]})" if isinstance(name, str) and name in _WHY_NOT else ""
    raise LowkvError(f"the architecture of this model is not supported{why}", got=name, expected=_SUPPORTED)


def _required(mapping: Mapping[str, Any], key: str) -> Any:
    value = mapping.get(key)
    if value is None:
        raise LowkvError(
            f"the model's configuration lacks {key}",
            fix="use a complete checkpoint; lowkv does not guess sizes",
        )
    return value


def _refuse_foreign_properties(config: Mapping[str, Any]) -> None:
    for key, what in _MUST_BE_ABSENT.items():
        if config.get(key):
            raise _unsupported(what, key, config[key])
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise _unsupported("biases on its projections", key, True)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _unsupported(f"the activation {activation}", "hidden_act", activation)
    for name in config.get("architectures") or ():
        if not name.endswith("ForCausalLM"):
            raise LowkvError(
                "this checkpoint is not a text generator",
                got=name,
                expected="an architecture that ends in ForCausalLM",
            )


def _hf_windows(architecture: Architecture, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture == "llama":
        return (None,) * layers
    if architecture == "mistral":
        if len(set(config.get("layer_types") or ())) > 1:
            raise _unsupported("windows on some layers only (Ministral)", "layer_types", "mixed")
        return (window,) * layers
    if not config.get("use_sliding_window", False):
        return (None,) * layers
    window = _required(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = _required(config, "max_window_layers")
        return tuple(window if layer >= first else None for layer in range(layers))
    foreign = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if foreign:
        raise _unsupported("layers that are not attention", "layer_types", ", ".join(foreign))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _hf_rope(config: Mapping[str, Any]) -> RopeConfig:
    # transformers 5: rope_parameters holds all; 4: rope_theta at the top, rope_scaling for the rest.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise _unsupported("different rotary embeddings for its layers", "rope_parameters", dict(rope))
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise _unsupported("rotary embedding over part of a head", "partial_rotary_factor", partial)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", float(_required(rope, "factor")))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            factor=float(_required(rope, "factor")),
            low_freq_factor=float(_required(rope, "low_freq_factor")),
            high_freq_factor=float(_required(rope, "high_freq_factor")),
            original_max_positions=_required(rope, "original_max_position_embeddings"),
        )
    raise LowkvError(
        "this rope scaling is not supported",
        got=kind,
        expected="default, linear or llama3",
        fix="remove rope_scaling to serve its short context",
    )


def _gguf_rope(metadata: Mapping[str, Any], prefix: str, divisors: tuple[float, ...]) -> RopeConfig:
    theta = float(metadata.get(prefix + "rope.freq_base", 10000.0))
    kind = metadata.get(prefix + "rope.scaling.type", "none")
    if divisors:
        return RopeConfig(theta, "divisors", divisors=divisors)
    if kind == "none":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", float(_required(metadata, prefix + "rope.scaling.factor")))
    raise LowkvError("this rope scaling is not supported", got=kind, expected="none, linear, or rope_freqs.weight")
