"""AutoAWQ: `quant_method: awq`, version `gemm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowkv.models.imports.layouts import AwqGemm
from lowkv.models.imports.scheme import Layout, Scheme, refuse

_NAME = "AWQ"


def awq_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config`. Raises LowkvError for what is not read, naming it."""
    bits = quantization.get("bits", quantization.get("w_bit"))
    version = str(quantization.get("version", "gemm")).lower()
    if bits != 4:
        raise refuse(_NAME, f"{bits}-bit weights")
    if version != "gemm":
        raise refuse(_NAME, f"weights in version {version}", fix="save it again with version GEMM")
    if not quantization.get("zero_point", True):
        raise refuse(_NAME, "weights without zero points", "zero_point false")
    size = quantization.get("group_size", quantization.get("q_group_size"))
    kept = tuple(quantization.get("modules_to_not_convert") or ())

    def layout(linear: str) -> Layout | None:
        # The library looks for these names anywhere in a module's; lm_head is never quantized by it.
        return None if linear == "lm_head" or any(name in linear for name in kept) else found

    found = AwqGemm(group_size(size, _NAME))
    return Scheme(library="AWQ (gemm)", layout=layout, kv=None)


def group_size(size: Any, library: str) -> int | None:
    """A config's group size, None for one group. Raises LowkvError for what is no size."""
    if size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise refuse(library, "a group size that is none", size)
    return size
