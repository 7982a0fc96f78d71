"""Ports of this machine: which are free, and who holds the others.

Triton reports a taken port only after it has loaded the model, as one line among many; asking first costs a
millisecond.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

from lowkv.errors import LowkvError


def resolve_ports(host: str, wanted: Sequence[tuple[str, int]]) -> list[int]:
    """Ports for `wanted`, pairs of (what for, port); a port of 0 becomes some free one.

    All of them are held together while choosing, so that no two are the same.

    Raises:
        LowkvError: a port is taken; the message says by whom where this machine tells.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for purpose, port in wanted:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as error:
                raise LowkvError(
                    f"cannot use port {port} of {host} for {purpose}: {error.strerror}",
                    fix=f"{_holder(port)}, or choose another with --{purpose}-port (0 picks a free one)",
                ) from error
            ports.append(int(sock.getsockname()[1]))
        return ports


def _holder(port: int) -> str:
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*"):
        if sockets & _open_files(process):
            name = (process / "comm").read_text().strip()
            return f"stop process {process.name} ({name}), which holds it"
    return "stop the process that holds it"


def _open_files(process: Path) -> set[str]:
    """What a process has open; nothing for another user's process or one that has just ended."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()))
    return found


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()
                if int(columns[1].rpartition(":")[2], 16) == port and columns[3] == "0A":
                    found.add(columns[9])
    return found
