"""`lowkv demo`: the whole of it on this machine, from a package with a model in it to one page.

    recipes -> engines -> repositories -> quality -> load test of each, at one KV budget -> report

The comparison is FP16, FP8, K4V2+ and KIVI-2+ on the same weights, and FP16 once more at half of the bytes as a
negative control: if halving the bytes does not halve the residents, it is not the KV cache that is being measured.

Every stage keeps what it made and is skipped when its inputs have not changed, so that a demo that was stopped goes
on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.assets import asset
from lowkv.errors import LowkvError
from lowkv.loadtest.campaign import Subject, run_campaign, subject_from_repository
from lowkv.loadtest.entry import prompt_text, tokenizer_of
from lowkv.loadtest.figures import summary_png
from lowkv.loadtest.machine import describe_machine
from lowkv.loadtest.page import write_report
from lowkv.loadtest.records import read_json, sole_writer, write_atomically
from lowkv.loadtest.report import build_report
from lowkv.loadtest.watch import Unwatched, Watch
from lowkv.loadtest.workload import Workload, load_workload

if TYPE_CHECKING:
    from lowkv.engine.directory import EngineDir

RECIPES = ("smollm2-fp16", "smollm2-fp8", "smollm2-k4v2plus", "smollm2-kivi2plus")
CONTROL = "fp16-half"
QUALITY_TOKENS = 4096
QUALITY_WINDOW = 1024
_UNWATCHED = Unwatched()


@dataclass(frozen=True)
class DemoFolders:
    """Where the demo keeps what it makes; all of it can be deleted."""

    out: Path = Path("reports/demo")
    engines: Path = Path("engines/demo")
    repositories: Path = Path("repos/demo")


def run_demo(
    folders: DemoFolders | None = None,
    *,
    workload: Path | None = None,
    fresh: bool = False,
    watch: Watch = _UNWATCHED,
) -> Path:
    """Runs the demo and returns the path of its `report.html`; `report.json` and `summary.png` are beside it.

    `workload` is a workload's file; None is the demo's own. `fresh` makes everything again. Stopping it leaves no
    process behind and keeps what is finished.

    Raises LowkvError when the model cannot be had, a server does not start, or a measurement cannot be finished.
    """
    folders = folders or DemoFolders()
    terms = load_workload(workload or asset("loadtest/workloads/demo.yaml"))
    if terms.kv_budget is None:
        raise LowkvError(
            f"workload {terms.name} gives no kv_budget, which the demo needs: one and the same for all formats",
            fix="add a line like `kv_budget: 72MiB`",
        )
    with sole_writer(folders.out):
        return _run(folders, terms, terms.kv_budget, fresh, watch)


def _run(folders: DemoFolders, terms: Workload, budget: int, fresh: bool, watch: Watch) -> Path:
    if fresh:
        for folder in (folders.engines, folders.repositories, folders.out / "runs"):
            shutil.rmtree(folder, ignore_errors=True)
    engines = _build(folders.engines, watch)
    subjects = _repositories(engines, folders.repositories, budget, watch)
    identities = {subject.name: subject.identity for subject in subjects if not subject.control}
    quality = _quality(engines, identities, folders.out, fresh, watch)
    watch.note(f"load test: {len(subjects)} servers, one after another (workload {terms.name})")
    text = prompt_text(None)
    runs = run_campaign(terms, subjects, text, tokenizer_of(subjects[0]), folders.out, fresh=fresh, watch=watch)
    title = "KV cache formats at one and the same budget: SmolLM2-135M on Triton Inference Server"
    report = build_report(title, terms, subjects, runs, describe_machine(), quality)
    summary_png(report, folders.out / "summary.png")
    return write_report(report, folders.out)


class _StageWatch:
    """A job's stages, told to a `Watch`."""

    def __init__(self, name: str, watch: Watch) -> None:
        self._name, self._watch = name, watch
        self._stage, self._total, self._done = "", 0, 0

    def begin(self, stage: str, total: int | None = None) -> None:
        self._stage, self._total, self._done = stage, total or 0, 0
        self.advance(0)

    def advance(self, amount: int) -> None:
        self._done += amount
        share = f" {self._done / self._total:.0%}" if self._total else ""
        self._watch.status(f"{self._name}: {self._stage}{share}")


def _build(folder: Path, watch: Watch) -> dict[str, EngineDir]:
    """An engine for every recipe, by the name of its KV format."""
    from lowkv.engine.build import build_engine
    from lowkv.recipe import load_recipe

    engines = {}
    for name in RECIPES:
        recipe = load_recipe(asset(f"build/recipes/{name}.yaml"))
        watch.note(f"engine {name}: {recipe.kv_cache.format} KV cache")
        progress = _StageWatch(name, watch)
        engines[recipe.kv_cache.format] = build_engine(recipe, folder / name, progress, force=True)
    return engines


def _repositories(engines: Mapping[str, EngineDir], folder: Path, budget: int, watch: Watch) -> list[Subject]:
    """A model repository for every engine at `budget` bytes, and one for the control at half of them."""
    from lowkv.triton.repository import write_repository

    subjects = []
    for name, engine in engines.items():
        watch.status(f"{name}: writing its model repository")
        path = write_repository(engine.path, folder / name, force=True, budget=budget)
        subjects.append(subject_from_repository(path, name))
    half = write_repository(engines["fp16"].path, folder / CONTROL, force=True, budget=budget // 2)
    return [*subjects, subject_from_repository(half, CONTROL, control=True)]


def _quality(
    engines: Mapping[str, EngineDir], identities: Mapping[str, str], out: Path, fresh: bool, watch: Watch
) -> dict[str, Any]:
    """The quality of every engine; measured once for the same engines (by their `identities`) and text."""
    from lowkv.evaluation import evaluate
    from lowkv.evaluation.quality import TextMeasure
    from lowkv.wikipedia import SOURCE

    inputs = {
        "engines": dict(identities),
        "tokens": QUALITY_TOKENS,
        "window": QUALITY_WINDOW,
        "text": SOURCE,
    }
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    path = out / "quality.json"
    if path.is_file() and not fresh:
        kept: dict[str, Any] = read_json(path)
        if kept.pop("key", None) == key:
            watch.note("quality: measured before, kept")
            return kept
    watch.note(f"quality: perplexity, KL and top-1 of every format, on {QUALITY_TOKENS:,} tokens")

    measures = [TextMeasure(QUALITY_TOKENS, QUALITY_WINDOW)]
    progress = _StageWatch("quality", watch)
    measured = evaluate(dict(engines), measures, baseline="fp16", progress=progress).to_mapping()
    # Through JSON, so that a kept result and a new one are the same thing.
    text = json.dumps(measured | {"key": key}, indent=2)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text + "\n")
    plain: dict[str, Any] = json.loads(text)
    del plain["key"]
    return plain
