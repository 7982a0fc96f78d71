"""What the verb `lowkv loadtest` does: repositories and a workload in, a report out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError
from lowkv.loadtest.campaign import Start, Subject, run_campaign, serve, subject_from_repository
from lowkv.loadtest.machine import describe_machine
from lowkv.loadtest.page import write_report
from lowkv.loadtest.records import sole_writer
from lowkv.loadtest.report import build_report
from lowkv.loadtest.server import Endpoint
from lowkv.loadtest.watch import Unwatched, Watch

if TYPE_CHECKING:
    from lowkv.loadtest.workload import Workload
    from lowkv.models.tokenizer import Tokenizer

_UNWATCHED = Unwatched()


@dataclass(frozen=True)
class RunningServer:
    """A server that runs already. `url` and `metrics_url` as in `http://host:8000` and `http://host:8002/metrics`."""

    url: str
    metrics_url: str


def load_test(
    workload: Workload,
    repositories: Sequence[Path],
    out: Path,
    *,
    running: RunningServer | None = None,
    text: Path | None = None,
    quality: dict[str, Any] | None = None,
    fresh: bool = False,
    watch: Watch = _UNWATCHED,
) -> Path:
    """Load-tests what `repositories` serve and writes `report.json` and `report.html` into `out`; returns the page.

    Every repository is served on fresh servers of this machine, unless `running` names one that runs already; then
    there must be one repository, the one it serves (its tokenizer counts the prompts, its plan predicts the capacity).
    `text` is a file to cut the prompts from; None is the evaluation's Wikipedia excerpt. `quality` is the mapping of a
    `lowkv.evaluation` of the same engines, for the same page.

    Raises LowkvError for repositories that cannot be compared, servers that do not start, runs that cannot finish.
    """
    subjects = [subject_from_repository(path) for path in repositories]
    if running is not None and (len(subjects) != 1 or workload.repeats != 1):
        raise LowkvError(
            "a server that runs already is measured once, as it is",
            got=f"{len(subjects)} repositories, {workload.repeats} repeats",
            expected="the repository that it serves, and a workload with repeats: 1",
            fix="leave the address out, so that fresh servers are started",
        )
    if workload.kv_budget is not None and any(subject.budget != workload.kv_budget for subject in subjects):
        raise LowkvError(
            f"workload {workload.name} wants a KV budget of {workload.kv_budget} bytes",
            got={subject.name: subject.budget for subject in subjects},
            fix=f"write the repositories with --budget {workload.kv_budget}",
        )
    with sole_writer(out):
        runs = run_campaign(
            workload,
            subjects,
            prompt_text(text),
            tokenizer_of(subjects[0]),
            out,
            start=serve if running is None else _already(running),
            fresh=fresh,
            watch=watch,
        )
    report = build_report(f"Load test: {workload.name}", workload, subjects, runs, describe_machine(), quality)
    return write_report(report, out)


def prompt_text(path: Path | None) -> str:
    """The text that prompts are cut from: a file, or the evaluation's Wikipedia excerpt (downloaded once)."""
    if path is None:
        from lowkv.wikipedia import wikipedia

        return "\n".join(article for _, article in wikipedia())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LowkvError(f"cannot read {path}: {error}", fix="give the path of a UTF-8 text file") from error


def tokenizer_of(subject: Subject) -> Tokenizer:
    """The tokenizer of the engine that a subject serves."""
    from lowkv.engine.directory import EngineDir
    from lowkv.triton.repository import Repository

    return EngineDir.open(Repository.open(subject.repository).engine, verify=False).tokenizer()


def _already(running: RunningServer) -> Start:
    @contextmanager
    def start(subject: Subject, folder: Path) -> Iterator[Endpoint]:
        yield Endpoint(subject.model, running.url, running.metrics_url)

    return start
