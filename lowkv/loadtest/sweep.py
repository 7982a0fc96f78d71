"""Which concurrency level to measure next, and what the measured ones say: pure functions over verdicts.

The ladder is climbed until a level misses the SLO; then the knee, the largest level that keeps it, is
searched between the last two. Where a planner has predicted the capacity, the search starts there, since that
is where queueing begins: the prediction only chooses where to look, the verdict is always measured.
Saturation comes last, so that the levels that matter are reached by adding users, never by taking them away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Knee:
    """The largest level that keeps the SLO, below every level that misses it; and the smallest that misses
    it.

    `passed` is 0 when no level keeps it; `failed` is None when none misses it, so that the knee is not
    bounded above.
    """

    passed: int
    failed: int | None

    @property
    def exact(self) -> bool:
        return self.failed == self.passed + 1


def knee(verdicts: Mapping[int, bool]) -> Knee:
    """The knee that `verdicts` (level: keeps the SLO) show. A pass above a miss counts for nothing: it was
    luck.
    """
    failed = min((level for level, passed in verdicts.items() if not passed), default=None)
    below = [level for level, passed in verdicts.items() if passed and (failed is None or level < failed)]
    return Knee(max(below, default=0), failed)


@dataclass(frozen=True)
class Ladder:
    """What to measure: `levels` in order, the predicted `capacity`, at most `probes` levels in search of the
    knee, `saturation`.
    """

    levels: tuple[int, ...]
    saturation: int
    capacity: int | None = None
    probes: int = 4

    def next_level(self, verdicts: Mapping[int, bool]) -> int | None:
        """The level to measure after those in `verdicts`; None when there is nothing left."""
        found = knee(verdicts)
        for level in self.levels:
            if found.failed is not None and level > found.failed:
                break
            if level not in verdicts:
                return level
        probe = self._probe(verdicts, found)
        if probe is not None:
            return probe
        return None if self.saturation in verdicts else self.saturation

    def _probe(self, verdicts: Mapping[int, bool], found: Knee) -> int | None:
        ceiling = self.saturation if found.failed is None else found.failed
        if self.capacity is not None and found.passed < self.capacity < ceiling and self.capacity not in verdicts:
            return self.capacity
        planned = {*self.levels, self.capacity, self.saturation}
        probed = sum(level not in planned for level in verdicts)
        if probed >= self.probes or found.exact:
            return None
        if found.failed is None:
            if self.capacity is None or found.passed < self.capacity:
                return None  # saturation bounds the search
            # Nothing has failed yet: step up from the capacity by 1, 2, 4 ...
            probe = self.capacity + max(1, 2 * (found.passed - self.capacity))
        else:
            probe = (found.passed + found.failed) // 2
            if self.capacity is not None and found.failed <= self.capacity:
                # The capacity itself misses: step down from it by 1, 2, 4 ... as long as that is above what passed.
                probe = max(probe, self.capacity - 2 * (self.capacity - found.failed) - 1)
        return probe if found.passed < probe < ceiling and probe not in verdicts else None
