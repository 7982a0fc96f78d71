"""The table of KV formats. Planner, arena, kernels, reports and tests iterate over it.

A format names two block codecs (K's and V's) and the rules that go with them by default: how many of the
newest tokens stay in model precision (the residual) and how many of the first (the sink). The byte layout
of a codec is `kvattention.codec`'s business; this table only says which codecs a name means.

Adding a format: a row here, its codecs in `kvattention`, a case in its case table, a line in the docs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvattention import CODECS, Codec
from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class KVFormat:
    """One row of the table.

    `residual_length` and `sink_tokens` are the defaults a recipe gets when it says nothing; they follow
    KIVI (arXiv 2402.02750, R = 128) and the attention-sink results quoted in docs/quality.md.
    """

    name: str
    k: Codec
    v: Codec
    residual_length: int
    sink_tokens: int
    summary: str
    rotate_values: bool = False
    """Whether values are stored in a rotated basis: the engine's weights are built so that the model computes them
    in it and its outputs are rotated back; nothing that reads or writes the cache knows. Outliers of single channels
    spread over the head, and less is lost to 2 bits (docs/kv-cache.md)."""

    @property
    def model_precision(self) -> bool:
        """True when the format stores what the model computed, so that its blocks are never sealed."""
        return self.k.hot and self.v.hot

    @property
    def needs_scales(self) -> bool:
        """True when dequantization needs static scales from outside the block."""
        return self.k.scaled or self.v.scaled


def _row(
    name: str, k: str, v: str, residual_length: int, sink_tokens: int, summary: str, rotate_values: bool = False
) -> KVFormat:
    return KVFormat(name, CODECS[k], CODECS[v], residual_length, sink_tokens, summary, rotate_values)


FORMATS: Mapping[str, KVFormat] = MappingProxyType(
    {
        row.name: row
        for row in (
            _row("fp16", "f16", "f16", 0, 0, "IEEE half precision, the baseline"),
            _row("bf16", "bf16", "bf16", 0, 0, "bfloat16, the baseline of bf16 models"),
            _row("fp8", "e4m3", "e4m3", 0, 0, "E4M3 with static scales"),
            _row("fp8_e5m2", "e5m2", "e5m2", 0, 0, "E5M2 with static scales: more range than E4M3, less precision"),
            _row("int8", "int8", "int8", 0, 0, "8-bit integers with static scales"),
            _row("kivi4", "int4", "int4", 128, 32, "KIVI 4 bit: K per channel, V per token"),
            _row("k4v2", "int4", "int2", 128, 32, "KIVI with K at 4 bit and V at 2 bit"),
            _row("k4v2plus", "int4", "int2", 128, 32, "k4v2, V rotated", rotate_values=True),
            _row("kivi2", "int2", "int2", 128, 32, "KIVI 2 bit: K per channel, V per token"),
            _row("kivi2plus", "int2c", "int2", 128, 32, "kivi2, K's ranges narrowed, V rotated", rotate_values=True),
        )
    }
)


AUTO = "auto"
"""What a recipe writes for a format that the build is to choose (`lowkv.calibration.auto`)."""


def kv_format(name: str) -> KVFormat:
    """The row called `name`. Raises `LowkvError` naming the known formats."""
    try:
        return FORMATS[name]
    except KeyError:
        raise LowkvError(
            f"unknown KV format {name!r}", got=name, expected=" | ".join(FORMATS), fix="choose one of these"
        ) from None
