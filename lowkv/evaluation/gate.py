"""Holds an engine to the `quality` limits of its recipe.

The rule: a limit is broken when the estimate is beyond it, which is when the engine is more likely beyond the limit
than within. Of a broken limit, "surely" says that the whole confidence interval is beyond; of one that holds, that
the whole interval is within.

Why not ask for the whole interval? If all of it had to be within, a good engine would fail for having been measured
briefly; if all of it had to be beyond, a bad one would pass for the same reason, and measuring less would be the way
through the gate. The estimate favours neither, and "probably" says that more text would settle it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError
from lowkv.evaluation.evaluation import evaluate
from lowkv.evaluation.intervals import Interval
from lowkv.evaluation.measure import Figures, Measure
from lowkv.evaluation.passkey import PasskeyMeasure
from lowkv.evaluation.quality import TextMeasure

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine import EngineDir
    from lowkv.engine.progress import Progress
    from lowkv.recipe import QualityConfig


@dataclass(frozen=True)
class Rule:
    """Where a limit's figure comes from, and which side of the limit is good."""

    figure: str
    measure: str
    at_most: bool


RULES = {
    "perplexity_ratio": Rule("ratio", "text", at_most=True),
    "kl": Rule("kl", "text", at_most=True),
    "top1": Rule("top1", "text", at_most=False),
    "passkey": Rule("passkey", "passkey", at_most=False),
}
"""By the limit's name in a recipe (`QualityConfig.limits`)."""


@dataclass(frozen=True)
class Verdict:
    """One limit and what was measured."""

    limit: str
    got: Interval
    allowed: float
    at_most: bool

    @property
    def broken(self) -> bool:
        return self.got.value > self.allowed if self.at_most else self.got.value < self.allowed

    @property
    def sure(self) -> bool:
        """The whole interval is on the estimate's side of the limit."""
        if self.broken:
            return self.got.low > self.allowed if self.at_most else self.got.high < self.allowed
        return self.got.high <= self.allowed if self.at_most else self.got.low >= self.allowed

    @property
    def words(self) -> str:
        return f"{'surely' if self.sure else 'probably'} {'broken' if self.broken else 'held'}"

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for a report."""
        return asdict(self) | {"broken": self.broken, "sure": self.sure}

    def __str__(self) -> str:
        side = "at most" if self.at_most else "at least"
        return f"{self.limit} {self.got}, {side} {self.allowed:g} allowed: {self.words}"


def needed(quality: QualityConfig) -> list[str]:
    """Names of the measures that a recipe's limits need."""
    return list(dict.fromkeys(RULES[limit].measure for limit in quality.limits))


def verdicts(figures: Figures, quality: QualityConfig) -> list[Verdict]:
    """One for every limit of a recipe, from the figures of its engine."""
    return [
        Verdict(limit, Interval.from_mapping(figures[RULES[limit].figure]), allowed, RULES[limit].at_most)
        for limit, allowed in quality.limits.items()
    ]


def check(engine: EngineDir, progress: Progress | None = None) -> list[Verdict]:
    """Measures an engine against its recipe's limits, with the measures' own settings.

    Raises:
        LowkvError: it breaks one, or has none, or cannot be measured here.
    """
    quality = engine.recipe.quality
    measures: dict[str, Measure] = {"text": TextMeasure(), "passkey": PasskeyMeasure()}
    chosen = [measures[name] for name in needed(quality)]
    if not chosen:
        raise LowkvError(f"the recipe of {engine.path} sets no limits", fix="set some in its `quality:` section")
    name = engine.recipe.name
    found = verdicts(evaluate({name: engine}, chosen, progress=progress).results[name], quality)
    broken = [str(verdict) for verdict in found if verdict.broken]
    if broken:
        raise LowkvError(
            f"engine {name} breaks the limits of its recipe's quality section: {'; '.join(broken)}",
            fix="choose a KV format that loses less, or allow more",
        )
    return found


def table(judged: Mapping[str, Sequence[Verdict]]) -> Table:
    """For a terminal: the verdicts by engine."""
    from rich.table import Table

    found = Table(title="gate: the limits of the recipes")
    for column in ("engine", "limit", "got", "allowed", "verdict"):
        found.add_column(column)
    for name, rows in judged.items():
        for row in rows:
            side = "at most" if row.at_most else "at least"
            found.add_row(name, row.limit, str(row.got), f"{side} {row.allowed:g}", row.words)
    return found
