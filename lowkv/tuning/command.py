"""`lowkv tune`: a search made or read from the records, written as a recipe and as figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lowkv
from lowkv.evaluation.records import FILE, Records
from lowkv.recipe import load_recipe
from lowkv.tuning import report
from lowkv.tuning.recipe_file import check_free, write_recipe
from lowkv.tuning.search import Request, Tuning, tune

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine.progress import Progress


@dataclass(frozen=True)
class Outcome:
    """What to print: the tables, what they come to, and the files that were written."""

    tables: Sequence[Table]
    verdicts: Sequence[str]
    summary: str
    figures: Path


def run(
    recipe: Path, request: Request, out: Path, reports: Path, *, fresh: bool = False, progress: Progress | None = None
) -> Outcome:
    """Searches, and writes the recipe `out` and `reports`/NAME.json; the records there are added to and used.

    Raises LowkvError as `tune` does, and when `out` is in the way.
    """
    check_free(out, recipe)
    given = load_recipe(recipe)
    tuning = tune(given, request, records=Records(reports / FILE, fresh=fresh), progress=progress)
    write_recipe(out, recipe, tuning.settings, _comments(tuning, recipe))
    figures = reports / f"{out.stem}.json"
    figures.parent.mkdir(parents=True, exist_ok=True)
    figures.write_text(json.dumps(tuning.to_mapping(), indent=2) + "\n", encoding="utf-8")
    summary = f"{tuning.tuned.plan.summary()}, {tuning.tuned.bits:.2f} bits"
    return Outcome(report.tables(tuning), report.verdicts(tuning), summary, figures)


def _comments(tuning: Tuning, recipe: Path) -> list[str]:
    """How the plan was found, for the head of the recipe."""
    tuned, hot = tuning.tuned, tuning.space.hot
    rows = [
        f"  {judged.name:24} {judged.bits:.2f} bits  KL {judged.held_out.divergence}"
        f"  perplexity x {judged.held_out.ratio.value:.4f}"
        for judged in (tuned, *tuning.rivals)
    ]
    return [
        f"lowkv {lowkv.__version__}: lowkv tune {recipe} {tuning.request.options}",
        "",
        f"{tuned.plan.summary()}: {tuned.bits:.2f} bits per K or V value in sealed blocks, parameters included.",
        f"Chosen from {', '.join(tuning.space.formats)} by the KL divergence of each layer alone, others in {hot},",
        f"on {tuning.calibration}; the layers' sum is {tuned.predicted:.4f} nats,",
        f"the whole plan measured there {tuned.calibration.divergence.value:.4f}.",
        f"On {tuning.held_out} that had no part in it, against {hot} [95% interval]:",
        *rows,
        *report.verdicts(tuning),
        f"Text: {tuning.source}",
    ]
