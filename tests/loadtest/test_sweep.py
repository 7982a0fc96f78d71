from __future__ import annotations

import pytest

from lowkv.loadtest.sweep import Knee, Ladder, knee


def climb(ladder: Ladder, true_knee: int) -> list[int]:
    """The levels measured on a server that keeps the SLO up to `true_knee` users."""
    verdicts: dict[int, bool] = {}
    while (level := ladder.next_level(verdicts)) is not None:
        assert level not in verdicts
        verdicts[level] = level <= true_knee
    return list(verdicts)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({}, Knee(0, None)),
        ({1: True, 2: True, 4: False}, Knee(2, 4)),
        ({1: False}, Knee(0, 1)),
        ({4: True, 8: False, 16: True}, Knee(4, 8)),  # a pass above a miss counts for nothing
        ({4: True, 8: True}, Knee(8, None)),
    ],
)
def test_knee(verdicts: dict[int, bool], expected: Knee) -> None:
    assert knee(verdicts) == expected


def test_a_coarse_ladder_is_bisected_to_the_exact_knee() -> None:
    ladder = Ladder((1, 2, 4, 8, 16), saturation=32, probes=9)
    for true_knee in range(33):
        measured = climb(ladder, true_knee)
        assert knee({level: level <= true_knee for level in measured}).passed == true_knee
        assert measured[-1] == 32 or true_knee >= 16
        assert len(measured) <= 5 + 1 + 4


def test_the_search_starts_at_the_predicted_capacity() -> None:
    assert climb(Ladder((2,), saturation=13, capacity=4), true_knee=4) == [2, 4, 5, 13]
    assert climb(Ladder((2,), saturation=13, capacity=4), true_knee=5) == [2, 4, 5, 6, 13]
    assert climb(Ladder((2,), saturation=13, capacity=10), true_knee=10) == [2, 10, 11, 13]


def test_a_capacity_that_misses_is_searched_below() -> None:
    assert climb(Ladder((2,), saturation=13, capacity=10, probes=9), true_knee=6) == [2, 10, 9, 7, 4, 5, 6, 13]


def test_probes_are_bounded_and_saturation_is_always_measured() -> None:
    measured = climb(Ladder((2,), saturation=64, capacity=32, probes=1), true_knee=3)
    assert measured == [2, 32, 31, 64]
    assert climb(Ladder((2, 4), saturation=8), true_knee=0) == [2, 1, 8]


def test_a_capacity_at_or_beyond_saturation() -> None:
    assert climb(Ladder((2,), saturation=8, capacity=8), true_knee=99) == [2, 8]
    assert climb(Ladder((2,), saturation=8, capacity=20), true_knee=99) == [2, 8]
