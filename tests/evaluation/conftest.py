"""Tiny engines and measures of seconds for what is not about any real model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lowkv.engine import EngineDir
from lowkv.evaluation.measure import Advance, Figures, Measure
from lowkv.evaluation.questions import Question

TEXT = tuple(
    f"{line} " * 24 for line in ("It is a truth universally acknowledged", "Call me Ishmael", "All happy families")
)


@pytest.fixture(scope="module")
def tiny_engines(build_tiny: Callable[..., Path]) -> dict[str, EngineDir]:
    """Two formats of the same random weights, without sink and with the shortest residual."""
    cache = {"residual_length": 32, "sink_tokens": 0}
    return {name: EngineDir.open(build_tiny({"format": name} | cache)) for name in ("kivi4", "kivi2")}


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """A few made-up questions in the place of GSM8K's."""
    found = [
        Question(
            text=f"Ann has {n} nuts and finds {n + 3} more in each of 2 woods. How many are there?",
            solution=f"She finds 2 * {n + 3} = {2 * n + 6} nuts.\nSo there are {n} + {2 * n + 6} = {3 * n + 6} nuts.",
            begun=f"She finds 2 * {n + 3} = {2 * n + 6} nuts.\nSo there are {n} + {2 * n + 6} = ",
            result=f"{3 * n + 6}",
            others=(f"{n}", f"{n + 3}", "2", f"{2 * n + 6}"),
        )
        for n in range(11, 22)
    ]
    monkeypatch.setattr("lowkv.evaluation.task.gsm8k", lambda: found)
    return found


@dataclass
class Counting(Measure):
    """Needs no model: a part's outcome is its number, and what was run is written down."""

    name: ClassVar[str] = "counting"

    count: int = 3
    stop_at: int | None = None  # Ctrl-C there
    ran: list[tuple[str, int]] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        return {"count": self.count}

    @property
    def parts(self) -> int:
        return self.count

    def prepare(self, engine: EngineDir) -> list[CountingPart]:
        return [CountingPart(self, index) for index in range(self.count)]

    def figures(self, plan: object, outcomes: Sequence[Any], baseline: Sequence[Any]) -> Figures:
        return {"sum": sum(outcomes), "difference": sum(outcomes) - sum(baseline)}

    def tables(self, results: dict[str, Figures], baseline: str) -> list[Any]:
        return []


@dataclass
class CountingPart:
    measure: Counting
    index: int
    tokens: int = 7

    def run(self, subjects: Sequence[Any], advance: Advance) -> list[int]:
        if self.index == self.measure.stop_at:
            raise KeyboardInterrupt
        self.measure.ran += [(subject.name, self.index) for subject in subjects]
        advance(self.tokens * len(subjects))
        return [self.index for _ in subjects]
