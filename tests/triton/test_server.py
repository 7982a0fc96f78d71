"""The server process: it starts safely, says what went wrong, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from lowkv.errors import LowkvError
from lowkv.gpus import Gpu
from lowkv.triton.client import GenerateClient
from lowkv.triton.repository import write_repository
from lowkv.triton.server import TritonServer

pytestmark = pytest.mark.triton


def regions(owner: int | None = None) -> list[str]:
    """Shared memory of the servers of one process, this one by default: others may run servers too."""
    prefix = f"lowkv_triton_{os.getpid() if owner is None else owner}_"
    return sorted(path.name for path in Path("/dev/shm").glob(prefix + "*"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.1)


def test_taken_port_is_refused_before_anything_starts(repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = TritonServer(repository, http_port=0, grpc_port=taken.getsockname()[1], metrics_port=0)
        with pytest.raises(LowkvError, match="for grpc"):
            server.start()
        assert not server.running


def test_an_engine_for_a_gpu_is_refused_before_anything_starts(
    gpu_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = write_repository(gpu_engine, tmp_path / "repo", gpus=[0, 1])
    server = TritonServer(repository, http_port=0, grpc_port=0, metrics_port=0)
    monkeypatch.setattr("lowkv.triton.server.visible_gpus", tuple)
    with pytest.raises(LowkvError, match=r"needs GPU 0, 1, .*got 'no NVIDIA GPU.*engine of target cuda.*target: cpu"):
        server.start()
    monkeypatch.setattr("lowkv.triton.server.visible_gpus", lambda: (Gpu(0, "NVIDIA L4", 89, 24 * 10**9),))
    with pytest.raises(LowkvError, match=r"needs GPU 1, .*got 'GPU 0: NVIDIA L4 \(SM89\)'.*lowkv repo --gpus"):
        server.start()
    parameters = server.repository.config.parameters | {"compute.sm": "80"}
    server.repository = replace(server.repository, config=replace(server.repository.config, parameters=parameters))
    monkeypatch.setattr("lowkv.triton.server.visible_gpus", lambda: (Gpu(0, "A", 80, 1), Gpu(1, "NVIDIA L4", 89, 1)))
    with pytest.raises(LowkvError, match=r"another GPU generation: got 'GPU 1: NVIDIA L4 \(SM89\)', expected SM80"):
        server.start()
    assert not server.running


def test_damaged_engine_is_reported_in_its_own_words(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    repository = write_repository(tmp_path / "engine", tmp_path / "repo")
    weights = max((tmp_path / "engine").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    before = regions()
    log = tmp_path / "triton.log"
    server = TritonServer(repository, http_port=0, grpc_port=0, metrics_port=0, log_file=log)
    with pytest.raises(LowkvError) as caught:
        server.start()
    assert f"{weights.name} was altered" in str(caught.value)
    assert str(log) in str(caught.value)
    assert not server.running
    assert regions() == before


def test_stopping_with_a_request_under_way_leaves_nothing(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = regions()
    said: list[str] = []
    server = TritonServer(
        repository, http_port=0, grpc_port=0, metrics_port=0, exit_timeout=1, verbose=True, progress=said.append
    )
    with server:
        assert any("starting" in line for line in said)
        assert len(regions()) > len(before)
        pids = [server.pid, *server.stub_pids()]
        assert len(pids) > 1
        assert server.model_memory() > 50 * 2**20
        # Loopback only, and no API that can load models or map memory.
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(
                urllib.request.Request(f"{server.http_url}/v2/repository/index", method="POST"), timeout=5
            )
        stream = GenerateClient(server.http_url, server.model_name).stream("x", 2000, ignore_eos=True)
        next(stream)
        log = server.log_path
    stream.close()  # type: ignore[attr-defined]
    assert not any(alive(pid) for pid in pids)
    assert regions() == before
    assert log is not None
    assert not log.exists()
    assert "Started HTTPService" in capfd.readouterr().err


OWNER = """
import sys, time
from lowkv.triton.server import TritonServer
server = TritonServer(sys.argv[1], http_port=0, grpc_port=0, metrics_port=0, exit_timeout=1).start()
print(server.http_url, server.pid, *server.stub_pids(), flush=True)
time.sleep(600)
"""


def test_a_killed_owner_leaves_nothing(repository: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, repository], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url, *numbers = owner.stdout.readline().split()
        pids = [int(number) for number in numbers]
        stream = GenerateClient(url, "tiny").stream("x", 2000, ignore_eos=True)
        next(stream)
        assert regions(owner.pid)
        owner.send_signal(signal.SIGKILL)
    wait_until_gone(pids, 15)
    stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while regions(owner.pid):
        assert time.monotonic() < deadline, regions(owner.pid)
        time.sleep(0.1)


def test_a_killed_server_is_noticed_and_cleaned_up(repository: Path) -> None:
    before = regions()
    with TritonServer(repository, http_port=0, grpc_port=0, metrics_port=0) as server:
        stubs = server.stub_pids()
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait() == 128 + signal.SIGKILL
        assert not server.running
    wait_until_gone(stubs, 5)
    assert regions() == before
