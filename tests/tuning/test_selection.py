"""The knapsack against trying everything, and the plan that nobody measured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lowkv.tuning.selection import cheapest, interleaved


@pytest.mark.parametrize("seed", range(40))
def test_cheapest_is_what_trying_everything_finds(seed: int) -> None:
    random = np.random.default_rng(seed)
    layers, items = int(random.integers(1, 6)), int(random.integers(1, 5))
    sizes = random.integers(1, 12, (layers, items)).tolist()
    costs = (random.integers(-2, 20, (layers, items)) / 4).tolist()  # measured costs may be negative, and equal
    smallest, largest = sum(map(min, sizes)), sum(map(max, sizes))
    for budget in range(smallest, largest + 2):
        every = [
            (
                sum(costs[layer][item] for layer, item in enumerate(choice)),
                sum(sizes[layer][item] for layer, item in enumerate(choice)),
            )
            for choice in itertools.product(range(items), repeat=layers)
        ]
        best = min(one for one in every if one[1] <= budget)
        found = cheapest(sizes, costs, budget)
        assert sum(costs[layer][item] for layer, item in enumerate(found)) == best[0]
        assert sum(sizes[layer][item] for layer, item in enumerate(found)) == best[1]


def test_a_budget_that_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="budget of 4 bytes"):
        cheapest([[3, 5], [2, 4]], [[0.0, 0.0], [0.0, 0.0]], 4)


def test_many_layers_and_sizes_are_no_matter() -> None:
    sizes = [[3840 + layer, 5120, 6400 + 3 * layer, 7680] for layer in range(40)]
    costs = [[1 / (layer + 1), 0.3 / (layer + 1), 0.1 / (layer + 1), 0.0] for layer in range(40)]
    found = cheapest(sizes, costs, 40 * 5000)
    assert sum(sizes[layer][item] for layer, item in enumerate(found)) <= 40 * 5000
    assert list(found) == sorted(found, reverse=True)  # the first layers lose most and get most


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([0, 0, 1, 1], (0, 1, 0, 1)),
        ([1, 1, 1, 0, 1, 1], (1, 1, 0, 1, 1, 1)),
        ([0, 0, 0, 0, 2, 2], (0, 2, 0, 0, 2, 0)),
        ([5], (5,)),
        ([4, 4], (4, 4)),
    ],
)
def test_interleaved_spreads_the_same_items(items: list[int], expected: tuple[int, ...]) -> None:
    found = interleaved(items)
    assert sorted(found) == sorted(items)
    assert found == expected
