"""What a study measures: ways to quantize K and V, and under which questions they are laid side by side.

A configuration says for K and for V how values become bits, and which tokens stay in the model's precision. Values
share parameters along one of two axes (arXiv 2402.02750, section 3.1):

    channel   `group_size` consecutive tokens of one channel
    token     32 consecutive channels of one token

KV formats serve K along `channel` and V along `token`, so these configurations have a cache plan; the others exist
here only, in simulation. 8-bit codecs have static scales instead of groups: a `granularity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from kvattention.codec import CODECS, VALUES_PER_PARAM, Codec
from lowkv.kvcache import FORMATS, CachePlan, KVFormat
from lowkv.recipe import KVCacheConfig, ScalesConfig

if TYPE_CHECKING:
    from lowkv.kvcache.plan import ModelGeometry

Axis = Literal["channel", "token"]
Granularity = Literal["", "none", "tensor", "head", "channel"]
ModelDtype = Literal["float16", "bfloat16"]

HOT: dict[ModelDtype, str] = {"float16": "fp16", "bfloat16": "bf16"}
"""The format of model precision, by `kv_cache.model_dtype`."""
GROUP = 32
RESIDUALS = (0, 32, 64, 128)
SINKS = (0, 32)
GROUPS = (32, 64, 128)
EIGHT_BIT = ("e4m3", "e5m2", "int8")


@dataclass(frozen=True)
class Side:
    """How K, or V, is stored once it is cold."""

    codec: str
    axis: Axis
    """Of grouped codecs; where each of K and V is served for the others."""

    @property
    def kind(self) -> Codec:
        return CODECS[self.codec]

    def bits(self, group_size: int, head_dim: int) -> float:
        """Bits of a stored value, its share of the parameters included."""
        if not self.kind.grouped:
            return self.kind.bits
        per_channel = 32 / group_size
        per_token = 32 * -(-head_dim // VALUES_PER_PARAM) / head_dim
        return self.kind.bits + (per_channel if self.axis == "channel" else per_token)


@dataclass(frozen=True)
class Configuration:
    """One way to keep keys and values. Equal configurations are measured once."""

    k: Side
    v: Side
    group_size: int = GROUP
    residual_length: int = 0
    sink_tokens: int = 0
    granularity: Granularity = ""
    """Of static scales; `none` is 1.0, empty where there are none."""
    rotate_values: bool = False

    @cached_property
    def row(self) -> KVFormat | None:
        """The KV format that serves this, if any."""
        if not self.exact and (self.k.axis, self.v.axis) != ("channel", "token"):
            return None
        wanted = (self.k.codec, self.v.codec, self.rotate_values)
        return next((row for row in FORMATS.values() if (row.k.name, row.v.name, row.rotate_values) == wanted), None)

    @property
    def exact(self) -> bool:
        return self.k.kind.hot and self.v.kind.hot

    @property
    def scaled(self) -> bool:
        return bool(self.granularity)

    def bits(self, head_dim: int) -> float:
        """Bits per cold value, parameters included."""
        return (self.k.bits(self.group_size, head_dim) + self.v.bits(self.group_size, head_dim)) / 2

    @property
    def label(self) -> str:
        """What a person calls it: by its format's name where it has one."""
        served = self.row.name if self.row else None
        if self.exact:
            return served or self.k.codec
        if self.scaled:
            scale = "1.0" if self.granularity == "none" else f"per {self.granularity}"
            return f"{served or self.k.codec}, scale {scale}"
        what = served or f"K{self.k.kind.bits} per {self.k.axis}, V{self.v.kind.bits} per {self.v.axis}"
        group = "" if self.group_size == GROUP else f"G {self.group_size}, "
        return f"{what} ({group}R {self.residual_length}, sink {self.sink_tokens})"

    @property
    def name(self) -> str:
        """One word that no other configuration has."""
        if self.exact:
            return self.k.codec
        if self.scaled:
            return f"{self.k.codec}-{self.granularity}"
        turned = "-rotated" if self.rotate_values else ""
        sides = "-".join(f"{part}_{side.codec}_{side.axis}" for part, side in (("k", self.k), ("v", self.v)))
        return f"{sides}-g{self.group_size}-r{self.residual_length}-s{self.sink_tokens}{turned}"

    def settings(self, model_dtype: ModelDtype) -> KVCacheConfig:
        """A recipe's `kv_cache` for it; for one that no format serves, of one with the same block rules."""
        row = self.row.name if self.row else "kivi2"
        if self.exact:
            return KVCacheConfig(format=HOT[model_dtype], model_dtype=model_dtype)
        scales = ScalesConfig()
        if self.granularity and self.granularity != "none":
            scales = ScalesConfig(source="dataset", granularity=self.granularity)
        return KVCacheConfig(
            format=row,
            group_size=self.group_size,
            residual_length=self.residual_length,
            sink_tokens=self.sink_tokens,
            model_dtype=model_dtype,
            scales=scales,
        )

    def plan(self, model: ModelGeometry, model_dtype: ModelDtype) -> CachePlan:
        """The cache plan of `settings`; every layer is quantized alike."""
        return CachePlan.from_config(model, self.settings(model_dtype))

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self)


def grouped(
    k_bits: int, v_bits: int, k_axis: Axis = "channel", v_axis: Axis = "token", **settings: Any
) -> Configuration:
    """A configuration of integer groups."""
    return Configuration(Side(f"int{k_bits}", k_axis), Side(f"int{v_bits}", v_axis), **settings)


def of_format(name: str) -> Configuration:
    """A KV format with its own residual and sink, scales per head if it needs any."""
    row = FORMATS[name]
    return Configuration(
        Side(row.k.name, "channel"),
        Side(row.v.name, "token"),
        residual_length=row.residual_length,
        sink_tokens=row.sink_tokens,
        granularity="head" if row.needs_scales else "",
        rotate_values=row.rotate_values,
    )


def baseline(model_dtype: ModelDtype) -> Configuration:
    """Nothing but the model's precision."""
    return of_format(HOT[model_dtype])


def sections(model: ModelGeometry, model_dtype: ModelDtype) -> Mapping[str, tuple[Configuration, ...]]:
    """Every question and the configurations that answer it; one configuration may answer several."""
    axes: tuple[tuple[Axis, Axis], ...] = (
        ("channel", "token"),
        ("channel", "channel"),
        ("token", "token"),
        ("token", "channel"),
    )
    power_of_two = not model.head_dim & (model.head_dim - 1)
    formats = [
        of_format(row.name)
        for row in FORMATS.values()
        if not row.model_precision and not row.needs_scales and (power_of_two or not row.rotate_values)
    ]
    return {
        "baseline": (baseline(model_dtype),),
        "axes": tuple(grouped(bits, bits, k, v) for bits in (2, 4) for k, v in axes),
        "residual": tuple(
            grouped(2, 2, residual_length=residual, sink_tokens=sink) for sink in SINKS for residual in RESIDUALS
        ),
        "group": tuple(grouped(2, 2, group_size=group, residual_length=128) for group in GROUPS),
        "formats": (*formats, grouped(2, 4, residual_length=128, sink_tokens=32)),
        "eight": tuple(
            Configuration(Side(codec, "channel"), Side(codec, "token"), granularity=granularity)
            for codec in EIGHT_BIT
            for granularity in ("none", "tensor", "head", "channel")
            if (codec, granularity) != ("int8", "none")  # whole numbers only: no recipe may ask for it
        ),
    }


def every(model: ModelGeometry, model_dtype: ModelDtype) -> tuple[Configuration, ...]:
    """All of them once, the baseline first."""
    return tuple(dict.fromkeys(one for chosen in sections(model, model_dtype).values() for one in chosen))
