"""Where figures were taken: every artefact says so, because none means anything elsewhere."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("lowkv", "torch", "numba", "numpy", "locust", "nvidia-pytriton")


def describe_machine() -> dict[str, Any]:
    """CPU model, usable cores, memory in bytes, system, and the versions of what computes and measures."""
    import psutil

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
