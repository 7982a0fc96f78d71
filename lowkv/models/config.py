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

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3_text"]
ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
"""Llama 1 to 3.x and SmolLM2 are `llama`; Qwen2.5 is `qwen2`; Gemma 3 of text alone is `gemma3_text`."""

_SUPPORTED = (
    "one of llama (Llama 2, 3, 3.1, 3.2, SmolLM2), mistral, qwen2 (Qwen2, Qwen2.5), qwen3, "
    "gemma3_text (Gemma 3 270M, 1B)"
)

_OF_GGUF: dict[str, Architecture] = {"gemma3": "gemma3_text"}
"""GGUF's names, where they are not Hugging Face's: files of Gemma 3 hold its text model alone."""

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
    "gemma2": "soft-capped logits",
    "gemma3": "images beside text; checkpoints of its text model alone are gemma3_text",
    "gemma3n": "embeddings for every layer",
    "gemma3n_text": "embeddings for every layer",
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
    "attention_multiplier": "another attention scale than 1/sqrt(head_dim)",
    "embedding_multiplier": "scaled embeddings",
    "residual_multiplier": "scaled residuals",
    "logits_scaling": "scaled logits",
    "no_rope_layers": "layers without rotary embedding",
    "use_bidirectional_attention": "attention to later tokens",
}
"""Keys of `config.json` that change what the model computes."""

Activation = Literal["silu", "gelu_tanh"]

_HF_ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
}

_GEMMA_PATTERN = 6
"""Every sixth layer of Gemma 3 sees everything, unless its checkpoint says otherwise."""

_GEMMA_THETA, _GEMMA_LOCAL_THETA = 1e6, 1e4
"""Gemma 3's rotary bases, where a checkpoint does not write them."""


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
    """A decoder-only transformer of the Llama family: RMSNorm, rotary positions, grouped-query attention, gated MLP.

    Every field is a property of the computation, so that nothing that computes asks for the architecture's name.
    """

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
    activation: Activation = "silu"
    """Of the MLP's gate."""
    post_norms: bool = False
    """What attention and MLP give is normalized too, before it is added to the residual stream."""
    norm_offset: float = 0.0
    """What every norm weight of a checkpoint lacks: Gemma's are stored less 1. The decoder's lack nothing."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it, rounded to their precision."""
    query_scalar: float | None = None
    """Scores are divided by its square root; None is head_dim."""
    local_rope: RopeConfig | None = None
    """Rotary embedding of the layers that have a window; None where all layers have the same."""

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
        return 1.0 / math.sqrt(self.query_scalar or self.head_dim)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The model's rotary embeddings; `rope_index` says which one a layer has."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_index(self, layer: int) -> int:
        return int(self.local_rope is not None and self.windows[layer] is not None)

    @property
    def q_width(self) -> int:
        """Columns of the query projection: heads x head_dim (not always `hidden`)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def fits_float16(self) -> bool:
        """Whether activations stay within float16's range.

        What norms let into the residual stream at full size adds up: Gemma 3 270M's reaches 104,000 on plain text.
        """
        return not self.post_norms

    def head_count(self) -> int:
        """Parameters of the logits projection, hidden x vocab (the embedding itself when tied)."""
        return self.hidden * self.vocab

    def weight_count(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        qkv = self.q_width + 2 * self.kv_width
        layer = self.hidden * qkv + self.q_width * self.hidden  # attention
        layer += 3 * self.hidden * self.intermediate  # gate, up, down
        layer += (4 if self.post_norms else 2) * self.hidden  # norms
        layer += qkv if self.qkv_bias else 0
        layer += 2 * self.head_dim if self.qk_norm else 0
        embeddings = self.head_count() * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.hidden

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON values; `from_mapping` gives the same config back."""
        mapping = asdict(self)
        for rope in filter(None, (mapping["rope"], mapping["local_rope"])):
            rope["divisors"] = list(rope["divisors"])
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
                fix="build the engine again",
            )

        def rope(plain: Mapping[str, Any] | None) -> RopeConfig | None:
            return None if plain is None else RopeConfig(**{**plain, "divisors": tuple(plain["divisors"])})

        values = dict(mapping) | {
            "rope": rope(mapping["rope"]),
            "local_rope": rope(mapping["local_rope"]),
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
        traits = _traits(architecture, _required(config, "hidden_size"))
        _refuse_foreign_properties(config, traits.get("activation", "silu"))
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
        head_dim = config.get("head_dim") or {"qwen3": 128, "gemma3_text": 256}.get(architecture, hidden // heads)
        windows = _hf_windows(architecture, config, layers)
        rope, local_rope = _hf_ropes(architecture, config)
        return cls(
            architecture=architecture,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=_required(config, "intermediate_size"),
            vocab=_required(config, "vocab_size"),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_positions=_required(config, "max_position_embeddings"),
            tied_embeddings=bool(config.get("tie_word_embeddings", architecture == "gemma3_text")),
            windows=windows,
            bos=config.get("bos_token_id"),
            eos=token_ids(config.get("eos_token_id")),
            query_scalar=_query_scalar(config.get("query_pre_attn_scalar", 256), head_dim)
            if architecture == "gemma3_text"
            else None,
            local_rope=local_rope if any(windows) else None,
            **traits,
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
        name = metadata.get("general.architecture")
        architecture = _OF_GGUF.get(str(name)) or _architecture(name, "general.architecture")
        prefix = f"{name}."

        def required(key: str) -> Any:
            return _required(metadata, prefix + key)

        if metadata.get(prefix + "expert_count"):
            raise _unsupported("mixture of experts", f"{prefix}expert_count", metadata[prefix + "expert_count"])
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if metadata.get(prefix + key):
                raise _unsupported("soft-capped logits", prefix + key, metadata[prefix + key])
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
        windows = _gguf_windows(architecture, metadata, prefix, layers)
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
            windows=windows,
            bos=metadata.get("tokenizer.ggml.bos_token_id"),
            eos=tuple(dict.fromkeys(eos)),
            # No key says it: of Gemma 3, the one of 62 layers (27B) divides by another number than head_dim.
            query_scalar=_query_scalar(hidden / heads, head_dim)
            if architecture == "gemma3_text" and layers == 62
            else None,
            local_rope=RopeConfig(float(metadata.get(prefix + "rope.freq_base_swa", _GEMMA_LOCAL_THETA)))
            if architecture == "gemma3_text" and any(windows)
            else None,
            **_traits(architecture, hidden),
        )


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """`eos_token_id` as checkpoints write it (nothing, one id or several) as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _traits(architecture: Architecture, hidden: int) -> dict[str, Any]:
    """What all models of an architecture have in common."""
    traits: dict[str, Any] = {
        "qkv_bias": architecture == "qwen2",
        "qk_norm": architecture in ("qwen3", "gemma3_text"),
    }
    if architecture == "gemma3_text":
        traits |= {"activation": "gelu_tanh", "post_norms": True, "norm_offset": 1.0}
        traits["embedding_scale"] = math.sqrt(hidden)
    return traits


def _query_scalar(scalar: float, head_dim: int) -> float | None:
    return None if scalar == head_dim else float(scalar)


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


def _refuse_foreign_properties(config: Mapping[str, Any], activation: Activation) -> None:
    for key, what in _MUST_BE_ABSENT.items():
        if config.get(key):
            raise _unsupported(what, key, config[key])
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise _unsupported("biases on its projections", key, True)
    if config.get("query_pre_attn_scalar") and config.get("model_type") != "gemma3_text":
        raise _unsupported(
            "another attention scale than 1/sqrt(head_dim)", "query_pre_attn_scalar", config["query_pre_attn_scalar"]
        )
    key = "hidden_act" if activation == "silu" else "hidden_activation"  # transformers ignores the other one
    known = _HF_ACTIVATIONS[activation]
    found = config.get(key) or known[0]
    if found not in known:
        raise _unsupported(f"the activation {found}", key, found)
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
    if architecture != "gemma3_text" and not config.get("use_sliding_window", False):
        return (None,) * layers
    window = _required(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None and architecture == "gemma3_text":
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _GEMMA_PATTERN
        return _every(pattern, window, layers)
    if kinds is None:
        first = _required(config, "max_window_layers")
        return tuple(window if layer >= first else None for layer in range(layers))
    foreign = sorted(set(kinds) - {"sliding_attention", "full_attention"})
    if foreign:
        raise _unsupported("layers that are not attention", "layer_types", ", ".join(foreign))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _every(pattern: int, window: int, layers: int) -> tuple[int | None, ...]:
    """A window on all layers but each `pattern`-th."""
    return tuple(window if (layer + 1) % pattern else None for layer in range(layers))


def _hf_ropes(architecture: Architecture, config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of layers without a window, or of all; and that of layers with one, if it is another."""
    # transformers 5: rope_parameters holds all; 4: rope_theta at the top, rope_scaling for the rest.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_kind = any(isinstance(value, Mapping) for value in rope.values())
    if architecture != "gemma3_text":
        if by_kind:
            raise _unsupported("different rotary embeddings for its layers", "rope_parameters", dict(rope))
        return _hf_rope(rope, config, config.get("rope_theta") or 10000.0), None
    full, local = (rope.get("full_attention"), rope.get("sliding_attention")) if by_kind else (rope, None)
    theta = config.get("rope_theta") or _GEMMA_THETA
    local_theta = config.get("rope_local_base_freq") or _GEMMA_LOCAL_THETA
    return _hf_rope(full or {}, config, theta), _hf_rope(local or {}, config, local_theta)


def _hf_rope(rope: Mapping[str, Any], config: Mapping[str, Any], theta: float) -> RopeConfig:
    theta = float(rope.get("rope_theta") or theta)
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


def _gguf_windows(
    architecture: Architecture, metadata: Mapping[str, Any], prefix: str, layers: int
) -> tuple[int | None, ...]:
    window = metadata.get(prefix + "attention.sliding_window") or None
    if window is None or architecture != "gemma3_text":
        return (window,) * layers
    pattern = metadata.get(prefix + "attention.sliding_window_pattern", _GEMMA_PATTERN)
    if isinstance(pattern, int):
        return _every(pattern, window, layers)
    return tuple(window if local else None for local in pattern)


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
