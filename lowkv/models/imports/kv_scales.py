"""Scales of keys and values in a checkpoint: under which names, and what is refused or left out.

    llm-compressor    self_attn.k_scale, .v_scale           [1] (tensor) or [Hkv, 1, 1] (attn_head)
    ModelOpt          self_attn.k_proj.k_scale, self_attn.v_proj.v_scale       []
    legacy            self_attn.k_proj.output_scale, self_attn.v_proj.output_scale; self_attn.kv_scale for both

All of them multiply what is stored. K's and V's are never swapped or merged; `kv_scale` is one number for both because
its file has no other. A scale of queries or of probabilities changes nothing here. A zero point does: it is refused
unless it is zero.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lowkv.errors import LowkvError
from lowkv.models.imports.scheme import KVScheme, Tensors, contradiction

if TYPE_CHECKING:
    from lowkv.calibration.scales import KVScales
    from lowkv.models.config import ModelConfig

Values = NDArray[np.float32]

_NAMES = {
    "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "attn.k_scale", "kv_scale"),
    "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "attn.v_scale", "kv_scale"),
}
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.(attn\.)?(q_scale|prob_scale|q_proj\.(q_scale|output_scale))")
_OFFSETS = re.compile(r"model\.layers\.\d+\.self_attn\.(attn\.)?([kv]_proj\.)?([qkv]_(zero_point|bias)|kv_zero_point)")


@dataclass(frozen=True)
class FoundScales:
    """The scales in a checkpoint, checked."""

    layers: tuple[tuple[Values | None, Values | None], ...]  # K's and V's, float32 [1] or [Hkv]
    used: frozenset[str]
    """Names of the tensors that they were read from."""
    ignored: tuple[str, ...]
    """Names of tensors that make no difference here."""
    warnings: tuple[str, ...] = field(default=())

    @property
    def any(self) -> bool:
        return any(part is not None for layer in self.layers for part in layer)


def scale_names(tensors: Tensors, layers: int) -> frozenset[str]:
    """Names of everything in a checkpoint that is about scales of keys and values."""
    stored = tensors.stored()
    known = {name for layer in range(layers) for part in "kv" for name in _candidates(layer, part) if name in stored}
    return frozenset(known | {name for name in stored if _IGNORED.fullmatch(name) or _OFFSETS.fullmatch(name)})


def find_scales(tensors: Tensors, config: ModelConfig, scheme: KVScheme | None) -> FoundScales:
    """Raises LowkvError for a zero point, a scale that is none, two of one thing, or one that the config promises."""
    stored = tensors.stored()
    for name in sorted(name for name in stored if _OFFSETS.fullmatch(name)):
        _refuse_offset(tensors, name)
    used: set[str] = set()
    layers = []
    for layer in range(config.layers):
        pair = []
        for part in "kv":
            names = [name for name in _candidates(layer, part) if name in stored]
            values = [_scales(tensors, name, config, layer, part) for name in names]
            if any(not np.array_equal(values[0], value) for value in values[1:]):
                raise contradiction(f"layer {layer} has two scales for {part.upper()}", ", ".join(names), "one of them")
            used.update(names)
            pair.append(values[0] if values else None)
        layers.append((pair[0], pair[1]))
    ignored = sorted(name for name in stored if _IGNORED.fullmatch(name) or _OFFSETS.fullmatch(name))
    found = FoundScales(tuple(layers), frozenset(used), tuple(ignored))
    _check_complete(found, scheme)
    return FoundScales(found.layers, found.used, found.ignored, _warnings(found, scheme))


def kv_scales(found: FoundScales, config: ModelConfig, scheme: KVScheme | None) -> KVScales | None:
    """As an engine records them; None when the checkpoint neither has scales nor says that it needs none."""
    from lowkv.calibration.scales import KVScales

    if not found.any and scheme is None:
        return None
    pairs, missing, per_head = [], set(), False
    for layer, (k, v) in enumerate(found.layers):
        for part, value in (("k", k), ("v", v)):
            if value is None and found.any:
                missing.add((layer, part))
            per_head |= value is not None and value.size > 1
        pairs.append(
            (
                _full(k, (config.kv_heads, config.head_dim)),
                _full(v, (config.kv_heads,)),
            )
        )
    details = {"codec": scheme.codec if scheme else "e4m3"}
    if found.warnings:
        details["warnings"] = list(found.warnings)  # type: ignore[assignment]
    return KVScales(
        source="checkpoint",
        granularity="head" if per_head else "tensor",
        estimator="",
        layers=tuple(pairs),
        details=details,
        missing=frozenset(missing),
    )


def _candidates(layer: int, part: str) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{name}" for name in _NAMES[part]]


def _full(value: Values | None, shape: tuple[int, ...]) -> Values:
    if value is None:
        return np.ones(shape, np.float32)
    return np.ascontiguousarray(np.broadcast_to(value.reshape(-1, *(1,) * (len(shape) - 1)), shape))


def _scales(tensors: Tensors, name: str, config: ModelConfig, layer: int, part: str) -> Values:
    """float32 [1] or [Hkv]."""
    shape, dtype = tensors.stored()[name]
    heads = config.kv_heads
    if dtype not in ("F64", "F32", "F16", "BF16") or shape not in ((), (1,), (heads,), (heads, 1), (heads, 1, 1)):
        raise LowkvError(
            f"the scales of {part.upper()} of layer {layer} have the wrong shape: {name}",
            got=f"{dtype} {list(shape)}",
            expected=f"floating point [], [1] or [{heads}, 1, 1] (KV heads)",
            fix="calibrate the checkpoint again; K's scales of single channels are not read from files",
        )
    values: Values = tensors.raw(name).float().reshape(-1).numpy()
    bad = values[~(np.isfinite(values) & (values > 0))]
    if bad.size:
        raise LowkvError(
            f"the scale of {part.upper()} of layer {layer} is not usable: {name}",
            got=float(bad[0]),
            expected="a positive, finite number",
            fix="calibrate the checkpoint again",
        )
    return values


def _refuse_offset(tensors: Tensors, name: str) -> None:
    if name.rpartition(".")[2].startswith("q_"):
        return
    values = tensors.raw(name).float()
    if values.any():
        raise LowkvError(
            f"keys and values with a zero point are not supported: {name}",
            got=float(values.flatten()[values.flatten() != 0][0]),
            expected="symmetric scales alone",
            fix="calibrate the checkpoint again with a symmetric KV cache scheme",
        )


def _check_complete(found: FoundScales, scheme: KVScheme | None) -> None:
    """Where the library always writes scales, one that is missing was lost."""
    if scheme is None or scheme.optional:
        return
    for layer, pair in enumerate(found.layers):
        for part, value in zip("kv", pair, strict=True):
            if value is None:
                raise LowkvError(
                    f"the checkpoint lacks the scale of {part.upper()} of layer {layer}",
                    got=f"a config with {scheme.words}",
                    expected=f"tensor model.layers.{layer}.self_attn.{part}_scale",
                    fix="use a complete checkpoint, or set kv_cache.scales.source to dataset or random",
                )


_NO_SCALES = (
    "the config says FP8 keys and values and the files hold no scales: 1.0 is meant, which loses what is small and "
    "clips beyond 448; kv_cache.scales.source: dataset measures them"
)
_ALL_ONE = (
    "all scales of keys and values are exactly 1.0: an export that clamps them to at least 1.0, or none was measured; "
    "kv_cache.scales.source: dataset measures them"
)


def _warnings(found: FoundScales, scheme: KVScheme | None) -> tuple[str, ...]:
    if scheme is not None and not found.any:
        return (_NO_SCALES,)
    values = [value for pair in found.layers for value in pair if value is not None]
    if values and all((value == 1.0).all() for value in values):
        return (_ALL_ONE,)
    return ()
