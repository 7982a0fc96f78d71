"""compressed-tensors, the format that llm-compressor writes: `quantization_config` of config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lowkv.models.imports.layouts import Float8, PackedRows
from lowkv.models.imports.scheme import KVScheme, Layout, Scheme, refuse, section

_NAME = "compressed-tensors"


def compressed_tensors_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config`. Raises LowkvError for what is not read, naming it."""
    if section(quantization, "sparsity_config", _NAME).get("format", "dense") != "dense":
        raise refuse(_NAME, "sparse weights", quantization["sparsity_config"])
    if section(section(quantization, "transform_config", _NAME), "config_groups", _NAME):
        raise refuse(_NAME, "rotated weights (transform_config)")
    groups = section(quantization, "config_groups", _NAME)
    rules = [_rule(name, group, quantization) for name, group in groups.items()]
    ignored = tuple(quantization.get("ignore") or ())

    def layout(linear: str) -> Layout | None:
        if any(_matches(pattern, linear) for pattern in ignored):
            return None
        return next((found for targets, found in rules if any(_matches(target, linear) for target in targets)), None)

    version = quantization.get("version")
    kv = quantization.get("kv_cache_scheme")
    return Scheme(
        library=f"{_NAME} {version}" if version else _NAME,
        layout=layout,
        kv=None if kv is None else _kv_scheme(kv),
    )


def _rule(name: str, group: Any, quantization: Mapping[str, Any]) -> tuple[Sequence[str], Layout]:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise refuse(_NAME, f"a group {name} without weights", group)
    if group.get("output_activations"):
        raise refuse(_NAME, "quantized outputs", f"{name}.output_activations")
    weights, inputs = group["weights"], group.get("input_activations")
    kind = group.get("format") or quantization.get("format")
    bits = f"{weights.get('num_bits')}-bit {weights.get('type')} weights, {weights.get('strategy')} ({kind})"
    targets = tuple(group.get("targets") or ("Linear",))
    if kind == "pack-quantized" and weights.get("num_bits") == 4 and weights.get("type") == "int":
        if inputs:
            raise refuse(_NAME, "4-bit weights with quantized inputs", bits)
        if weights.get("strategy") not in ("group", "channel"):
            raise refuse(_NAME, "4-bit weights neither in groups nor per output", bits)
        size = weights.get("group_size") if weights["strategy"] == "group" else None
        return targets, PackedRows(_group_size(size), bool(weights.get("symmetric", True)))
    if (
        kind in ("float-quantized", "naive-quantized")
        and weights.get("num_bits") == 8
        and weights.get("type") == "float"
    ):
        if not weights.get("symmetric", True) or weights.get("strategy") not in ("tensor", "channel"):
            raise refuse(_NAME, "FP8 weights neither per tensor nor per output", bits)
        return targets, Float8(weights["strategy"] == "channel", _static_inputs(inputs))
    raise refuse(_NAME, f"weights of a kind: {bits}")


def _static_inputs(inputs: Mapping[str, Any] | None) -> bool:
    if inputs is None:
        return False
    if inputs.get("num_bits") != 8 or inputs.get("type") != "float" or not inputs.get("symmetric", True):
        raise refuse(_NAME, "FP8 weights with inputs that are not FP8", dict(inputs))
    if inputs.get("dynamic"):
        return False
    if inputs.get("strategy", "tensor") != "tensor":
        raise refuse(_NAME, "static scales of inputs that are not per tensor", inputs.get("strategy"))
    return True


def _group_size(size: Any) -> int | None:
    if size is None or size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise refuse(_NAME, "a group size that is none", size)
    return size


def _kv_scheme(kv: Any) -> KVScheme:
    if not isinstance(kv, dict):
        raise refuse(_NAME, "a kv_cache_scheme that is no mapping", kv)
    words = f"kv_cache_scheme {kv.get('num_bits')}-bit {kv.get('type')}, {kv.get('strategy')}"
    if kv.get("dynamic"):
        raise refuse(_NAME, "dynamic scales of keys and values", words, "calibrate with dynamic: false")
    if kv.get("symmetric") is False:
        raise refuse(_NAME, "zero points of keys and values", words, "calibrate with symmetric: true")
    codec = {"float": "e4m3", "int": "int8"}.get(kv.get("type", "float"))
    if kv.get("num_bits", 8) != 8 or codec is None or kv.get("strategy", "tensor") not in ("tensor", "attn_head"):
        raise refuse(_NAME, "keys and values in a form", words)
    return KVScheme(codec, words, optional=False)


def _matches(pattern: str, linear: str) -> bool:
    """`Linear` is the class of all of them; `re:...` matches from a name's beginning; anything else is a name."""
    if pattern == "Linear":
        return True
    if pattern.startswith("re:"):
        return re.match(pattern[3:], linear) is not None
    return linear == pattern
