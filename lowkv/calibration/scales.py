"""Static scales of 8-bit keys and values: what an engine records, checked before it is used.

A value is stored as saturate(x / scale) and read as stored * scale, in a codec whose largest value is `Codec.maximum`.
K has a scale for every channel of every KV head, V one for every KV head; coarser granularities are those arrays with
equal numbers in them, so that what reads them knows only one shape. On file each number is written once:

    granularity   K written        V written
    tensor        one number       one number
    head          [Hkv]            [Hkv]
    channel       [Hkv, D]         [Hkv]

A layer's part whose codec takes no scales (16 bit, or groups that carry their own) is written as null and is ones in
memory. This module does not say what scales are good: see `estimate`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lowkv.errors import LowkvError
from lowkv.kvcache.formats import FORMATS

if TYPE_CHECKING:
    from kvattention import Codec
    from lowkv.kvcache.plan import CachePlan

Source = Literal["none", "random", "dataset", "checkpoint"]
Granularity = Literal["tensor", "head", "channel"]
Scales = NDArray[np.float32]

SOURCES: tuple[Source, ...] = ("none", "random", "dataset", "checkpoint")
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "head", "channel")
PARTS = ("k", "v")
NO_SCALES: Mapping[str, Any] = {"source": "none", "layers": None}
"""What stands in engine.json when no format of the plan takes scales."""

_REBUILD = "build the engine again with `lowkv build --force`"


@dataclass(frozen=True, eq=False)
class KVScales:
    """Scales of every layer, and where they come from.

    Raises:
        LowkvError: a scale is not a positive, finite number, an array has the wrong shape, or source or granularity
            is not known.
    """

    source: Source
    granularity: Granularity
    estimator: str
    """`amax`, `percentile` or `mse`; empty where nothing was estimated."""
    layers: tuple[tuple[Scales, Scales], ...]
    """Per layer K's float32 [Hkv, D] and V's float32 [Hkv]."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Plain data for people: text, tokens, seed, the largest |K| and |V| of every layer, ..."""
    missing: frozenset[tuple[int, str]] = frozenset()
    """(layer, "k" or "v") that the source has no scale for: ones stand there, and a plan that needs them is refused."""

    def __post_init__(self) -> None:
        for what, got, known in (("source", self.source, SOURCES), ("granularity", self.granularity, GRANULARITIES)):
            if got not in known:
                raise LowkvError(f"the KV scales have an unknown {what}", got=got, expected=" | ".join(known))
        shape = np.shape(self.layers[0][0]) if self.layers else ()
        if self.layers and len(shape) != 2:
            raise _wrong_shape(0, "k", shape, "[KV heads, head_dim]")
        for layer, pair in enumerate(self.layers):
            for part, scales, wanted in zip(PARTS, pair, (shape, shape[:1]), strict=True):
                if scales.dtype != np.float32 or scales.shape != wanted:
                    raise _wrong_shape(layer, part, f"{scales.dtype} {list(scales.shape)}", f"float32 {list(wanted)}")
                _check_values(layer, part, scales)

    @classmethod
    def unit(cls, layers: int, kv_heads: int, head_dim: int, details: Mapping[str, Any] | None = None) -> KVScales:
        """All 1.0: values are stored as they are."""
        pair = np.ones((kv_heads, head_dim), np.float32), np.ones(kv_heads, np.float32)
        return cls("none", "tensor", "", (pair,) * layers, details or {})

    def check(self, plan: CachePlan) -> None:
        """Raises `LowkvError` when these are not scales for the plan, naming the layer and K or V."""
        if len(self.layers) != len(plan.layers):
            raise LowkvError(
                "the KV scales are of another model",
                got=f"{len(self.layers)} layers",
                expected=f"{len(plan.layers)}",
                fix=_REBUILD,
            )
        for layer, part, _ in scaled_parts(plan):
            scales = self.layers[layer][PARTS.index(part)]
            wanted = (plan.kv_heads, plan.head_dim) if part == "k" else (plan.kv_heads,)
            if scales.shape != wanted:
                raise _wrong_shape(layer, part, list(scales.shape), str(list(wanted)))
            if (layer, part) in self.missing:
                raise LowkvError(
                    f"layer {layer} has no scale for {part.upper()}",
                    got=f"scales from source {self.source}",
                    expected=f"one, because its format {plan.layers[layer].format} needs it",
                    fix="name the layer in kv_cache.skip_layers, or set kv_cache.scales.source: dataset",
                )

    # -- engine.json -------------------------------------------------------------------------------------

    def to_mapping(self, plan: CachePlan) -> dict[str, Any]:
        """Plain data; only what the plan's formats need is kept of the layers. `from_mapping` is the inverse."""
        layers: list[dict[str, Any]] = [dict.fromkeys(PARTS) for _ in self.layers]
        for layer, part, _ in scaled_parts(plan):
            scales = self.layers[layer][PARTS.index(part)]
            layers[layer][part] = _plain(_compact(scales, self.granularity))
        return {
            "source": self.source,
            "granularity": self.granularity,
            "estimator": self.estimator,
            "details": dict(self.details),
            "layers": layers,
        }

    def digest(self, plan: CachePlan) -> str:
        """What identifies the numbers themselves, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.to_mapping(plan)["layers"]).encode()).hexdigest()

    @classmethod
    def from_mapping(cls, plain: Mapping[str, Any], plan: CachePlan) -> KVScales:
        """The scales of an engine with that plan.

        Raises:
            LowkvError: a scale that the plan needs is missing, not positive, not finite, or has another shape than
                its granularity; the message names the layer and K or V.
        """
        layers, granularity = plain.get("layers"), plain.get("granularity")
        if not isinstance(layers, list) or len(layers) != len(plan.layers) or granularity not in GRANULARITIES:
            raise LowkvError(
                "the engine's KV scales are not complete",
                got=f"{len(layers) if isinstance(layers, list) else 'no'} layers, granularity {granularity}",
                expected=f"{len(plan.layers)} layers, granularity {' | '.join(GRANULARITIES)}",
                fix=_REBUILD,
            )
        full = [
            [np.ones((plan.kv_heads, plan.head_dim), np.float32), np.ones(plan.kv_heads, np.float32)] for _ in layers
        ]
        for layer, part, _ in scaled_parts(plan):
            written = layers[layer].get(part) if isinstance(layers[layer], Mapping) else None
            target = full[layer][PARTS.index(part)]
            target[...] = _expanded(written, layer, part, granularity, target.shape)
        return cls(
            source=plain.get("source", ""),
            granularity=granularity,
            estimator=str(plain.get("estimator", "")),
            layers=tuple((k, v) for k, v in full),
            details=plain.get("details", {}),
        )


def scaled_parts(plan: CachePlan) -> Iterator[tuple[int, str, Codec]]:
    """(layer, "k" or "v", codec) of everything in a plan that is stored with static scales."""
    for layer, chosen in enumerate(plan.layers):
        row = FORMATS[chosen.format]
        for part, codec in zip(PARTS, (row.k, row.v), strict=True):
            if codec.scaled:
                yield layer, part, codec


def _compact(scales: Scales, granularity: Granularity) -> Scales:
    """Each number once; K's [Hkv, D] and V's [Hkv] are broadcast from it."""
    if granularity == "channel":
        return scales
    per_head = scales[:, 0] if scales.ndim == 2 else scales
    small = per_head[0] if granularity == "tensor" else per_head
    wide = small[:, None] if granularity == "head" and scales.ndim == 2 else small
    if not np.array_equal(np.broadcast_to(wide, scales.shape), scales):
        raise LowkvError(f"the KV scales are finer than granularity {granularity} can write")
    return np.asarray(small)


def _plain(scales: Scales) -> Any:
    """Nested lists of the shortest decimals that read back as the same float32."""
    if scales.ndim:
        return [_plain(part) for part in scales]
    return float(str(np.float32(scales)))


def _expanded(written: Any, layer: int, part: str, granularity: Granularity, shape: tuple[int, ...]) -> Scales:
    """The inverse of `_compact` and `_plain`."""
    if written is None:
        raise LowkvError(f"the engine has no scale for {part.upper()} of layer {layer}", fix=_REBUILD)
    wanted: tuple[int, ...] = {"tensor": (), "head": shape[:1], "channel": shape}[granularity]
    try:
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused below
            scales = np.asarray(written, np.float64).astype(np.float32)
    except (TypeError, ValueError, OverflowError):
        raise _wrong_shape(layer, part, written, f"numbers of shape {list(wanted)}") from None
    if scales.shape != wanted or isinstance(written, (str, bool)):
        raise _wrong_shape(layer, part, written if not scales.ndim else list(scales.shape), f"shape {list(wanted)}")
    _check_values(layer, part, scales)
    return np.broadcast_to(scales.reshape(scales.shape + (1,) * (len(shape) - scales.ndim)), shape)


def _check_values(layer: int, part: str, scales: Scales) -> None:
    bad = scales[~(np.isfinite(scales) & (scales > 0))]
    if bad.size:
        raise LowkvError(
            f"the scale of {part.upper()} of layer {layer} is not usable",
            got=float(bad.flat[0]),
            expected="a positive, finite number",
            fix=f"calibrate again: {_REBUILD}",
        )


def _wrong_shape(layer: int, part: str, got: object, expected: str) -> LowkvError:
    return LowkvError(
        f"the scales of {part.upper()} of layer {layer} have the wrong shape",
        got=got,
        expected=expected,
        fix=_REBUILD,
    )
