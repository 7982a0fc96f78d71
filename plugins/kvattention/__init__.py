"""Paged attention over a mixed-precision KV cache; knows nothing of lowkv and can be used alone.

`select` is the one place where an implementation is chosen:

    attention = kvattention.select("cpu")
    out = attention.paged_attention(q, k, v, arena, batch, layer)   # appends, then attends
    attention.seal(arena, pairs, layers)                            # hot blocks -> cold blocks
    attention.move(arena, moves, words)                             # compaction

Arrays are the implementation's own: NumPy float32 for "cpu" and "reference", Torch tensors on CUDA in the hot dtype for
"gpu" (`kvattention.gpu`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvattention.batch import RaggedBatch
from kvattention.codec import CODECS, Codec
from kvattention.layout import GROUP_SIZES, UNIT_WORDS, LayerSpec, RecordLayout, arena_words

__all__ = [
    "CODECS",
    "GPU_IMPLEMENTATIONS",
    "GROUP_SIZES",
    "IMPLEMENTATIONS",
    "UNIT_WORDS",
    "Array",
    "Attention",
    "Codec",
    "LayerSpec",
    "RaggedBatch",
    "RecordLayout",
    "arena_words",
    "select",
]

IMPLEMENTATIONS = ("cpu", "reference")
"""Those that run anywhere, on NumPy arrays."""

GPU_IMPLEMENTATIONS = ("gpu",)
"""Those that need an NVIDIA GPU."""

Array = Any
"""An array of the implementation's own kind."""


class Attention(Protocol):
    """What every implementation offers. Offsets are in 64-byte units, arrays C-contiguous unless said otherwise."""

    name: str

    def allocate(self, words: int) -> Array:
        """A zeroed int32 arena of ``words`` words, 64-byte aligned, in the implementation's memory."""

    def paged_attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        arena: Array,
        batch: RaggedBatch,
        layer: LayerSpec,
        out: Array | None = None,
    ) -> Array:
        """Append k, v ``[T, Hkv, D]`` to the arena and attend with q ``[T, Hq, D]``; returns ``[T, Hq, D]``.

        k and v are first rounded to the hot dtype. Queries see the stored history as stored, and their own step's
        tokens at hot precision, even those written straight to cold blocks. Causal, with the layer's window.
        """

    def seal(self, arena: Array, pairs: NDArray[np.int32], layers: Sequence[LayerSpec]) -> None:
        """Encode all layers of whole hot blocks into cold blocks; pairs ``[P, 2]`` of (hot, cold) offsets."""

    def move(self, arena: Array, moves: NDArray[np.int32], words: int) -> None:
        """Copy blocks of ``words`` words; moves ``[P, 2]`` of (from, to) offsets, none overlapping another."""


def select(name: str = "cpu", *, threads: int | None = None) -> Attention:
    """The implementation called ``name``; ``threads`` (None: all cores) matters to "cpu" only.

    Raises ValueError for an unknown name.
    """
    if name == "cpu":
        from kvattention.cpu import CpuAttention

        return CpuAttention(threads)
    if name == "reference":
        from kvattention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "gpu":
        from kvattention.gpu.attention import GpuAttention
        from kvattention.gpu.torch_device import TorchDevice

        return GpuAttention(TorchDevice())
    raise ValueError(
        f"attention implementation {name!r} is not known; use one of {IMPLEMENTATIONS + GPU_IMPLEMENTATIONS}"
    )
