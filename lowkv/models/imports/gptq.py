"""GPTQ as AutoGPTQ and GPTQModel write it: `quant_method: gptq`, formats `gptq` and `gptq_v2`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lowkv.models.imports.autoawq import group_size
from lowkv.models.imports.layouts import Gptq
from lowkv.models.imports.scheme import Layout, Scheme, refuse, section

_NAME = "GPTQ"


def gptq_scheme(quantization: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config`. Raises LowkvError for what is not read, naming it."""
    if quantization.get("bits") != 4:
        raise refuse(_NAME, f"{quantization.get('bits')}-bit weights")
    version = quantization.get("checkpoint_format", quantization.get("format")) or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise refuse(_NAME, f"weights in format {version}", fix="save it again with format gptq")
    skipped = []
    for rule in section(quantization, "dynamic", _NAME):
        if not str(rule).startswith("-:"):
            raise refuse(_NAME, "settings of their own for some layers (dynamic)", rule)
        skipped.append(re.compile(str(rule)[2:]))
    lm_head = bool(quantization.get("lm_head", False))
    # Without `sym` nothing is promised of the zero points: they are read.
    found = Gptq(group_size(quantization.get("group_size"), _NAME), quantization.get("sym") is True, version == "gptq")

    def layout(linear: str) -> Layout | None:
        if (linear == "lm_head" and not lm_head) or any(rule.match(linear) for rule in skipped):
            return None
        return found

    return Scheme(library=f"{_NAME} ({version})", layout=layout, kv=None)
