"""Locust as processes of its own: started headless, told what to do through the run's folder, ended whatever
happens.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from lowkv.assets import asset
from lowkv.errors import LowkvError
from lowkv.loadtest.client import READY, ClientPlan, Control
from lowkv.loadtest.records import ClientSample, Clock

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0
_LEAVE_SECONDS = 3600
"""How long a user who leaves between two levels may take to end the request under way: as long as that
takes.
"""


class LocustProcess:
    """Headless Locust on a run's folder, with no users until `users` is set.

    Entering starts it; leaving ends it and all that it started. Its processes are a session of their own, so
    that a Ctrl-C at the terminal reaches us alone and the end is always ours to order. Their CPU is sampled
    once a second into `client.jsonl`.
    """

    def __init__(self, folder: Path, plan: ClientPlan, clock: Clock) -> None:
        self._folder = folder
        self._plan = plan
        self._clock = clock
        self._stop_sampling = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="client-sampler", daemon=True)

    def __enter__(self) -> Self:
        # find_spec looks without importing: importing Locust would patch this process.
        if importlib.util.find_spec("locust") is None:
            raise LowkvError("the load test needs Locust", fix="install it: pip install 'lowkv[loadtest]'")
        self._plan.write(self._folder)
        Control(users=0).write(self._folder)
        command = [sys.executable, "-m", "locust", "-f", str(asset("loadtest/locustfile.py")), "--headless"]
        command += ["--run-folder", str(self._folder), "--stop-timeout", str(_LEAVE_SECONDS)]
        command += ["--only-summary", "--loglevel", "WARNING", "--exit-code-on-error", "0"]
        if self._plan.processes > 1:
            command += ["--processes", str(self._plan.processes)]
        # The package must be importable there also when it is not installed but run from a checkout.
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH", "")) if p)
        self._log: TextIO = (self._folder / "locust.log").open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._sampler.start()
        try:
            self._wait_until_ready()
        except BaseException:
            self._end(asked=False)
            raise
        return self

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not (self._folder / READY).exists():
            self.check()
            if time.monotonic() > deadline:
                raise LowkvError(
                    f"Locust did not start within {_START_SECONDS:.0f} s: {self._log_end()}",
                    fix=f"see {self._folder / 'locust.log'}",
                )
            time.sleep(0.05)

    def users(self, count: int) -> None:
        """Sets the number of concurrent users; Locust follows within about a second."""
        Control(users=count).write(self._folder)

    def check(self) -> None:
        """Raises LowkvError with the end of its log when Locust has ended by itself."""
        if self._process.poll() is not None:
            raise LowkvError(
                f"Locust ended with status {self._process.returncode}: {self._log_end()}",
                fix=f"see {self._folder / 'locust.log'}",
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(asked=kind is None)

    def _end(self, asked: bool) -> None:
        """Ends Locust: `asked` gives it the time to write down what is under way."""
        self._stop_sampling.set()
        try:
            Control(users=0, stop=True).write(self._folder)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS if asked else 0.5)
        finally:
            self._end_session()
            self._sampler.join()
            self._log.close()

    def _end_session(self) -> None:
        """Ends what is left of Locust's session: asks, then insists."""
        for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and self._process.poll() is None:
                time.sleep(0.05)
        self._process.wait()

    def _log_end(self) -> str:
        self._log.flush()
        lines = (self._folder / "locust.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-5:]) or "it wrote nothing"

    def _sample(self) -> None:
        import psutil

        processes: dict[int, psutil.Process] = {}
        with (self._folder / "client.jsonl").open("w", encoding="utf-8") as file:
            while not self._stop_sampling.wait(1.0):
                try:
                    parent = psutil.Process(self._process.pid)
                    found = [parent, *parent.children(recursive=True)]
                    for process in found:
                        processes.setdefault(process.pid, process)
                    # psutil measures since the last call on the same object; the first call of each says 0.
                    busiest = max(processes[process.pid].cpu_percent() for process in found)
                except psutil.NoSuchProcess:
                    continue
                file.write(ClientSample(self._clock(), busiest).to_json() + "\n")
                file.flush()
