"""Runs measures over engines, part by part, and puts their figures together.

Every finished part is recorded before the next begins: whatever stops a measurement, the next one goes on from there,
and one that changes nothing loads no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowkv.engine.progress import NoProgress, Progress
from lowkv.errors import LowkvError
from lowkv.evaluation.agreement import AgreementMeasure
from lowkv.evaluation.intervals import CONFIDENCE
from lowkv.evaluation.measure import Figures, Measure
from lowkv.evaluation.passkey import PasskeyMeasure
from lowkv.evaluation.quality import TextMeasure
from lowkv.evaluation.records import Records, key_of
from lowkv.evaluation.subjects import Candidate, Loader, candidates_of
from lowkv.evaluation.task import TaskMeasure

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine import EngineDir

MEASURES: dict[str, type[Measure]] = {
    measure.name: measure for measure in (TextMeasure, PasskeyMeasure, TaskMeasure, AgreementMeasure)
}
DEFAULT = ("text", "passkey")


@dataclass(frozen=True)
class Evaluation:
    """Figures of several engines, and how they were taken.

    Attributes:
        results: by the engines' names: `plan`, its formats with layer counts, and the figures of every measure.
        baseline: name of the engine that the others are compared with.
        measures: what was measured.
    """

    results: dict[str, Figures]
    baseline: str
    measures: tuple[Measure, ...]

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for a report."""
        plain: dict[str, Any] = {
            "baseline": self.baseline,
            "method": "teacher-forced; history read as the KV cache stores it while decoding",
            "confidence": CONFIDENCE,
            "measures": {measure.name: measure.settings for measure in self.measures},
        }
        for measure in self.measures:
            if isinstance(measure, TextMeasure):
                plain |= {
                    "text": measure.source,
                    "windows": measure.windows,
                    "window_tokens": measure.window,
                    "bos": self.results[self.baseline]["bos"],
                }
        return plain | {"results": self.results}

    def tables(self) -> list[Table]:
        """For a terminal."""
        return [table for measure in self.measures for table in measure.tables(self.results, self.baseline)]


def evaluate(
    engines: Mapping[str, EngineDir],
    measures: Sequence[Measure] = (TextMeasure(),),
    *,
    baseline: str | None = None,
    records: Records | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measures engines of one model (one tokenizer) and compares each with one of them.

    Args:
        engines: by the name they are to be reported under.
        measures: what to measure.
        baseline: name of the engine to compare with; None is FP16 KV over the first engine's weights, under the
            name of the first engine that is just that if there is one, else "fp16" in front of the others.
        records: what was measured before; what is measured now is added.
        progress: told how far it is.

    Raises:
        LowkvError: no engines or measures, differing vocabularies, an unknown baseline, or what a measure refuses.
    """
    if not measures:
        raise LowkvError("there is nothing to measure", expected="at least one of " + ", ".join(MEASURES))
    candidates, against = candidates_of(engines, baseline)
    records, progress = records or Records(), progress or NoProgress()
    loader = Loader(progress)
    results: dict[str, Figures] = {one.name: {"name": one.name, "plan": one.plan.summary()} for one in candidates}
    for measure in measures:
        _measure(measure, candidates, against, records, loader, progress)
        outcomes = {
            one.name: [records.get(_key(measure, one, against), part) for part in range(measure.parts)]
            for one in candidates
        }
        for one in candidates:
            results[one.name] |= measure.figures(one.plan, outcomes[one.name], outcomes[against.name])
    return Evaluation(results, against.name, tuple(measures))


def _measure(
    measure: Measure,
    candidates: Sequence[Candidate],
    against: Candidate,
    records: Records,
    loader: Loader,
    progress: Progress,
) -> None:
    """Does the parts of a measure that are not recorded yet."""
    missing: list[tuple[int, list[Candidate]]] = []
    for part in range(measure.parts):
        left = [one for one in candidates if records.get(_key(measure, one, against), part) is None]
        if left and measure.beside_baseline:
            left = [against, *(one for one in left if one is not against)]
        if left:
            missing.append((part, left))
    if not missing:
        return
    progress.begin(f"preparing {measure.name}")
    parts = measure.prepare(against.engine)
    needed = {one.name: one for _, left in missing for one in left}
    subjects = {name: loader.load(one) for name, one in needed.items()}
    progress.begin(f"measuring {measure.name}", sum(parts[part].tokens * len(left) for part, left in missing))
    for part, left in missing:
        # Measures that compare nothing on the way go engine by engine: the smaller the step that can be lost.
        for group in [left] if measure.beside_baseline else [[one] for one in left]:
            outcomes = parts[part].run([subjects[one.name] for one in group], progress.advance)
            for one, outcome in zip(group, outcomes, strict=True):
                about = {"engine": one.name, "measure": measure.name}
                records.add(_key(measure, one, against), part, outcome, about)


def _key(measure: Measure, one: Candidate, against: Candidate) -> str:
    baseline = against.digest if measure.beside_baseline else None
    return key_of(engine=one.digest, baseline=baseline, measure=measure.name, settings=measure.settings)
