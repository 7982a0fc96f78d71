"""One Triton Inference Server process, from "start" to "nothing left".

    with TritonServer(repository, http_port=0) as server:
        requests.post(f"{server.http_url}/v2/models/...")

The server is started through `supervisor`, which cleans up even when this process is killed. Its options are safe
ones by default: loopback addresses, models fixed at start, no model-repository, shared-memory, statistics, trace or
logging API for clients (they can load files, map memory and write logs). The model configuration stays readable: it
says which KV format is being served.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

from lowkv.errors import LowkvError
from lowkv.gpus import visible_gpus
from lowkv.openmp import limit_spinning
from lowkv.triton import supervisor
from lowkv.triton.distribution import TritonDistribution, find_tritonserver
from lowkv.triton.ports import resolve_ports
from lowkv.triton.repository import Repository

_REGION_PREFIX = "lowkv_triton_"
_RESTRICTED = ("model-repository", "shared-memory", "statistics", "trace", "logging")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class TritonServer:
    """A Triton server on one model repository; a context manager.

    Args:
        repository: the folder that `write_repository` wrote.
        http_port, grpc_port, metrics_port: 0 picks a free one; None takes the recipe's.
        host: address to listen on, for all three; None takes the recipe's (the loopback address by default).
        tritonserver: the program or installation to use; None finds one.
        log_file: where the server's log goes; None makes a file in the temporary folder, which is removed when
            the server has stopped cleanly.
        verbose: also copy the log to standard error as it is written.
        ready_timeout: seconds that loading may take.
        exit_timeout: seconds that running requests are given at the end.
        progress: called with a line of text about twice a second while the server starts.
        environment: additional environment variables of the server.
        options: further tritonserver options, which win over the defaults.
    """

    def __init__(
        self,
        repository: Path | str,
        *,
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
        host: str | None = None,
        tritonserver: Path | None = None,
        log_file: Path | None = None,
        verbose: bool = False,
        ready_timeout: float = 600.0,
        exit_timeout: int = 10,
        progress: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.repository = Repository.open(Path(repository))
        settings = self.repository.triton
        self.host = host if host is not None else settings.host
        self._wanted = (
            ("http", http_port if http_port is not None else settings.http_port),
            ("grpc", grpc_port if grpc_port is not None else settings.grpc_port),
            ("metrics", metrics_port if metrics_port is not None else settings.metrics_port),
        )
        self._tritonserver = tritonserver
        self._log_file = log_file
        self._verbose = verbose
        self._ready_timeout = ready_timeout
        self._exit_timeout = exit_timeout
        self._progress = progress or (lambda text: None)
        self._environment = dict(environment or {})
        self._options = dict(options or {})
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._pump: threading.Thread | None = None
        self._stopped = threading.Event()
        self.http_port = self.grpc_port = self.metrics_port = 0
        self.pid = 0
        """tritonserver's process id."""
        self.log_path: Path | None = None

    # -- where it is -------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        return self.repository.model_name

    @property
    def http_url(self) -> str:
        """`http://HOST:PORT`, without a slash at the end."""
        return f"http://{self._reachable_host}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """`HOST:PORT`, as gRPC clients want it."""
        return f"{self._reachable_host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{self._reachable_host}:{self.metrics_port}/metrics"

    @property
    def generate_url(self) -> str:
        return f"{self.http_url}/v2/models/{self.model_name}/generate"

    @property
    def generate_stream_url(self) -> str:
        return f"{self.generate_url}_stream"

    @property
    def _reachable_host(self) -> str:
        name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"[{name}]" if ":" in name else name

    # -- life --------------------------------------------------------------------------------------------

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(keep_log=error is not None)

    def start(self) -> TritonServer:
        """Starts the server and waits until its model is ready.

        Raises:
            LowkvError: a port is taken, no server was found, the engine's GPU is not here, or the server ended or took
                too long (with its own words).
        """
        if self._supervisor is not None:
            raise RuntimeError("this server was started before; make a new TritonServer")
        check_gpus(self.repository)
        remove_dead_regions()
        distribution = find_tritonserver(self._tritonserver)
        flags = distribution.flags  # asked before the ports are chosen: it takes a moment
        self.http_port, self.grpc_port, self.metrics_port = resolve_ports(self.host, self._wanted)
        self.log_path = self._make_log()
        prefix = f"{_REGION_PREFIX}{os.getpid()}_{secrets.token_hex(4)}_"
        command = [str(distribution.binary), *self._arguments(distribution, flags, prefix)]
        self._progress(f"starting {distribution.source}")
        self._supervisor = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                supervisor.__file__,
                str(self.log_path),
                prefix,
                str(self._exit_timeout + 5),
                *command,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._child_environment(),
            start_new_session=True,  # Ctrl-C is for this process, which then stops the server in order
        )
        if self._verbose:
            self._pump = threading.Thread(target=self._copy_log, name="triton-log", daemon=True)
            self._pump.start()
        try:
            self.pid = int(_pipe(self._supervisor.stdout).readline() or 0)
            self._wait_until_ready()
        except BaseException:
            self.stop(keep_log=True)
            raise
        return self

    def stop(self, *, keep_log: bool = False) -> None:
        """Ends the server: running requests get `exit_timeout` seconds. May be called twice."""
        process = self._supervisor
        if process is None or self._stopped.is_set():
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(self._exit_timeout + 30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._stopped.set()
        if self._pump is not None:
            self._pump.join()
        if self.log_path is not None and self._log_file is None and not keep_log:
            self.log_path.unlink(missing_ok=True)

    def wait(self) -> int:
        """Blocks until the server ends by itself and returns its exit status."""
        if self._supervisor is None:
            raise RuntimeError("the server was not started")
        return self._supervisor.wait()

    @property
    def running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    # -- measuring ---------------------------------------------------------------------------------------

    def stub_pids(self) -> list[int]:
        """Process ids of the models' Python processes (the stub, and what it started)."""
        return _descendants(self.pid) if self.pid else []

    def model_memory(self) -> int:
        """Resident bytes of the model's process: weights, KV arena, code, and everything else in it."""
        return sum(_resident_bytes(pid) for pid in self.stub_pids())

    def log_text(self) -> str:
        if self.log_path is None or not self.log_path.exists():
            return ""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    # -- inside ------------------------------------------------------------------------------------------

    def _make_log(self) -> Path:
        if self._log_file is None:
            handle, name = tempfile.mkstemp(prefix="lowkv-triton-", suffix=".log")
            os.close(handle)
            return Path(name)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._log_file.write_bytes(b"")
        return self._log_file

    def _arguments(self, distribution: TritonDistribution, flags: frozenset[str], prefix: str) -> list[str]:
        closed = f"{','.join(_RESTRICTED)}:lowkv-admin={secrets.token_urlsafe(16)}"
        wanted: dict[str, str | None] = {
            "--model-repository": str(self.repository.path),
            "--http-address": self.host,
            "--http-port": str(self.http_port),
            "--grpc-address": self.host,
            "--grpc-port": str(self.grpc_port),
            "--metrics-address": self.host,
            "--metrics-port": str(self.metrics_port),
            "--model-control-mode": "none",
            "--strict-readiness": "true",
            "--exit-on-error": "true",
            "--disable-auto-complete-config": None,
            "--exit-timeout-secs": str(self._exit_timeout),
            "--allow-sagemaker": "false",
            "--allow-vertex-ai": "false",
            "--allow-gpu-metrics": "true" if self.repository.config.gpus else "false",
            "--http-restricted-api": closed,
            "--grpc-restricted-protocol": closed,
            "--grpc-infer-allocation-pool-size": "64",
            "--http-max-input-size": str(16 * 2**20),
            "--log-format": "ISO8601",
            **self._options,
        }
        if distribution.backends is not None:
            wanted["--backend-directory"] = str(distribution.backends)
        unknown = [name for name in self._options if name not in flags]
        if unknown:
            raise LowkvError(
                f"{distribution.binary} has no option {unknown[0]}", fix=f"see {distribution.binary} --help"
            )
        arguments = [name if value is None else f"{name}={value}" for name, value in wanted.items() if name in flags]
        arguments.append(f"--backend-config=python,shm-region-prefix-name={prefix}")
        # Loading imports torch and compiles kernels; the stub's default of 30 s is not meant for that.
        arguments.append(f"--backend-config=python,stub-timeout-seconds={max(30, int(self._ready_timeout))}")
        return arguments

    def _child_environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        # The stub becomes the Python that it finds first on PATH: it must be the one that has lowkv.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        environment.pop("PYTHONHOME", None)
        roots = _import_roots()
        if roots:
            environment["PYTHONPATH"] = os.pathsep.join([*roots, *filter(None, [environment.get("PYTHONPATH")])])
        threads = self.repository.threads
        if threads is not None:
            environment.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
        environment.update(self._environment)
        limit_spinning(environment)
        return environment

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        reported = 0.0
        while True:
            if not self.running:
                raise self._failure("the Triton server ended before its model was ready")
            if self._answers():
                return
            seconds = time.monotonic() - started
            if seconds > self._ready_timeout:
                raise self._failure(f"the Triton server was not ready after {seconds:.0f} s")
            if seconds - reported >= 0.5:
                reported = seconds
                first = " (kernels are compiled the first time)" if seconds > 10 else ""
                self._progress(f"loading {self.model_name}: {seconds:.0f} s{first}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self._reachable_host.strip("[]"), self.http_port, timeout=2)
        try:
            connection.request("GET", f"/v2/models/{self.model_name}/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _failure(self, what: str) -> LowkvError:
        said = error_lines(self.log_text(), on_gpu=bool(self.repository.config.gpus))
        return LowkvError(
            what + (":\n" + "\n".join(f"  {line}" for line in said) if said else ""),
            fix=f"its whole log is {self.log_path}",
        )

    def _copy_log(self) -> None:
        """Copies the log file to standard error until the server has stopped."""
        if self.log_path is None:
            return
        with self.log_path.open("rb") as log:
            while True:
                last = self._stopped.is_set()
                chunk = log.read()
                if chunk:
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()
                elif last:
                    return
                else:
                    self._stopped.wait(0.2)


def check_gpus(repository: Repository) -> None:
    """Raises `LowkvError` when this machine lacks a GPU that the repository is for, or has one of another kind."""
    found = visible_gpus()
    missing = [gpu for gpu in repository.config.gpus if gpu >= len(found)]
    if missing:
        raise LowkvError(
            f"{repository.path} needs GPU {', '.join(map(str, missing))}, which this machine does not have",
            got="; ".join(map(str, found)) or "no NVIDIA GPU, or no driver for it",
            expected=f"an NVIDIA GPU for an engine of target {repository.config.parameters['compute']}",
            fix="choose other ids with `lowkv repo --gpus`"
            if found
            else "serve it where there is one, or build the recipe with target: cpu",
        )
    built = repository.config.parameters["compute.sm"]
    for index in repository.config.gpus:
        if built not in ("any", str(found[index].sm)):
            raise LowkvError(
                f"the engine of {repository.path} was built for another GPU generation",
                got=str(found[index]),
                expected=f"SM{built}",
                fix=f"set tensorrt.sm: {found[index].sm} in the recipe and build again, or choose another GPU with "
                "`lowkv repo --gpus`",
            )


def error_lines(log: str, limit: int = 12, *, on_gpu: bool = False) -> list[str]:
    """What a Triton log says went wrong: its error lines and the status of models that did not load.

    Without any of these, its last lines. Unless `on_gpu`, that the server finds no GPU is left out.
    """
    found: list[str] = []
    for line in log.splitlines():
        text = line.strip()
        matched = re.match(r"(?:E\d{4} .*?\] |\S+Z \d+ E\S* \S+:\d+\] ?|\S+Z E .*?\] )(.*)", text)
        if matched:
            text = matched[1].strip('"')
        elif re.match(r"\|.*UNAVAILABLE", text):
            text = re.sub(r"\s+", " ", text.strip("| "))
        elif not re.match(r"(lowkv\.)?\w*(Error|Exception)\b.*:", text):
            continue
        noise = not on_gpu and ("CudaDriverHelper" in text or "NVML" in text)
        if not noise and text not in found:
            found.append(text[:600])
    if not found:
        found = [line.strip() for line in log.splitlines() if line.strip()][-limit:]
    return found[:limit]


def remove_dead_regions(prefix: str = _REGION_PREFIX) -> None:
    """Removes shared memory of servers whose owner no longer exists (a machine that lost power, kill -9 of all)."""
    for region in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108
        owner = region.name.removeprefix(prefix).split("_")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                region.unlink()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("the supervisor was started without a pipe")
    return stream


def _import_roots() -> list[str]:
    """Folders that the model must import lowkv and kvattention from, when they are not installed packages."""
    from importlib.util import find_spec

    roots: list[str] = []
    for name in ("lowkv", "kvattention"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        root = str(Path(spec.origin).resolve().parent.parent)
        if "site-packages" not in root and root not in roots:
            roots.append(root)
    return roots


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
