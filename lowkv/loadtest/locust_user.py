"""The Locust side of the load test: one closed-loop user class, a load shape that follows `control.json`, raw
records out.

Imported by `loadtest/locustfile.py` inside Locust's own processes, never elsewhere: importing Locust patches
the standard library.

Why not FastHttpUser's `iter_lines`: it fills 1,024-byte chunks before it hands out a line, so that a stream
of 40 events 20 ms apart looks like three bursts, the first after 384 ms. Here the socket's own `readline` is
used, and the clock is read when it returns. Locust's statistics get one `request` event per request;
everything that is reported comes from our records.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import gevent
from geventhttpclient import HTTPClient
from locust import LoadTestShape, User, constant, events, task

from lowkv.loadtest.client import READY, ClientPlan, Control
from lowkv.loadtest.prompts import Prompt
from lowkv.loadtest.records import Clock, InFlight, RequestRecord, Status, write_atomically

SNAPSHOT_SECONDS = 0.5
ERROR_PAUSE_SECONDS = 0.5
"""A user waits so long after an error, so that a failing server is not hammered by a loop that fails at
once.
"""
CONNECT_SECONDS = 10.0
SPAWN_RATE = 50.0


@dataclass
class _Request:
    """A request under way; becomes a `RequestRecord` when it ends."""

    request: str
    user: str
    prompt: Prompt
    scheduled: float
    sent: float
    event_times: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    body_bytes: int = 0
    error: str | None = None

    def take(self, line: bytes, arrived: float) -> None:
        """Accounts for one `data:` line that arrived at `arrived`."""
        message = json.loads(line[5:])
        if "error" in message:
            self.error = str(message["error"])
            return
        total = message.get("num_output_tokens")
        if total is None:
            self.error = "the server does not say num_output_tokens, and tokens are never guessed from text"
            return
        self.input_tokens = message.get("num_input_tokens") or self.input_tokens
        if total > self.output_tokens:
            self.event_times.append(arrived)
            self.event_tokens.append(total - self.output_tokens)
            self.output_tokens = total

    def snapshot(self) -> InFlight:
        times = self.event_times
        return InFlight(
            request=self.request,
            user=self.user,
            sent=self.sent,
            first=times[0] if times else None,
            last=times[-1] if times else None,
            output_tokens=self.output_tokens,
        )

    def record(self, status: Status, ended: float, output_tokens: int) -> RequestRecord:
        return RequestRecord(
            request=self.request,
            user=self.user,
            prompt=self.prompt.index,
            scheduled=self.scheduled,
            sent=self.sent,
            ended=ended,
            event_times=self.event_times,
            event_tokens=self.event_tokens,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            expected_input_tokens=self.prompt.tokens,
            expected_output_tokens=output_tokens,
            status=status,
            error=self.error,
        )


class _Process:
    """What the users of one Locust process share: plan, prompts, clock, the file of records and the requests
    under way.
    """

    def __init__(self, folder: Path, worker_index: int) -> None:
        self.folder = folder
        self.plan = ClientPlan.read(folder)
        self.clock = Clock()
        self.pid = os.getpid()
        self.in_flight: dict[str, _Request] = {}
        self.numbers = itertools.count()
        self._prompts = self._share_of_prompts(worker_index)
        self._records: TextIO = (folder / f"requests-{self.pid}.jsonl").open("a", encoding="utf-8")

    def _share_of_prompts(self, worker_index: int) -> Iterator[Prompt]:
        prompts = list(Prompt.read(Path(self.plan.prompts)))
        # Round and round: running out is better than stopping, and the report refuses a run that used a prompt twice.
        return itertools.cycle(prompts[worker_index % self.plan.processes :: self.plan.processes])

    def next_prompt(self) -> Prompt:
        return next(self._prompts)

    def write(self, record: RequestRecord) -> None:
        self._records.write(record.to_json() + "\n")
        self._records.flush()

    def watch(self) -> None:
        """Writes down twice a second what is under way, so that a level can be judged before its requests
        have ended.
        """
        path = self.folder / f"in-flight-{self.pid}.jsonl"
        while True:
            write_atomically(path, "".join(r.snapshot().to_json() + "\n" for r in self.in_flight.values()))
            gevent.sleep(SNAPSHOT_SECONDS)


_process: _Process | None = None


class StreamingUser(User):  # type: ignore[misc]
    """A user who sends the next request as soon as the answer to the last has ended."""

    wait_time = constant(0)

    def on_start(self) -> None:
        global _process
        if _process is None:  # here and not at import: with --processes, workers are forked after the import
            folder = Path(self.environment.parsed_options.run_folder)
            _process = _Process(folder, self.environment.runner.worker_index)
            gevent.spawn(_process.watch)
        self.process = _process
        self.name = f"{_process.pid}.{next(_process.numbers)}"
        self.http = self._client()
        self.due = _process.clock()

    def _client(self) -> HTTPClient:
        plan = self.process.plan
        return HTTPClient.from_url(
            plan.url, concurrency=1, network_timeout=plan.timeout_seconds, connection_timeout=CONNECT_SECONDS
        )

    def on_stop(self) -> None:
        self.http.close()

    @task  # type: ignore[untyped-decorator]
    def generate(self) -> None:
        process, plan = self.process, self.process.plan
        prompt = process.next_prompt()
        body = json.dumps(
            {
                "text_input": prompt.text,
                "max_tokens": plan.output_tokens,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0.0,
                "return_num_input_tokens": True,
                "return_num_output_tokens": True,
            }
        ).encode()
        number = f"{process.pid}-{next(process.numbers)}"
        request = _Request(number, self.name, prompt, self.due, process.clock())
        process.in_flight[number] = request
        status: Status = "incomplete"
        try:
            self._stream(request, body)
            request.error = request.error or _wrong_lengths(request, plan.output_tokens)
            status = "error" if request.error else "ok"
        except (
            Exception
        ) as error:  # what a socket or a parser can raise is the record's content, not this program's failure
            request.error = f"{type(error).__name__}: {error}"
            status = "error"
        finally:
            # Also when the greenlet is killed at the end of the test: then the request is incomplete.
            del process.in_flight[number]
            self.due = process.clock()
            process.write(request.record(status, self.due, plan.output_tokens))
            if status != "incomplete":
                self._tell_locust(request)
        if status == "error":
            self.http.close()
            self.http = self._client()
            gevent.sleep(ERROR_PAUSE_SECONDS)
            self.due = process.clock()

    def _stream(self, request: _Request, body: bytes) -> None:
        clock = self.process.clock
        response = self.http.post(self.process.plan.path, body, {"Content-Type": "application/json"})
        if response.status_code != 200:
            text = response.read().decode(errors="replace")
            request.error = f"HTTP {response.status_code}: {text[:500]}"
            return
        while line := response.readline(b"\n"):
            arrived = clock()
            request.body_bytes += len(line)
            if line.startswith(b"data:"):
                request.take(line, arrived)

    def _tell_locust(self, request: _Request) -> None:
        self.environment.events.request.fire(
            request_type="POST",
            name="generate_stream",
            response_time=(self.due - request.sent) * 1000,
            response_length=request.body_bytes,
            exception=RuntimeError(request.error) if request.error else None,
            context={},
        )


def _wrong_lengths(request: _Request, output_tokens: int) -> str | None:
    """Says which length is not what was asked for; None when both are right."""
    if request.input_tokens != request.prompt.tokens:
        return f"the prompt was {request.input_tokens} tokens on the server, expected {request.prompt.tokens}"
    if request.output_tokens != output_tokens:
        return f"the answer was {request.output_tokens} tokens, expected {output_tokens}"
    return None


class FollowControl(LoadTestShape):  # type: ignore[misc]
    """As many users as `control.json` says. Users that stay are not disturbed; users that go end their
    request first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parent = os.getppid()

    def tick(self) -> tuple[int, float] | None:
        folder = Path(self.runner.environment.parsed_options.run_folder)
        # Locust asks for the first time when it, and all its workers, are ready.
        (folder / READY).touch()
        control = Control.read(folder)
        # The sweep that started us is gone when our parent has changed: then nobody reads the answers.
        if control.stop or os.getppid() != self._parent:
            return None
        return control.users, SPAWN_RATE


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_run_folder(parser: Any) -> None:
    parser.add_argument("--run-folder", required=True, help="folder with client.json, control.json and prompts.jsonl")


@events.test_stopping.add_listener  # type: ignore[untyped-decorator]
def _stop_at_once(environment: Any, **_: Any) -> None:
    # --stop-timeout lets users who leave between levels end their request; the end of the test waits for nobody.
    environment.stop_timeout = 0
