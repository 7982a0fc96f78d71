"""An estimate and how far it may be off: the confidence intervals of every measure, all at 95%.

Everything here is arithmetic on outcomes: nothing is drawn differently the second time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
BOOTSTRAP_BLOCK = 64  # consecutive positions of a text resampled together
ROUNDS = 2000
_Z = 1.959963984540054  # the standard normal's 97.5% quantile

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"

    @classmethod
    def from_mapping(cls, plain: dict[str, Any]) -> Interval:
        """Inverse of `dataclasses.asdict`."""
        return cls(plain["value"], plain["low"], plain["high"])


def exponential(interval: Interval) -> Interval:
    """exp of an estimate and of its bounds."""
    return Interval(math.exp(interval.value), math.exp(interval.low), math.exp(interval.high))


def of_blocks(sums: Floats, sizes: Floats) -> Interval:
    """Mean over values that come in blocks whose members are not independent of each other.

    Mean = sum(sums) / sum(sizes). The interval is a block bootstrap's: whole blocks are drawn with replacement, and
    the quantiles of `ROUNDS` such means taken.

    Args:
        sums: [B] sum of the values of each block.
        sizes: [B] how many those are.
    """
    drawn = _draws(len(sums))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return _quantiles(float(sums.sum() / sizes.sum()), means)


def block_sums(values: Floats) -> Floats:
    """[..., positions] -> [..., B]: sums over blocks of BOOTSTRAP_BLOCK positions, the last one shorter."""
    sums: Floats = np.add.reduceat(values, range(0, values.shape[-1], BOOTSTRAP_BLOCK), axis=-1)
    return sums


def block_sizes(positions: int) -> Floats:
    """How many positions those blocks have, [B]."""
    return block_sums(np.ones(positions))


def of_items(values: Floats, statistic: Callable[..., Any]) -> Interval:
    """`statistic` (called with `axis=`) over independent items; the interval from a bootstrap over the items.

    Args:
        values: [N], one of each item.
        statistic: `numpy.mean` or `numpy.median`.
    """
    return _quantiles(float(statistic(values, axis=-1)), statistic(values[_draws(len(values))], axis=-1))


def share(successes: int, count: int) -> Interval:
    """Share of `count` trials that succeeded, with Wilson's interval (1927).

    centre = (p + z^2 / 2n) / (1 + z^2 / n), half width = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2).
    Unlike p +- z * sqrt(p (1 - p) / n), it does not collapse where all of a few trials succeed, or none.
    """
    p, z2n = successes / count, _Z**2 / count
    centre = (p + z2n / 2) / (1 + z2n)
    half = _Z / (1 + z2n) * math.sqrt(p * (1 - p) / count + z2n / (4 * count))
    # At both ends the bound is the estimate itself; rounding must not put it on the wrong side.
    return Interval(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def paired_difference(gained: int, lost: int, count: int) -> Interval:
    """Difference of two shares on the same `count` trials, with the interval of Bonett and Price (2012).

    `gained` trials succeeded here only, `lost` there only; difference = (gained - lost) / n. The interval is Wald's
    after one success more for either side: with g = (gained + 1) / (n + 2) and l likewise,
    g - l +- z * sqrt((g + l - (g - l)^2) / (n + 2)). It has a width where nothing differed, as it must: a few
    trials that agree do not show that all would.
    """
    value = (gained - lost) / count
    g, l = (gained + 1) / (count + 2), (lost + 1) / (count + 2)  # noqa: E741
    half = _Z * math.sqrt((g + l - (g - l) ** 2) / (count + 2))
    return Interval(value, min(value, max(-1.0, g - l - half)), max(value, min(1.0, g - l + half)))


def _draws(count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, count, (ROUNDS, count))


def _quantiles(value: float, drawn: Floats) -> Interval:
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(value, float(low), float(high))
