"""What a load test writes down, one JSON object a line: requests as the client saw them, samples of the
server, samples of the client.

Times are seconds on one clock (`now`): the wall clock read once when the process starts, then the monotonic
clock, so that differences inside a process are exact and files of several processes line up. Metrics are
computed from these files and from nothing else.

Light on purpose: the Locust processes import it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from lowkv.errors import LowkvError

Status = Literal["ok", "error", "incomplete"]


class Clock:
    """Wall-clock seconds that never jump: `Clock()` reads the wall clock once and counts on from there."""

    def __init__(self) -> None:
        self._offset = time.time() - time.perf_counter()

    def __call__(self) -> float:
        return self._offset + time.perf_counter()


@dataclass(frozen=True)
class JsonLine:
    """A dataclass that is one JSON line."""

    def to_json(self) -> str:
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Self:
        return cls(**json.loads(line))

    @classmethod
    def read(cls, path: Path) -> Iterator[Self]:
        """The records in a file. A last line without its end was cut off by the end of its writer, and is
        left out.
        """
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield cls.from_json(line)


@dataclass(frozen=True)
class RequestRecord(JsonLine):
    """One request, from the moment it was due to the last token that arrived."""

    request: str
    user: str
    prompt: int
    scheduled: float
    """When it was due. In a closed loop: when the same user's previous request had ended."""
    sent: float
    """Just before the request was written to the socket."""
    ended: float
    """When the answer had ended, or was given up."""
    event_times: list[float]
    """When each event that carried tokens had arrived."""
    event_tokens: list[int]
    """Tokens in each of these events, as the server counts them."""
    input_tokens: int
    output_tokens: int
    expected_input_tokens: int
    expected_output_tokens: int
    status: Status
    error: str | None = None

    @property
    def first(self) -> float | None:
        """When the first token arrived; None when none did."""
        return self.event_times[0] if self.event_times else None

    @property
    def last(self) -> float | None:
        """When the last token arrived; None when none did."""
        return self.event_times[-1] if self.event_times else None


@dataclass(frozen=True)
class InFlight(JsonLine):
    """A request that is still under way, in just enough numbers to judge a level that has not ended."""

    request: str
    user: str
    sent: float
    first: float | None
    last: float | None
    output_tokens: int


@dataclass(frozen=True)
class ServerSample(JsonLine):
    """The server's own account of itself at one moment. Bytes and counts; memory is that of its processes,
    None when unknown.
    """

    t: float
    running: int
    waiting: int
    running_peak: int
    kv_used: int
    kv_total: int
    hot_blocks: int
    cold_blocks: int
    preemptions: int
    tokens_in: int
    tokens_out: int
    effective_bits: float
    memory: int | None = None


@dataclass(frozen=True)
class ClientSample(JsonLine):
    """CPU of the busiest Locust process since the sample before, in percent of one core (a gevent process has
    no more than one).
    """

    t: float
    cpu_percent: float


@dataclass(frozen=True)
class Window(JsonLine):
    """One level's steady window. `steady` is False when warm-up hit its limit first."""

    level: int
    start: float
    end: float
    steady: bool = True

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, t: float | None) -> bool:
        return t is not None and self.start <= t < self.end


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file that others are reading, so that they see the old text or the new one whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Holds a folder for one measurement: two at once would write over each other's records.

    Raises LowkvError when another process holds it. The lock goes with the process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LowkvError(
                f"another measurement is writing to {folder}", fix="wait for it, or give another folder with --out"
            ) from None
        yield
    finally:
        os.close(lock)


def read_requests(folder: Path) -> list[RequestRecord]:
    """Every request in a run's folder, whichever Locust process wrote it, in the order of sending."""
    records = [r for path in sorted(folder.glob("requests-*.jsonl")) for r in RequestRecord.read(path)]
    return sorted(records, key=lambda record: record.sent)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
