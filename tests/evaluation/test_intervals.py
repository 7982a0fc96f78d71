"""Intervals against published numbers, against each other, and where nothing varies."""

from __future__ import annotations

import numpy as np
import pytest

from lowkv.evaluation.intervals import Interval, exponential, of_blocks, of_items, paired_difference, share


def blocks(values: np.ndarray, size: int) -> Interval:
    edges = range(0, len(values), size)
    return of_blocks(np.add.reduceat(values, edges), np.add.reduceat(np.ones_like(values), edges))


def test_a_mean_over_blocks() -> None:
    values = np.random.default_rng(2).normal(3.0, 1.0, 4096)
    interval = blocks(values, 64)
    assert interval == blocks(values, 64)  # the same every time
    assert interval.value == pytest.approx(values.mean())
    half = 1.96 / values.size**0.5
    assert interval.high - interval.low == pytest.approx(2 * half, rel=0.3)


def test_values_that_go_together_count_once() -> None:
    values = np.random.default_rng(2).normal(3.0, 1.0, 128)
    together = blocks(np.repeat(values, 32), 64)
    apart = blocks(np.random.default_rng(2).normal(3.0, 1.0, 4096), 64)
    assert together.high - together.low > 3 * (apart.high - apart.low)


def test_blocks_of_unequal_size_weigh_by_their_values() -> None:
    assert of_blocks(np.array([64.0, 0.0]), np.array([64.0, 36.0])).value == 0.64


def test_nothing_varies() -> None:
    assert blocks(np.ones(140), 64) == Interval(1, 1, 1)
    assert of_items(np.full(8, 64.0), np.median) == Interval(64, 64, 64)


def test_items() -> None:
    values = np.array([64.0, 3, 64, 17, 64, 9, 64, 64])
    interval = of_items(values, np.median)
    assert interval.value == 64
    assert interval.low < 40
    assert interval.high == 64


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), table I: method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_newcombes_numbers(successes: int, count: int, low: float, high: float) -> None:
    interval = share(successes, count)
    assert interval.value == successes / count
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_all_of_a_few_is_not_certain() -> None:
    interval = share(10, 10)
    assert interval.value == interval.high == 1
    assert interval.low == pytest.approx(0.7225, abs=1e-4)


def test_pairs() -> None:
    same = paired_difference(0, 0, 30)
    assert same.value == 0
    assert same.low == -same.high < -0.05  # thirty that agree do not show that all would
    # By hand: g = 2/32, l = 11/32; g - l = -9/32; half = 1.96 * sqrt((13/32 - (9/32)^2) / 32)
    lost = paired_difference(1, 10, 30)
    half = 1.959964 * ((13 / 32 - (9 / 32) ** 2) / 32) ** 0.5
    assert lost.value == pytest.approx(-0.3)
    assert (lost.low, lost.high) == pytest.approx((-9 / 32 - half, -9 / 32 + half))
    assert lost.high < 0


def test_exponential_and_text() -> None:
    found = exponential(Interval(0.0, -1.0, 1.0))
    assert (found.value, found.low, found.high) == pytest.approx((1, np.exp(-1), np.exp(1)))
    assert str(Interval(0.5, 0.25, 0.75)) == "0.5000 [0.2500, 0.7500]"
    assert Interval.from_mapping({"value": 1, "low": 0, "high": 2}) == Interval(1, 0, 2)
