"""What a measure is: settings, parts that can be done one after another, and figures from their outcomes.

A measure asks the same of every subject. Its work is cut into parts whose outcomes are plain values, so that they can
be kept; figures are computed from outcomes alone, with no model. Adding one: a module with a `Measure`, a row in
`MEASURES`, a test that a broken cache shows in it, a line in docs/quality.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine import EngineDir
    from lowkv.evaluation.subjects import Subject
    from lowkv.kvcache import CachePlan

Advance = Callable[[int], None]
"""Told of tokens as they are done."""

Figures = dict[str, Any]
"""One subject's figures: plain values."""


class Part(Protocol):
    """A piece of a measure's work."""

    @property
    def tokens(self) -> int:
        """About how many tokens it feeds to each subject."""

    def run(self, subjects: Sequence[Subject], advance: Advance) -> list[Any]:
        """The outcome of each subject, in plain values."""


class Measure(ABC):
    """One thing that can be measured of a KV cache."""

    name: ClassVar[str]
    beside_baseline: ClassVar[bool] = False
    """An outcome depends on the baseline's numbers: it is the first subject of every part then."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that decides what is asked, in plain values."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """How many parts there are."""

    @abstractmethod
    def prepare(self, engine: EngineDir) -> Sequence[Part]:
        """The parts, for the model of an engine.

        Raises LowkvError for what the model or the text cannot give.
        """

    @abstractmethod
    def figures(self, plan: CachePlan, outcomes: Sequence[Any], baseline: Sequence[Any]) -> Figures:
        """A subject's figures from the outcomes of all parts, its own and the baseline's."""

    @abstractmethod
    def tables(self, results: dict[str, Figures], baseline: str) -> list[Table]:
        """For a terminal: figures by subject."""
