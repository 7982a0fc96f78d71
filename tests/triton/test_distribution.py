from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from lowkv.errors import LowkvError
from lowkv.triton.distribution import bundled_tritonserver, find_tritonserver
from lowkv.triton.ports import resolve_ports
from lowkv.triton.server import error_lines, remove_dead_regions


@pytest.mark.triton
def test_bundled_server_runs_where_it_was_laid_out(tmp_path: Path) -> None:
    found = bundled_tritonserver(tmp_path)
    assert {"--http-address", "--metrics-address", "--strict-readiness"} <= found.flags
    assert found.backends is not None
    stub = found.backends / "python" / "triton_python_backend_stub"
    # Its libraries, this Python's libpython among them, are found without LD_LIBRARY_PATH.
    clean = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    for program in (stub, found.binary, found.backends / "python" / "libtriton_python.so"):
        linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=True, env=clean).stdout
        assert "not found" not in linked
    inode = found.binary.stat().st_ino
    assert bundled_tritonserver(tmp_path).binary.stat().st_ino == inode
    assert len(list(tmp_path.iterdir())) == 1


def test_a_named_server_must_exist(tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match="no tritonserver at"):
        find_tritonserver(tmp_path)


def test_a_named_server_must_be_one(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho something else\n")
    program.chmod(0o755)
    with pytest.raises(LowkvError, match="does not run as a Triton server"):
        _ = find_tritonserver(tmp_path).flags


def test_taken_port_names_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LowkvError, match=rf"port {port} .*stop process {os.getpid()} "):
            resolve_ports("127.0.0.1", [("http", 0), ("grpc", port)])


def test_free_ports_differ() -> None:
    ports = resolve_ports("127.0.0.1", [("http", 0), ("grpc", 0), ("metrics", 0)])
    assert len(set(ports)) == 3


def test_dead_regions_are_removed_and_living_ones_kept() -> None:
    mine = Path(f"/dev/shm/lowkv_test_{os.getpid()}_a")
    dead = Path("/dev/shm/lowkv_test_4194305_a")  # above the largest pid
    try:
        mine.touch()
        dead.touch()
        remove_dead_regions("lowkv_test_")
        assert mine.exists()
        assert not dead.exists()
    finally:
        mine.unlink(missing_ok=True)
        dead.unlink(missing_ok=True)


LOG = """
I1129 20:09:22.711316 5693 model_lifecycle.cc:472] "loading: m:1"
E1129 20:09:22.709740 5693 server.cc:241] "CudaDriverHelper has not been initialized."
E1129 20:09:23.709740 5693 model_lifecycle.cc:642] "failed to load 'm' version 1: Internal: bad engine"
| m     | 1       | UNAVAILABLE: Internal: bad engine |
error: creating server: Internal - failed to load all models
"""


def test_the_servers_own_words() -> None:
    said = error_lines(LOG)
    assert said[0] == "failed to load 'm' version 1: Internal: bad engine"
    assert not any("Cuda" in line or "loading" in line for line in said)
    assert error_lines("one\ntwo\n") == ["one", "two"]
