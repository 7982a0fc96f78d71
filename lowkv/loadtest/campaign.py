"""A load test of several engines on the same terms: fresh servers, rounds in random order, one folder.

    OUT/prompts.jsonl       the same prompts for everybody
    OUT/runs/0-kivi2/ ...   one folder a run (see `run`)
    OUT/report.json, report.html

A run that is there already, made from the same inputs, is kept: an interrupted campaign goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowkv.errors import LowkvError
from lowkv.loadtest.prompts import Encoder, write_prompts
from lowkv.loadtest.run import Run, run_sweep
from lowkv.loadtest.server import Endpoint
from lowkv.loadtest.watch import Unwatched, Watch
from lowkv.loadtest.workload import Workload

if TYPE_CHECKING:
    from lowkv.kvcache.capacity import Capacity
    from lowkv.kvcache.plan import CachePlan
    from lowkv.recipe import ServingConfig

_UNWATCHED = Unwatched()
_EXIT_SECONDS = 2
_MEASUREMENT = 1
"""Part of every run's key; raise it when runs of before cannot be compared with runs of now."""


@dataclass(frozen=True)
class Subject:
    """One engine at one KV budget, as it is served."""

    name: str
    plan: CachePlan
    serving: ServingConfig
    budget: int
    identity: str
    """Changes when the engine does (its manifest's hash)."""
    about: Mapping[str, str]
    """What the page says of the model: source, weights, context ..."""
    repository: Path
    model: str
    """Its name on the server."""
    control: bool = False
    """The negative control: the baseline at half the budget."""

    def capacity(self, workload: Workload) -> Capacity:
        """The planner's prediction for the workload's longest sequence."""
        from lowkv.kvcache.capacity import max_resident

        return max_resident(
            self.plan,
            self.budget,
            workload.prompt_tokens.maximum,
            workload.output_tokens,
            policy=self.serving.policy,
            max_tokens_per_step=self.serving.max_tokens_per_step,
            max_sequences=self.serving.max_sequences,
        )


def subject_from_repository(repository: Path, name: str | None = None, control: bool = False) -> Subject:
    """What a model repository serves. Raises LowkvError when it is not one of lowkv's."""
    from lowkv.engine.directory import EngineDir
    from lowkv.triton.repository import Repository

    opened = Repository.open(repository)
    engine = EngineDir.open(opened.engine, verify=False)
    parameters = opened.config.parameters
    shown = ("model.source", "model.architecture", "weights.dtype", "lm_head.dtype", "compute", "serving.max_model_len")
    return Subject(
        name=name or opened.model_name,
        plan=engine.cache_plan,
        serving=engine.recipe.serving,
        budget=int(parameters["kv_cache.budget_bytes"]),
        identity=parameters["engine_sha256"],
        about={key: parameters[key] for key in shown if key in parameters},
        repository=repository,
        model=opened.model_name,
        control=control,
    )


Start = Callable[[Subject, Path], AbstractContextManager[Endpoint]]
"""Makes a fresh server for a subject, its log in the given folder; it is ready when entered and gone when left."""


@contextmanager
def serve(subject: Subject, folder: Path) -> Iterator[Endpoint]:
    """A fresh Triton server on free ports of this machine."""
    from lowkv.triton.server import TritonServer

    # Requests that still wait when the clients have gone are nobody's: they need not be finished.
    with TritonServer(
        subject.repository,
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        log_file=folder / "triton.log",
        exit_timeout=_EXIT_SECONDS,
    ) as server:
        yield Endpoint(server.model_name, server.http_url, server.metrics_url, server.pid)


def run_campaign(
    workload: Workload,
    subjects: Sequence[Subject],
    text: str,
    tokenizer: Encoder,
    out: Path,
    *,
    start: Start = serve,
    fresh: bool = False,
    watch: Watch = _UNWATCHED,
) -> dict[str, list[Run]]:
    """Measures every subject `workload.repeats` times, each time on a server of its own; the order is drawn anew for
    each round.

    `text` is what the prompts are cut from, `tokenizer` that of all the engines. Returns the runs by the subject's
    name. Raises LowkvError when a server cannot be started or a run cannot be finished; what is finished by then is
    kept, and found by the next call unless `fresh`.
    """
    check_comparable(workload, subjects)
    prompts = out / "prompts.jsonl"
    write_prompts(prompts, text, tokenizer, workload.prompt_tokens, workload.prompts, workload.seed)
    runs: dict[str, list[Run]] = {subject.name: [] for subject in subjects}
    for number in range(workload.repeats):
        order = list(subjects)
        random.Random(workload.seed + number).shuffle(order)  # noqa: S311 - repeatable, not secret
        for subject in order:
            folder = out / "runs" / f"{number}-{subject.name}"
            key = _key(workload, subject, prompts)
            run = None if fresh else _kept(folder, key)
            if run is None:
                run = _measure(workload, subject, prompts, folder, start, key, watch)
            else:
                watch.note(f"{subject.name}: measured before, kept")
            runs[subject.name].append(run)
    return runs


def check_comparable(workload: Workload, subjects: Sequence[Subject]) -> None:
    """Raises LowkvError when the subjects would not be measured on the same terms."""
    if not subjects:
        raise LowkvError("there is nothing to load-test", fix="name at least one model repository")
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):
        raise LowkvError("two repositories serve a model of the same name", got=names, fix="give each its own name")
    budgets = {subject.name: subject.budget for subject in subjects if not subject.control}
    if len(set(budgets.values())) > 1:
        raise LowkvError(
            "the KV budgets differ, so that concurrency says nothing about formats",
            got=budgets,
            expected="one budget in bytes for all",
            fix="write the repositories with the same --budget",
        )
    for subject in subjects:
        context = int(subject.about.get("serving.max_model_len", workload.tokens))
        if workload.tokens > context:
            raise LowkvError(
                f"{subject.name} reads at most {context} tokens",
                got=f"{workload.prompt_tokens} + {workload.output_tokens} tokens in workload {workload.name}",
                fix="shorten the workload",
            )
        if subject.capacity(workload).sequences < 1:
            raise LowkvError(
                f"the KV cache of {subject.name} holds not even one sequence of workload {workload.name}",
                got=f"{subject.budget} bytes",
                expected=f"at least {subject.plan.bytes_at(workload.tokens)}",
                fix="raise the budget, or shorten the workload",
            )


def _measure(
    workload: Workload,
    subject: Subject,
    prompts: Path,
    folder: Path,
    start: Start,
    key: str,
    watch: Watch,
) -> Run:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    watch.note(f"{subject.name}: starting a fresh server")
    if subject.control:  # what is asked of it is how many stay resident, not where its knee is
        workload = replace(workload, knee_probes=0)
    with start(subject, folder) as endpoint:
        capacity = subject.capacity(workload).sequences
        return run_sweep(workload, endpoint, prompts, folder, capacity=capacity, key=key, watch=watch)


def _kept(folder: Path, key: str) -> Run | None:
    """The run in `folder` if it was finished and has this key."""
    if not (folder / "run.json").is_file():
        return None
    run = Run.read(folder)
    return run if run.key == key else None


def _key(workload: Workload, subject: Subject, prompts: Path) -> str:
    inputs = {
        "measurement": _MEASUREMENT,
        "workload": workload.to_mapping() | {"repeats": None},
        "engine": subject.identity,
        "budget": subject.budget,
        "prompts": hashlib.sha256(prompts.read_bytes()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
