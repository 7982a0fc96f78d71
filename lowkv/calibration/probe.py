"""What a model's keys and values look like: the decoder run over tokens, and statistics of K (after RoPE) and V.

The tokens are cut into windows, each a sequence of its own under plain causal attention, and only counts and maxima
outlive a window: memory does not grow with the text. Nothing of the KV cache is involved, so that the figures are
those of the exact keys and values.

K is rotated by its position, and a channel that is small at one position can be large at another. Windows therefore
start at positions spread over the whole range that will be served; attention only sees differences of positions, so
the model computes the same. A text's first token is an exception: it stands at position 0 always and is often unlike
all others, so windows that start elsewhere leave it (and the BOS token) out of the statistics.

Magnitudes are counted in bins of equal ratio, 2^(1/32), in which percentiles and rounding errors can be looked up
later for any codec (`estimate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from lowkv.models.dense import DenseAttention

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.models.config import ModelConfig
    from lowkv.models.decoder import Decoder

WINDOW = 512
"""Tokens of a window, and of one call of the decoder."""

PER_OCTAVE = 32
LOWEST, HIGHEST = -24, 16
"""Bins cover 2^LOWEST to 2^HIGHEST; what lies outside is counted in the first or the last."""
BINS = (HIGHEST - LOWEST) * PER_OCTAVE


@dataclass(frozen=True, eq=False)
class Magnitudes:
    """Magnitudes of one layer's K, or V."""

    amax: NDArray[np.float32]  # [Hkv, D]
    counts: NDArray[np.int64] | None
    """Values per bin: K's [Hkv, D, BINS], V's [Hkv, 1, BINS]; None when nobody asked for them."""

    @property
    def largest(self) -> float:
        return float(self.amax.max())

    @property
    def outlier(self) -> float:
        """How far a channel stands out: its amax over that of its head's median channel, the largest of all.

        About 2 to 4 where no channel is special; 1 for a head of zeros.
        """
        median = np.median(self.amax, axis=1)
        ratio = np.divide(self.amax.max(axis=1), median, out=np.ones_like(median), where=median > 0)
        return float(ratio.max())


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """One layer's."""

    k: Magnitudes
    v: Magnitudes


def collect(
    decoder: Decoder,
    windows: Sequence[NDArray[np.int64]],
    *,
    length: int,
    skip: int = 1,
    histograms: bool = True,
    advance: Callable[[int], None] = lambda tokens: None,
) -> tuple[LayerStatistics, ...]:
    """Statistics of every layer over the windows, the same for the same input.

    Args:
        decoder: on the CPU.
        windows: token ids; at most `length` in each.
        length: positions that are served; windows start between 0 and the last where they fit.
        skip: first tokens of a window that count at position 0 only: 1, and a BOS token's.
        histograms: count magnitudes too, not only their maxima.
        advance: told of tokens done.
    """
    tallies = [_Tally.empty(decoder.config, histograms) for _ in range(decoder.config.layers)]
    last = max(0, length - max(len(window) for window in windows))
    starts = np.linspace(0, last, len(windows)).round().astype(np.int64)
    for window, start in zip(windows, starts, strict=True):
        _run(decoder, window, int(start), skip if start else 0, tallies)
        advance(len(window))
    return tuple(tally.statistics() for tally in tallies)


def _run(decoder: Decoder, window: NDArray[np.int64], start: int, skip: int, tallies: Sequence[_Tally]) -> None:
    dense = DenseAttention(decoder.config)
    dense.begin_step([(0, len(window))])

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tallies[layer].add(k[skip:], v[skip:])
        return dense(layer, q, k, v)

    tokens = torch.from_numpy(window)
    with torch.inference_mode():
        decoder.hidden(tokens, torch.arange(start, start + len(window)), attention)


@dataclass(eq=False)
class _Tally:
    """Maxima and counts of a layer so far."""

    k_amax: Tensor  # [Hkv, D]
    v_amax: Tensor
    k_counts: Tensor | None  # [Hkv, D, BINS]
    v_counts: Tensor | None  # [Hkv, 1, BINS]

    @classmethod
    def empty(cls, config: ModelConfig, histograms: bool) -> _Tally:
        heads, size = config.kv_heads, config.head_dim
        k_counts = torch.zeros((heads, size, BINS), dtype=torch.int32) if histograms else None
        v_counts = torch.zeros((heads, 1, BINS), dtype=torch.int32) if histograms else None
        return cls(torch.zeros(heads, size), torch.zeros(heads, size), k_counts, v_counts)

    def add(self, k: Tensor, v: Tensor) -> None:
        """k, v [T, Hkv, D]."""
        if not len(k):
            return
        for x, amax, counts in ((k, self.k_amax, self.k_counts), (v, self.v_amax, self.v_counts)):
            magnitude = x.float().abs()
            torch.maximum(amax, magnitude.amax(0), out=amax)
            if counts is not None:
                counts += _binned(magnitude, counts.shape[1])

    def statistics(self) -> LayerStatistics:
        def made(amax: Tensor, counts: Tensor | None) -> Magnitudes:
            return Magnitudes(amax.numpy(), None if counts is None else counts.numpy().astype(np.int64))

        return LayerStatistics(made(self.k_amax, self.k_counts), made(self.v_amax, self.v_counts))


def _binned(magnitude: Tensor, columns: int) -> Tensor:
    """Values per bin, [Hkv, columns, BINS]; columns is D, or 1 for all channels of a head together."""
    heads, size = magnitude.shape[1:]
    bins = ((magnitude.log2() - LOWEST) * PER_OCTAVE).clamp_(0, BINS - 1).long()  # zeros go to the first
    rows = torch.arange(heads * columns).reshape(heads, columns).expand(heads, size)
    flat = (rows * BINS + bins).flatten()
    return torch.bincount(flat, minlength=heads * columns * BINS).reshape(heads, columns, BINS).to(torch.int32)
