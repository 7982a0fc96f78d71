"""One sweep on one server: warm up, measure, decide, next level; raw records into a folder.

The folder of a run is complete: every figure of the report can be computed again from it.

    run.json         workload, predicted capacity, start and end; written last
    requests-*.jsonl one line a request, by Locust process
    server.jsonl     the server's metrics once a second
    client.jsonl     Locust's CPU once a second
    windows.jsonl    one line a measured level
    locust.log
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowkv.errors import LowkvError
from lowkv.loadtest.client import ClientPlan
from lowkv.loadtest.locust_process import LocustProcess
from lowkv.loadtest.metrics import Verdict, slo_verdict
from lowkv.loadtest.records import (
    ClientSample,
    Clock,
    InFlight,
    RequestRecord,
    ServerSample,
    Window,
    read_json,
    read_requests,
    write_atomically,
)
from lowkv.loadtest.server import Endpoint, ServerSampler
from lowkv.loadtest.sweep import Ladder
from lowkv.loadtest.watch import Unwatched, Watch
from lowkv.loadtest.workload import Workload, workload_from_mapping

_POLL_SECONDS = 0.25
_UNWATCHED = Unwatched()


@dataclass(frozen=True)
class Run:
    """A run's raw data, read back from its folder."""

    key: str
    workload: Workload
    capacity: int | None
    requests: list[RequestRecord]
    server: list[ServerSample]
    client: list[ClientSample]
    windows: list[Window]
    cut_short: bool

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Raises LowkvError when the folder holds no run that ended."""
        try:
            about = read_json(folder / "run.json")
        except OSError as error:
            raise LowkvError(
                f"no finished load test in {folder}", fix="run `lowkv loadtest` with this folder as --out"
            ) from error
        return cls(
            key=about["key"],
            workload=workload_from_mapping(about["workload"]),
            capacity=about["capacity"],
            requests=read_requests(folder),
            server=list(ServerSample.read(folder / "server.jsonl")),
            client=list(ClientSample.read(folder / "client.jsonl")),
            windows=list(Window.read(folder / "windows.jsonl")),
            cut_short=about["cut_short"],
        )


def run_sweep(
    workload: Workload,
    endpoint: Endpoint,
    prompts: Path,
    folder: Path,
    *,
    capacity: int | None = None,
    key: str = "",
    watch: Watch = _UNWATCHED,
) -> Run:
    """Sweeps concurrency on a server that is ready, by the rules of `sweep.Ladder`.

    `prompts` is a file of `prompts.write_prompts`; `folder` must hold nothing of an earlier run. `capacity` is the
    predicted number of resident sequences, where the knee is looked for first; `key` is kept with the run, to know it
    by. Ends by itself: no later than one level after
    `workload.time_limit_seconds`.

    Raises LowkvError when the server or Locust ends, or when every request of a level fails.
    """
    clock = Clock()
    plan = ClientPlan(endpoint.url, endpoint.model, str(prompts.absolute()), workload.output_tokens, workload.processes)
    ladder = Ladder(workload.levels, workload.saturation, capacity, workload.knee_probes)
    with (
        ServerSampler(endpoint, folder / "server.jsonl", clock) as sampler,
        LocustProcess(folder, plan, clock) as locust,
    ):
        started = clock()
        sweep = _Sweep(workload, folder, clock, locust, sampler, watch)
        cut_short = sweep.climb(ladder, started + workload.time_limit_seconds)
    about: dict[str, Any] = {
        "key": key,
        "workload": workload.to_mapping(),
        "model": endpoint.model,
        "capacity": capacity,
        "started": started,
        "ended": clock(),
        "cut_short": cut_short,
        "samples_missed": sampler.missed,
    }
    write_atomically(folder / "run.json", json.dumps(about, indent=2))
    return Run.read(folder)


@dataclass(frozen=True)
class _Live:
    """What is known of the requests while they run."""

    done: list[RequestRecord]
    under_way: list[InFlight]

    @property
    def requests(self) -> list[RequestRecord | InFlight]:
        known = {r.request for r in self.done}
        return [*self.done, *(r for r in self.under_way if r.request not in known)]


class _Sweep:
    def __init__(
        self,
        workload: Workload,
        folder: Path,
        clock: Clock,
        locust: LocustProcess,
        sampler: ServerSampler,
        watch: Watch,
    ) -> None:
        self._workload = workload
        self._folder = folder
        self._clock = clock
        self._locust = locust
        self._sampler = sampler
        self._watch = watch
        self._records = _Tail(folder)

    def climb(self, ladder: Ladder, deadline: float) -> bool:
        """Measures level after level; True when the time limit kept it from finding the knee."""
        verdicts: dict[int, bool] = {}
        cut_short = False
        while (level := ladder.next_level(verdicts)) is not None:
            # The last level is owed to every server; what it takes is set aside.
            reserve = 0.0 if ladder.saturation in verdicts else 2 * self._workload.window_at(ladder.saturation)
            if self._clock() > deadline - reserve and level != ladder.saturation:
                cut_short = True
                if ladder.saturation in verdicts:
                    break
                level = ladder.saturation
            window, verdict = self._measure(level)
            verdicts[level] = verdict.passed
            with (self._folder / "windows.jsonl").open("a", encoding="utf-8") as file:
                file.write(window.to_json() + "\n")
            kept = f"{verdict.kept} of {verdict.attempted} requests within the SLO"
            self._watch.note(f"  {level} users: {kept}, {'passed' if verdict.passed else 'missed'}")
        return cut_short

    def _measure(self, level: int) -> tuple[Window, Verdict]:
        began = self._clock()
        self._locust.users(level)
        steady = self._warm_up(level, began)
        start = self._clock()
        shortest = self._workload.window_at(level)
        while True:
            self._pause(f"{level} users: measuring", start)
            window = Window(level, start, self._clock(), steady)
            if window.seconds < shortest:
                continue
            verdict = self._judge(window)
            longest = (2 if verdict.attempted else 4) * shortest  # nothing decided is no verdict
            if verdict.attempted >= self._workload.minimum_requests or window.seconds >= longest:
                return window, verdict

    def _warm_up(self, level: int, began: float) -> bool:
        """Waits for the steady state of `Warmup`; False when its limit came first."""
        rule = self._workload.warmup
        full_since: float | None = None
        joined: float | None = None
        while True:
            self._pause(f"{level} users: warming up", began)
            now = self._clock()
            live = self._live()
            full = rule.occupancy * level <= len(live.under_way) <= level
            full_since = (full_since or now) if full else None
            held = full_since is not None and now - full_since >= rule.minimum_seconds
            served = {r.user for r in live.requests if r.first is not None}
            if full and joined is None and all(r.user in served for r in live.under_way):
                joined = now
            # What was sent while users still joined waited behind their prompts: the ramp's wait, not the level's.
            if held and joined is not None and all(r.first or r.sent > joined for r in live.under_way):
                return True
            if now - began > rule.maximum_seconds:
                return False

    def _judge(self, window: Window) -> Verdict:
        live = self._live()
        errors = [r for r in live.done if r.status == "error" and window.holds(r.ended)]
        healthy = [r for r in live.requests if not (isinstance(r, RequestRecord) and r.status == "error")]
        verdict = slo_verdict(healthy, len(errors), window, self._workload.slo)
        if errors and verdict.kept == 0:
            raise LowkvError(
                f"every request failed at {window.level} users, the first with: {errors[0].error}",
                fix="put that right first; the server's own log may say more",
            )
        return verdict

    def _live(self) -> _Live:
        under_way = [r for path in self._folder.glob("in-flight-*.jsonl") for r in InFlight.read(path)]
        done = self._records.read()
        ended = {r.request for r in done}
        return _Live(done, [r for r in under_way if r.request not in ended])

    def _pause(self, doing: str, since: float) -> None:
        self._locust.check()
        sample = self._sampler.latest
        if sample is not None:
            share = sample.kv_used / sample.kv_total
            doing += (
                f", {self._clock() - since:.0f} s; on the server {sample.running} running, {sample.waiting} waiting, "
                f"KV {share:.0%}"
            )
        self._watch.status(doing)
        time.sleep(_POLL_SECONDS)


class _Tail:
    """The finished requests of a folder, each line read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._records: list[RequestRecord] = []

    def read(self) -> list[RequestRecord]:
        for path in self._folder.glob("requests-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    self._records.append(RequestRecord.from_json(line.decode()))
        return self._records
