"""NVIDIA ModelOpt: `quantization_config` of config.json, and `hf_quant_config.json` beside it, which say the same."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from lowkv.models.imports.layouts import Float8, ModelOptInt4
from lowkv.models.imports.scheme import KVScheme, Layout, Scheme, contradiction, refuse, section

HF_QUANT_CONFIG = "hf_quant_config.json"

_NAME = "ModelOpt"


def modelopt_scheme(quantization: Mapping[str, Any] | None, beside: Mapping[str, Any] | None) -> Scheme:
    """The scheme of the two configs, either of which may be missing.

    Raises LowkvError for what is not read, naming it, and where the two say different things.
    """
    said = [config for config in (_from_config(quantization), _from_file(beside)) if config is not None]
    assert said
    for key in ("quant_algo", "kv", "exclude"):
        values = [config[key] for config in said if config[key] is not None]
        if len(said) == 2 and said[0][key] != said[1][key] and not (key == "exclude" and len(values) < 2):
            raise contradiction(
                f"config.json and {HF_QUANT_CONFIG} have another {_WORDS[key]}", said[1][key], said[0][key]
            )
    merged = {key: next((c[key] for c in said if c[key] is not None), None) for key in said[0]}
    found = _layout(merged)
    excluded = tuple(merged["exclude"] or ())

    def layout(linear: str) -> Layout | None:
        return None if any(_matches(pattern, linear) for pattern in excluded) else found

    return Scheme(
        library=f"{_NAME} {merged['version']}" if merged["version"] else _NAME,
        layout=layout,
        kv=_kv_scheme(merged["kv"]),
        files=() if beside is None else (HF_QUANT_CONFIG,),
    )


_WORDS = {"quant_algo": "quant_algo", "kv": "KV cache scheme", "exclude": "list of excluded modules"}


def _from_config(quantization: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if quantization is None:
        return None
    kv = quantization.get("kv_cache_scheme")
    if isinstance(kv, dict):
        plain = kv.get("num_bits", 8) == 8 and kv.get("type", "float") == "float" and not kv.get("dynamic")
        kv = "FP8" if plain else str(kv)
    return {
        "quant_algo": quantization.get("quant_algo"),
        "kv": kv,
        "exclude": _names(quantization.get("ignore")),
        "group_size": quantization.get("group_size"),
        "zero_points": None,
        "version": section(quantization, "producer", _NAME).get("version"),
    }


def _from_file(beside: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if beside is None:
        return None
    inner = section(beside, "quantization", _NAME)
    return {
        "quant_algo": inner.get("quant_algo"),
        "kv": inner.get("kv_cache_quant_algo"),
        "exclude": _names(inner.get("exclude_modules")),
        "group_size": inner.get("group_size"),
        "zero_points": inner.get("has_zero_point"),
        "version": section(beside, "producer", _NAME).get("version"),
    }


def _names(value: Any) -> list[str] | None:
    return sorted(map(str, value)) if value else None


def _layout(config: Mapping[str, Any]) -> Layout | None:
    algorithm = config["quant_algo"]
    if algorithm is None:
        return None
    if algorithm == "FP8":
        return Float8(per_output=False, static_inputs=True)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return Float8(per_output=True, static_inputs=False)
    if algorithm == "W4A16_AWQ":
        if config["zero_points"]:
            raise refuse(_NAME, "INT4 weights with zero points")
        size = 128 if config["group_size"] is None else config["group_size"]
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise refuse(_NAME, "a group size that is none", size)
        return ModelOptInt4(size)
    raise refuse(_NAME, f"weights in {algorithm}", f"quant_algo {algorithm}")


def _kv_scheme(name: Any) -> KVScheme | None:
    if name is None:
        return None
    codec = {"FP8": "e4m3"}.get(str(name))
    if codec is None:
        raise refuse(_NAME, f"keys and values in {name}", f"KV cache scheme {name}")
    return KVScheme(codec, f"KV cache scheme {name}", optional=True)


def _matches(pattern: str, linear: str) -> bool:
    return fnmatchcase(linear, pattern) or linear.startswith(f"{pattern}.")
