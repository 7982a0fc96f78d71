"""Which library a folder's config says that its checkpoint comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowkv.errors import LowkvError
from lowkv.models.imports.autoawq import awq_scheme
from lowkv.models.imports.compressed_tensors import compressed_tensors_scheme
from lowkv.models.imports.gptq import gptq_scheme
from lowkv.models.imports.layouts import Float8
from lowkv.models.imports.modelopt import HF_QUANT_CONFIG, modelopt_scheme
from lowkv.models.imports.scheme import KVScheme, Layout, Scheme, contradiction, refuse

_BARE = "quantize_config.json"
"""Where AutoGPTQ put what later went into config.json."""


def find_scheme(folder: Path, raw: Mapping[str, Any], read: Any) -> Scheme | None:
    """The scheme of a checkpoint; None when its config says that it is not quantized.

    Args:
        folder: of the checkpoint.
        raw: its config.json.
        read: reads a JSON object from a path.

    Raises:
        LowkvError: the library, or something that it did, is not known, or two configs contradict each other.
    """
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    beside = read(folder / HF_QUANT_CONFIG) if (folder / HF_QUANT_CONFIG).is_file() else None
    if quantization is None and beside is None:
        if (folder / _BARE).is_file():
            return gptq_scheme(read(folder / _BARE))
        return None
    if quantization is not None and not isinstance(quantization, dict):
        raise LowkvError("the config's quantization_config is no mapping", got=quantization)
    method = "modelopt" if quantization is None else str(quantization.get("quant_method", "")).lower()
    if beside is not None and method != "modelopt":
        raise contradiction(
            f"config.json names {method or 'no library'}, {HF_QUANT_CONFIG} is ModelOpt's", method, "modelopt"
        )
    if method == "modelopt":
        return modelopt_scheme(quantization, beside)
    assert quantization is not None
    if method in _SCHEMES:
        return _SCHEMES[method](quantization)
    raise LowkvError(
        "the checkpoint was quantized in a way that lowkv does not read",
        got=f"quant_method {method or 'missing'}",
        expected=", ".join(["modelopt", *_SCHEMES]),
        fix="use the unquantized checkpoint",
    )


def _autofp8_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """AutoFP8's, llm-compressor's forerunner: where scales of keys and values have their old names."""
    if quantization.get("weight_block_size"):
        raise refuse("FP8", "weights in blocks", quantization["weight_block_size"])
    activations = quantization.get("activation_scheme")
    if activations not in ("static", "dynamic"):
        raise refuse("FP8", "inputs in a scheme", activations)
    kept = tuple(quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or ())
    found = Float8(per_output=False, static_inputs=activations == "static")

    def layout(linear: str) -> Layout | None:
        return None if linear == "lm_head" or linear in kept else found

    kv = quantization.get("kv_cache_scheme")
    if kv not in (None, "static"):
        raise refuse("FP8", "keys and values in a scheme", kv)
    scheme = None if kv is None else KVScheme("e4m3", "kv_cache_scheme static", optional=False)
    return Scheme(library="AutoFP8", layout=layout, kv=scheme)


_SCHEMES = {
    "compressed-tensors": compressed_tensors_scheme,
    "awq": awq_scheme,
    "gptq": gptq_scheme,
    "fp8": _autofp8_scheme,
}
