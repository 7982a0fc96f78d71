"""The server as the load test sees it: where it answers, what it says about itself once a second."""

from __future__ import annotations

import re
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from lowkv.errors import LowkvError
from lowkv.loadtest.records import Clock, ServerSample

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


_START_SECONDS = 15.0
"""How long the metrics of a server that is ready may be in coming: Triton opens that port last."""


class NoAnswerError(LowkvError):
    """Nothing answered at the metrics' address."""


@dataclass(frozen=True)
class Endpoint:
    """A server that is ready: its model, its two addresses, and its process where that runs on this
    machine.
    """

    model: str
    url: str
    metrics_url: str
    pid: int | None = None

    def sample(self, t: float) -> ServerSample:
        """The server's metrics now. Raises NoAnswerError, or LowkvError when it lacks one of ours."""
        try:
            with urllib.request.urlopen(self.metrics_url, timeout=5) as answer:  # noqa: S310 - the user's own server
                text = answer.read().decode()
        except (OSError, urllib.error.URLError) as error:
            raise NoAnswerError(f"no metrics at {self.metrics_url}: {error}", fix="is the server running?") from error
        return sample_from_metrics(text, self.model, t, _memory(self.pid))


def sample_from_metrics(text: str, model: str, t: float, memory: int | None = None) -> ServerSample:
    """A sample from Prometheus text. Raises LowkvError naming the first metric that is missing for
    `model`.
    """
    values: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match and match["name"].startswith("lowkv_"):
            labels = dict(_LABEL.findall(match["labels"] or ""))
            if labels.get("model") == model:
                kind = next((labels[k] for k in ("state", "kind", "direction") if k in labels), "")
                values[match["name"], kind] = float(match["value"])

    def value(name: str, kind: str = "") -> int:
        return int(number(name, kind))

    def number(name: str, kind: str = "") -> float:
        try:
            return values[f"lowkv_{name}", kind]
        except KeyError:
            shown = f"lowkv_{name}" + (f" ({kind})" if kind else "")
            raise LowkvError(
                f"the server has no metric {shown} for model {model}",
                fix="give the metrics address of a server that serves a lowkv repository, and its model's name",
            ) from None

    return ServerSample(
        t=t,
        running=value("requests", "running"),
        waiting=value("requests", "waiting"),
        running_peak=value("running_peak"),
        kv_used=value("kv_bytes", "used"),
        kv_total=value("kv_bytes", "total"),
        hot_blocks=value("kv_blocks", "hot"),
        cold_blocks=value("kv_blocks", "cold"),
        preemptions=value("preemptions_total"),
        tokens_in=value("tokens_total", "in"),
        tokens_out=value("tokens_total", "out"),
        effective_bits=number("kv_effective_bits"),
        memory=memory,
    )


def _memory(pid: int | None) -> int | None:
    """Resident bytes of a process and all below it; None when it is not known or gone."""
    if pid is None:
        return None
    import psutil

    try:
        server = psutil.Process(pid)
        return sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))
    except psutil.NoSuchProcess:
        return None


class ServerSampler:
    """Writes a sample a second to a file, from a thread of its own, while it is entered.

    A sample that cannot be taken is left out: a busy server may be late, and whether it lives is for the
    requests to tell. `missed` counts them.
    """

    def __init__(self, endpoint: Endpoint, path: Path, clock: Clock, interval: float = 1.0) -> None:
        self._endpoint = endpoint
        self._path = path
        self._clock = clock
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-sampler", daemon=True)
        self.latest: ServerSample | None = None
        self.missed = 0

    def __enter__(self) -> Self:
        # The first sample is taken here, so that a wrong address is an error and not a file of nothing.
        deadline = time.monotonic() + _START_SECONDS
        while self.latest is None:
            try:
                self.latest = self._endpoint.sample(self._clock())
            except NoAnswerError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            due = time.monotonic()
            while True:
                self._take(file)
                due = max(due + self._interval, time.monotonic())
                if self._stop.wait(due - time.monotonic()):
                    self._take(file)
                    return

    def _take(self, file: TextIO) -> None:
        try:
            self.latest = self._endpoint.sample(self._clock())
        except LowkvError:
            self.missed += 1
        else:
            file.write(self.latest.to_json() + "\n")
            file.flush()
