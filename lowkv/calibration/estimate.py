"""From magnitudes to scales: which of them is to become a codec's largest value.

    amax         the largest: nothing saturates that was seen
    percentile   the 99.99th percentile: one value in ten thousand may
    mse          the one that loses least: saturation costs the few, a wider step all the others

`mse` needs no second pass over the model. Magnitudes and scales on the same logarithmic grid make the rounding error
of a bin depend on its distance to the scale alone, so that the error of every scale is a product of the histogram with
one table per codec.

A channel of which nothing but zeros was seen (Gemma has such) says nothing of its scale and takes that of its head, a
head that of its layer, a layer 1.0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvattention.codec import decode_plain, encode_plain
from lowkv.calibration.probe import BINS, LOWEST, PER_OCTAVE

if TYPE_CHECKING:
    from kvattention import Codec
    from lowkv.calibration.probe import Magnitudes
    from lowkv.calibration.scales import Granularity, Scales

PERCENTILE = 0.9999
_COARSER: dict[Granularity, Granularity] = {"channel": "head", "head": "tensor"}
_SMALLEST = 2.0**-100
"""Below this a magnitude is taken for 0: a scale must divide and multiply float32 numbers."""

_FINER, _WIDER = 3 * PER_OCTAVE, PER_OCTAVE
"""`mse` tries largest values from 3 octaves under the largest magnitude to 1 above."""
_DEPTH = 20 * PER_OCTAVE
"""Bins below the largest magnitude whose rounding counts; what is smaller has no part in a squared error."""
_POINTS = 16
"""Points of a bin at which a codec rounds."""


def k_scales(seen: Magnitudes, codec: Codec, granularity: Granularity, estimator: str) -> Scales:
    """Scales of K, float32 [Hkv, D]."""
    return (_tops(seen, codec, granularity, estimator) / codec.maximum).astype(np.float32)


def v_scales(seen: Magnitudes, codec: Codec, granularity: Granularity, estimator: str) -> Scales:
    """Scales of V, float32 [Hkv]: one a head at the finest."""
    coarse: Granularity = "head" if granularity == "channel" else granularity
    return (_tops(seen, codec, coarse, estimator)[:, 0] / codec.maximum).astype(np.float32)


def _tops(seen: Magnitudes, codec: Codec, granularity: Granularity, estimator: str) -> NDArray[np.float64]:
    """The magnitude that becomes the codec's largest value, [Hkv, D]; equal within the granularity."""
    heads, size = seen.amax.shape
    amax = seen.amax.astype(np.float64)
    counts = seen.counts
    if granularity == "tensor":
        amax = amax.max(keepdims=True)
    elif granularity == "head":
        amax = amax.max(axis=1, keepdims=True)
    if counts is not None and granularity != "channel":
        axes = (0, 1) if granularity == "tensor" else (1,)
        counts = counts.sum(axis=axes, keepdims=True)
    tops = np.broadcast_to(_rows(amax, counts, codec, estimator), (heads, size)).copy()
    unseen = np.broadcast_to(amax < _SMALLEST, (heads, size))
    if unseen.any():
        coarser = _COARSER.get(granularity)
        tops[unseen] = _tops(seen, codec, coarser, estimator)[unseen] if coarser else codec.maximum
    return tops


def _rows(
    amax: NDArray[np.float64], counts: NDArray[np.int64] | None, codec: Codec, estimator: str
) -> NDArray[np.float64]:
    if estimator == "amax":
        return amax
    assert counts is not None, f"estimator {estimator} needs histograms"
    table = counts.reshape(-1, BINS)
    if estimator == "percentile":
        return np.minimum(_percentile(table).reshape(amax.shape), amax)
    return np.minimum(_least_error(table, codec).reshape(amax.shape), 2 * amax)


def _percentile(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """[R, BINS] -> [R]: within its bin by interpolation."""
    below = counts.cumsum(axis=1)
    wanted = PERCENTILE * below[:, -1:]
    index = (below < wanted).sum(axis=1)[:, None]
    inside = np.take_along_axis(counts, index, 1)
    part = (wanted - (np.take_along_axis(below, index, 1) - inside)) / np.maximum(inside, 1)
    return _magnitude((index + part)[:, 0])


def _least_error(counts: NDArray[np.int64], codec: Codec) -> NDArray[np.float64]:
    """[R, BINS] -> [R]: the largest value whose codec loses the least, on the grid of the bins."""
    highest = BINS - 1 - (counts[:, ::-1] > 0).argmax(axis=1)  # [R]
    columns = highest[:, None] - np.arange(_DEPTH)
    near = np.where(columns >= 0, np.take_along_axis(counts, np.maximum(columns, 0), 1), 0)  # [R, DEPTH]
    best = (near @ _errors(codec)).argmin(axis=1)  # of _FINER + _WIDER + 1 largest values, the widest first
    return _magnitude(highest + 1 + _WIDER - best)


def _magnitude(bins: NDArray[Any]) -> NDArray[np.float64]:
    """Where a bin begins; fractions are inside it."""
    edges: NDArray[np.float64] = np.exp2(bins / PER_OCTAVE + LOWEST)
    return edges


@lru_cache
def _errors(codec: Codec) -> NDArray[np.float64]:
    """Squared error of a value, by its bin's distance below the highest and by the largest value, [DEPTH, choices].

    In units in which the highest bin ends at 1.
    """
    inside = (np.arange(_POINTS) + 0.5) / _POINTS
    x = np.exp2((inside - 1 - np.arange(_DEPTH)[:, None]) / PER_OCTAVE)  # [DEPTH, POINTS]
    columns = []
    for choice in range(_WIDER + _FINER + 1):
        scale = np.exp2((_WIDER - choice) / PER_OCTAVE) / codec.maximum
        lost = decode_plain(codec, encode_plain(codec, x / scale)) * scale - x
        columns.append((lost**2).mean(axis=1))
    return np.stack(columns, axis=1)
