"""`lowkv study`: a recipe's model studied, and the report written as a page, JSON and CSV."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError
from lowkv.evaluation.records import FILE, Records
from lowkv.study.measuring import Request, study
from lowkv.study.page import render
from lowkv.study.rows import to_csv

if TYPE_CHECKING:
    from lowkv.engine.progress import Progress
    from lowkv.recipe import Recipe

PAGE, JSON, CSV = "study.html", "study.json", "study.csv"


def run(recipe: Recipe, request: Request, out: Path, *, fresh: bool, progress: Progress) -> dict[str, Any]:
    """Measures what the folder's records lack (all of it if `fresh`), writes the three files, returns the report.

    Raises:
        LowkvError: what `study` raises, Matplotlib is missing, or `out` is a file.
    """
    if importlib.util.find_spec("matplotlib") is None:  # before minutes of measuring, not after
        raise LowkvError("the page's heat maps need Matplotlib", fix="pip install 'lowkv[loadtest]'")
    if out.exists() and not out.is_dir():
        raise LowkvError(f"{out} is not a folder", fix="give another one with --out")
    report = study(recipe, request, Records(out / FILE, fresh=fresh), progress)
    out.mkdir(parents=True, exist_ok=True)
    (out / JSON).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (out / CSV).write_text(to_csv(report), encoding="utf-8")
    (out / PAGE).write_text(render(report), encoding="utf-8")
    return report
