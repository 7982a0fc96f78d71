"""What the plugin knows of its layer: the attributes of its ONNX node, checked, and as TensorRT serializes them.

ONNX node ──parser──> field collection ──> PluginFields ──> field collection ──> engine file ──> PluginFields
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvattention.codec import CODECS, Codec
from kvattention.gpu.schedule import group_heads
from kvattention.layout import LayerSpec, RecordLayout

PLUGIN_NAME = "PagedAttention"
PLUGIN_NAMESPACE = "lowkv"
PLUGIN_VERSION = "2"
"""Raised whenever inputs, fields or what they mean change: an engine finds only the plugin it was built with."""

FIELDS: dict[str, type[int] | type[float] | type[str]] = {
    "layer": int,
    "heads": int,
    "kv_heads": int,
    "head_dim": int,
    "group_size": int,
    "hot": str,
    "k_codec": str,
    "v_codec": str,
    "window": int,
    "softmax_scale": float,
    "hot_offset": int,
    "cold_offset": int,
    "fp8_query": int,
}
"""Name and type of every field, in order."""

_INT32 = 2**31


@dataclass(frozen=True)
class PluginFields:
    """One layer's attention. Raises ValueError for values that no kernel takes."""

    layer: int
    """Number of the layer; for people."""
    heads: int
    kv_heads: int
    head_dim: int
    group_size: int
    hot: str
    k_codec: str
    v_codec: str
    window: int
    """0: none."""
    softmax_scale: float
    hot_offset: int
    """Words from the start of a hot block to the layer's record; cold_offset the same in a cold block."""
    cold_offset: int
    fp8_query: int
    """1: e4m3 blocks are multiplied on FP8 tensor cores."""

    def __post_init__(self) -> None:
        # TensorRT keeps floats in 32 bits: rounded here, so that a plugin equals itself after serialization.
        object.__setattr__(self, "softmax_scale", float(np.float32(self.softmax_scale)))
        for name, kind in FIELDS.items():
            value = getattr(self, name)
            if kind is int and not 0 <= value < _INT32:
                raise ValueError(f"{PLUGIN_NAME} field {name} is {value}, expected 0 to {_INT32 - 1}")
        if self.fp8_query not in (0, 1):
            raise ValueError(f"{PLUGIN_NAME} field fp8_query is {self.fp8_query}, expected 0 or 1")
        if not (np.isfinite(self.softmax_scale) and self.softmax_scale > 0):
            raise ValueError(f"{PLUGIN_NAME} field softmax_scale is {self.softmax_scale}, expected a positive number")
        group_heads(self.heads, self.kv_heads)
        _ = self.spec  # its own checks

    @classmethod
    def from_layer(cls, index: int, layer: LayerSpec, heads: int, fp8_query: bool = False) -> PluginFields:
        """The fields of a layer's ONNX node. Scales are an input of the plugin, not a field."""
        return cls(
            layer=index,
            heads=heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            group_size=layer.group_size,
            hot=layer.hot.k.name,
            k_codec=layer.cold.k.name,
            v_codec=layer.cold.v.name,
            window=layer.window or 0,
            softmax_scale=layer.softmax_scale,
            hot_offset=layer.hot_offset,
            cold_offset=layer.cold_offset,
            fp8_query=int(fp8_query),
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PluginFields:
        """Raises ValueError for missing fields."""
        missing = [name for name in FIELDS if name not in values]
        if missing:
            raise ValueError(f"{PLUGIN_NAME} lacks the fields {', '.join(missing)}; expected {', '.join(FIELDS)}")
        return cls(**{name: values[name] for name in FIELDS})

    def to_mapping(self) -> dict[str, int | float | str]:
        """The ONNX node's attributes, to which namespace and version come."""
        return asdict(self)

    @cached_property
    def spec(self) -> LayerSpec:
        """The layer, its scales aside."""
        hot = _codec("hot", self.hot)
        record = RecordLayout(hot, hot, self.kv_heads, self.head_dim, self.group_size)
        k, v = _codec("k_codec", self.k_codec), _codec("v_codec", self.v_codec)
        return LayerSpec(
            hot=record,
            cold=RecordLayout(k, v, self.kv_heads, self.head_dim, self.group_size),
            hot_offset=self.hot_offset,
            cold_offset=self.cold_offset,
            window=self.window or None,
            softmax_scale=self.softmax_scale,
        )


def fields_from_collection(collection: Iterable[Any]) -> PluginFields:
    """From a ``trt.PluginFieldCollection``; fields of other names (the node's namespace and version) are left alone.

    Raises ValueError for missing fields, and for values that no kernel takes.
    """
    values = {field.name: _value(field) for field in collection if field.name in FIELDS}
    return PluginFields.from_mapping(values)


def fields_to_collection(trt: Any, fields: PluginFields) -> tuple[Any, list[Any]]:
    """(``trt.PluginFieldCollection``, the arrays that it points into and that must outlive it)."""
    arrays = [_array(kind, getattr(fields, name)) for name, kind in FIELDS.items()]
    return _collection(trt, arrays), arrays


def declared_fields(trt: Any) -> Any:
    """The collection by which a creator tells TensorRT the fields' names and types."""
    return _collection(trt, [_array(kind, None) for kind in FIELDS.values()])


def _collection(trt: Any, arrays: list[Any]) -> Any:
    kinds = {
        int: trt.PluginFieldType.INT32,
        float: trt.PluginFieldType.FLOAT32,
        str: trt.PluginFieldType.CHAR,
    }
    return trt.PluginFieldCollection(
        [trt.PluginField(name, array, kinds[kind]) for (name, kind), array in zip(FIELDS.items(), arrays, strict=True)]
    )


def _array(kind: type, value: Any) -> Any:
    """The value as TensorRT keeps it; None: of no elements."""
    if kind is str:
        return np.frombuffer((value or "").encode("ascii"), np.int8)
    return np.array([] if value is None else [value], np.int32 if kind is int else np.float32)


def _value(field: Any) -> int | float | str:
    kind = FIELDS[field.name]
    if kind is str:
        data = field.data
        raw = data if isinstance(data, bytes) else np.asarray(data).tobytes()
        return raw.rstrip(b"\0").decode("ascii")
    numbers = np.asarray(field.data).ravel()
    if numbers.size != 1:
        raise ValueError(f"{PLUGIN_NAME} field {field.name} has {numbers.size} values, expected one")
    return kind(numbers[0])


def _codec(field: str, name: str) -> Codec:
    if name not in CODECS:
        raise ValueError(f"{PLUGIN_NAME} field {field} is {name!r}, expected one of {', '.join(CODECS)}")
    return CODECS[name]
