"""Runs one tritonserver and cleans up after it, whatever happens to the process that wanted it.

A separate process, because the one who started the server can be killed, and because tritonserver itself leaves
its Python stub and its shared memory behind when a request is still running at its exit timeout. Standard library
only, run as a script with `python -I -S`: it must start in no time and cost a few megabytes.

    python -I -S supervisor.py LOG SHM_PREFIX GRACE_SECONDS COMMAND...

Standard input is the lifeline: nothing is read from it, but its end means that the owner is gone. The pid of
tritonserver is written to standard output. The exit status is tritonserver's (128 + n for signal n).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - Triton's Python backend puts its regions there


def remove_shared_memory(prefix: str) -> None:
    """Removes what a dead server left in /dev/shm under `prefix`."""
    for region in _SHARED_MEMORY.glob(prefix + "*"):
        with contextlib.suppress(OSError):
            region.unlink()


def main(arguments: list[str]) -> int:
    log, prefix, grace, *command = arguments
    libc = ctypes.CDLL(None)
    # Stubs whose tritonserver dies become this process's children, not init's.
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    stopping = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    with Path(log).open("ab", buffering=0) as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # If this process is killed too, tritonserver still ends. Safe here: there is one thread.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
    print(server.pid, flush=True)

    watched = [0, wake_read]
    while server.poll() is None and not stopping:
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready and not os.read(0, 4096):
            stopping = True
        if wake_read in ready:
            os.read(wake_read, 4096)
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(float(grace))
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    _end_children()
    remove_shared_memory(prefix)
    code = server.returncode
    return code if code >= 0 else 128 - code


def _end_children(patience: float = 2.0) -> None:
    """Waits for the stubs, which notice that their server is gone, and kills those that do not."""
    deadline = time.monotonic() + patience
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid:
            continue
        if time.monotonic() > deadline:
            me = os.getpid()
            for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
