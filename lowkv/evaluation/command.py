"""`lowkv eval`: what was asked for, measured or read from the records, written, and held to the recipes' limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowkv.errors import LowkvError
from lowkv.evaluation import gate
from lowkv.evaluation.agreement import PROMPTS, AgreementMeasure
from lowkv.evaluation.evaluation import DEFAULT, MEASURES, evaluate
from lowkv.evaluation.measure import Measure
from lowkv.evaluation.passkey import DEPTHS, LENGTHS, REPEATS, PasskeyMeasure
from lowkv.evaluation.quality import TOKENS, WINDOW, Documents, TextMeasure
from lowkv.evaluation.records import FILE, Records
from lowkv.evaluation.task import QUESTIONS, TaskMeasure

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine import EngineDir
    from lowkv.engine.progress import Progress


@dataclass(frozen=True)
class Request:
    """What to measure; the measures' own docstrings say what the numbers mean.

    `measures` None is what the gate needs if `gate`, else text and passkey. `texts` are documents by name; None is
    Wikipedia.
    """

    measures: tuple[str, ...] | None = None
    tokens: int = TOKENS
    window: int = WINDOW
    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    repeats: int = REPEATS
    questions: int = QUESTIONS
    prompts: int = PROMPTS
    texts: Mapping[str, str] | None = None
    gate: bool = False

    def __post_init__(self) -> None:
        for name in self.measures or ():
            if name not in MEASURES:
                raise LowkvError("there is no such measure", got=name, expected=", ".join(MEASURES))

    def measure(self, name: str) -> Measure:
        """The measure of that name, with these settings."""
        documents = None if self.texts is None else Documents(tuple(self.texts.values()), ", ".join(self.texts))
        measures: list[Measure] = [
            TextMeasure(self.tokens, self.window, documents),
            PasskeyMeasure(self.lengths, self.depths, self.repeats),
            TaskMeasure(self.questions),
            AgreementMeasure(self.prompts, documents=documents),
        ]
        return next(measure for measure in measures if measure.name == name)


@dataclass(frozen=True)
class Outcome:
    """What to print, and whether a limit is broken."""

    tables: list[Table]
    broken: bool


def run(
    engines: Mapping[str, EngineDir],
    request: Request,
    out: Path,
    *,
    baseline: str | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Measures, and writes `out` (JSON); the records in its folder are added to and, unless `fresh`, used.

    Raises:
        LowkvError: what `evaluate` raises, or a gate for an engine whose recipe sets no limits.
    """
    names = list(request.measures or (() if request.gate else DEFAULT))
    if request.gate:
        names += _needed(engines)
    records = Records(out.parent / FILE, fresh=fresh)
    measures = [request.measure(name) for name in dict.fromkeys(names)]
    found = evaluate(engines, measures, baseline=baseline, records=records, progress=progress)
    plain, tables, broken = found.to_mapping(), found.tables(), False
    if request.gate:
        judged = {name: gate.verdicts(found.results[name], engine.recipe.quality) for name, engine in engines.items()}
        plain["gate"] = {name: [verdict.to_mapping() for verdict in rows] for name, rows in judged.items()}
        tables.append(gate.table(judged))
        broken = any(verdict.broken for rows in judged.values() for verdict in rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    return Outcome(tables, broken)


def _needed(engines: Mapping[str, EngineDir]) -> list[str]:
    for name, engine in engines.items():
        if not engine.recipe.quality.limits:
            raise LowkvError(
                f"the recipe of engine {name} sets no limits to hold it to",
                expected="a `quality:` section",
                fix="set perplexity_ratio, kl, top1 or passkey there and build again",
            )
    return [measure for engine in engines.values() for measure in gate.needed(engine.recipe.quality)]
