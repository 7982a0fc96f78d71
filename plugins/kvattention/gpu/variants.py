"""Which kernels there are: each with its arguments, its compile-time constants, and how it is compiled.

A variant is one compiled kernel. Codecs, head_dim and group_size are compile-time constants; KV heads, GQA, windows,
scales and offsets are run-time arguments, so that a model needs a handful of variants. This module compiles nothing and
imports no Triton: the TensorRT plugin reads it where Triton is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from kvattention.codec import CODECS
from kvattention.gpu.schedule import NARROW, WIDE, group_heads, narrow_rows, next_power_of_2, wide_rows
from kvattention.layout import LayerSpec

Kernel = Literal["append", "attend", "merge", "seal", "move"]
Argument = tuple[str, str]

SMS = (80, 86, 89, 90, 120)
"""NVIDIA architectures that every variant is compiled for: A100, A10 and RTX 30, L4 and RTX 40, H100, RTX 50."""

MOVE_WORDS = 4096
"""Words that one program of `move` copies."""

_ELEMENT = {"f16": "*fp16", "bf16": "*bf16"}


@dataclass(frozen=True)
class Variant:
    """One kernel to compile; what a kernel does not depend on stays at its default."""

    kernel: Kernel
    hot: str = ""
    k: str = ""
    v: str = ""
    head_dim: int = 0
    group_size: int = 0
    rows: int = 0
    """attend: query rows of a tile; merge: rows of a token, at least gqa."""
    fp8_query: bool = False
    """attend of e4m3 only: quantize queries and weights too, and multiply on FP8 tensor cores."""

    @cached_property
    def name(self) -> str:
        """Unique, and fit for a file's name: ``attend-f16-int4-int2-d128-g32-m16``."""
        numbers = (("d", self.head_dim), ("g", self.group_size), ("m", self.rows))
        parts = [self.kernel, self.hot, self.k, self.v, *(f"{letter}{n}" for letter, n in numbers if n)]
        return "-".join([part for part in parts if part] + ["q8"] * self.fp8_query)

    @property
    def min_sm(self) -> int:
        """First architecture that can run it: FP8 tensor cores came with 8.9."""
        return 89 if self.fp8_query else 80

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """(name, Triton type) of the run-time arguments, in order."""
        hot = _ELEMENT.get(self.hot, "")
        if self.kernel == "attend":
            return (
                ("q", hot),
                ("k", hot),
                ("v", hot),
                ("out", hot),
                ("arena", "*i64"),
                ("scales", "*fp32"),
                ("sequences", "*i32"),
                ("table", "*i32"),
                ("items", "*i32"),
                ("workspace", "*fp32"),
                ("gqa", "i32"),
                ("kv_heads", "i32"),
                ("q_row", "i32"),
                ("k_row", "i32"),
                ("v_row", "i32"),
                ("table_row", "i32"),
                ("partial_rows", "i32"),
                ("window", "i32"),
                ("hot_offset", "i32"),
                ("cold_offset", "i32"),
                ("softmax_scale", "fp32"),
            )
        if self.kernel == "append":
            return (
                ("k", hot),
                ("v", hot),
                ("arena", "*i64"),
                ("scales", "*fp32"),
                ("sequences", "*i32"),
                ("table", "*i32"),
                ("items", "*i32"),
                ("kv_heads", "i32"),
                ("k_row", "i32"),
                ("v_row", "i32"),
                ("table_row", "i32"),
                ("hot_offset", "i32"),
                ("cold_offset", "i32"),
            )
        if self.kernel == "merge":
            return (
                ("workspace", "*fp32"),
                ("out", hot),
                ("items", "*i32"),
                ("gqa", "i32"),
                ("kv_heads", "i32"),
                ("partial_rows", "i32"),
            )
        if self.kernel == "seal":
            return (
                ("arena", "*i64"),
                ("pairs", "*i32"),
                ("layers", "*i32"),
                ("scales", "*fp32"),
                ("kv_heads", "i32"),
            )
        return ("arena", "*i64"), ("moves", "*i32"), ("words", "i32")

    @cached_property
    def constants(self) -> dict[str, bool | int | str]:
        """Compile-time arguments by name; they follow `arguments` in the kernel's signature."""
        if self.kernel == "attend":
            return {
                "K_CODEC": self.k,
                "V_CODEC": self.v,
                "HEAD_DIM": self.head_dim,
                "BLOCK_D": self.block_d,
                "GROUP": self.group_size,
                "BLOCKS": self.blocks,
                "OWN": min(self._keys, self.rows),
                "ROWS": self.rows,
                "FP8_QUERY": self.fp8_query,
            }
        if self.kernel == "append":
            return {
                "K_CODEC": self.k,
                "V_CODEC": self.v,
                "HEAD_DIM": self.head_dim,
                "GROUP": self.group_size,
                "CHANNELS": self.channels,
            }
        if self.kernel == "merge":
            return {"HEAD_DIM": self.head_dim, "BLOCK_D": self.block_d, "ROWS": self.rows}
        if self.kernel == "seal":
            return {
                "HOT": self.hot,
                "HEAD_DIM": self.head_dim,
                "GROUP": self.group_size,
                "CHANNELS": self.channels,
            }
        return {"WORDS": MOVE_WORDS}

    @property
    def block_d(self) -> int:
        """Channels of a tile: head_dim, padded to a power of two."""
        return next_power_of_2(self.head_dim)

    @property
    def blocks(self) -> int:
        """attend: blocks per iteration."""
        return max(1, self._keys // self.group_size)

    @property
    def _keys(self) -> int:
        """attend: keys per iteration, where blocks are not longer."""
        return 64 if self.block_d <= 128 else 32

    @property
    def channels(self) -> int:
        """append, seal: channels that one program encodes. At most 4096 values, to stay in registers."""
        return min(self.block_d, 32 if self.group_size == 128 else 64)

    @property
    def num_warps(self) -> int:
        """Enough for the tiles to stay in registers on every architecture; the static check compiles and looks."""
        return 8 if self.kernel == "append" or self.rows * self.block_d > 4096 else 4

    @property
    def num_stages(self) -> int:
        """attend: iterations in flight, where tiles are small enough for registers and shared memory (99 KiB)."""
        if self.kernel != "attend" or self.rows * self.block_d > 4096 or (self.fp8_query and self.block_d > 128):
            return 1
        return 2 if self.blocks * self.group_size * self.block_d <= 64 * 128 else 1


@lru_cache(maxsize=1024)
def _variants(
    hot: str, k: str, v: str, head_dim: int, group_size: int, gqa: int, fp8_query: bool
) -> tuple[Variant, Variant, Variant, Variant]:
    readers = CODECS[k].reader.name, CODECS[v].reader.name
    narrow, wide = (
        Variant("attend", hot, *readers, head_dim, group_size, rows, fp8_query and k == v == "e4m3")
        for rows in (narrow_rows(gqa), wide_rows(gqa))
    )
    append = Variant("append", hot, k, v, head_dim, group_size)
    return append, narrow, wide, Variant("merge", hot, head_dim=head_dim, rows=narrow_rows(gqa))


def layer_variants(layer: LayerSpec, heads: int, fp8_query: bool = False) -> tuple[Variant, Variant, Variant, Variant]:
    """(append, attend narrow, attend wide, merge) of a layer.

    Raises ValueError for query heads that are not a multiple of the KV heads.
    """
    gqa = group_heads(heads, layer.kv_heads)
    k, v = layer.cold.k.name, layer.cold.v.name
    return _variants(layer.hot.k.name, k, v, layer.head_dim, layer.group_size, gqa, fp8_query)


@lru_cache(maxsize=64)
def seal_variant(hot: str, head_dim: int, group_size: int) -> Variant:
    return Variant("seal", hot, head_dim=head_dim, group_size=group_size)


MOVE = Variant("move")


def needed(layers: Sequence[LayerSpec], heads: int, fp8_query: bool = False) -> tuple[Variant, ...]:
    """Every kernel that an engine of these layers launches, each once."""
    found: dict[Variant, None] = {}
    for layer in layers:
        found.update(dict.fromkeys(layer_variants(layer, heads, fp8_query)))
        found[seal_variant(layer.hot.k.name, layer.head_dim, layer.group_size)] = None
    found[MOVE] = None
    return tuple(found)


_COLD = (
    *(("e4m3", "e4m3"), ("e5m2", "e5m2"), ("int8", "int8")),
    *(("int4", "int4"), ("int2", "int2"), ("int4", "int2")),
)
"""(K, V) of the listed cold records that `attend` tells apart."""


def _listed() -> Iterator[Variant]:
    for hot in ("f16", "bf16"):
        for head_dim in (64, 128, 256):
            yield Variant("append", hot, "int2c", "int2", head_dim, 32)
            for k, v in ((hot, hot), *_COLD):
                yield Variant("append", hot, k, v, head_dim, 32)
                for rows in (NARROW, WIDE) if head_dim < 256 else (NARROW,):
                    yield Variant("attend", hot, k, v, head_dim, 32, rows)
                    if k == "e4m3":
                        yield Variant("attend", hot, k, v, head_dim, 32, rows, fp8_query=True)
            yield Variant("merge", hot, head_dim=head_dim, rows=NARROW)
            yield Variant("seal", hot, head_dim=head_dim, group_size=32)
    yield MOVE


VARIANTS = tuple(_listed())
"""The listed set that the static check compiles. Other shapes work as well; an engine compiles what it `needed`."""
