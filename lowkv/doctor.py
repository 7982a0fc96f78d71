"""What this machine has, and which verbs that is enough for. Looks, and changes nothing.

Versions are read from package metadata: a broken library must not keep the report from being written.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowkv.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["ok", "missing", "wrong", "note"]

CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile")
"""What the CPU kernels gain from: 8- and 16-wide arithmetic, half-precision conversion in hardware."""

NEEDS: dict[str, tuple[str, ...]] = {
    "plan": ("numpy",),
    "build": ("numpy", "torch", "safetensors", "tokenizers", "gguf"),
    "repo": ("numpy", "torch", "safetensors", "tokenizers", "tritonclient"),
    "serve": ("numpy", "torch", "numba", "safetensors", "tokenizers", "tritonclient", "tritonserver"),
    "loadtest": ("numpy", "locust", "matplotlib", "tokenizers"),
    "eval": ("numpy", "torch", "numba", "safetensors", "tokenizers"),
}
"""Packages (and the server) that a verb cannot do without. `demo` needs them all."""

EXTRAS = {
    "torch": "cpu",
    "numba": "cpu",
    "safetensors": "cpu",
    "tokenizers": "cpu",
    "gguf": "cpu",
    "tritonclient": "triton",
    "tritonserver": "triton",
    "locust": "loadtest",
    "matplotlib": "loadtest",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `note`: neither good nor bad, or something that only makes things faster."""

    name: str
    state: State
    detail: str


def examine() -> list[Finding]:
    """Everything that was looked at, in reading order."""
    return [_python(), *_cpu(), _memory(), _gpu(), *_packages(), _tritonserver()]


def missing_for(findings: list[Finding]) -> dict[str, tuple[str, ...]]:
    """Verb -> what it still needs. Verbs that are ready have an empty tuple."""
    ok = {finding.name for finding in findings if finding.state == "ok"}
    missing = {verb: tuple(name for name in names if name not in ok) for verb, names in NEEDS.items()}
    missing["demo"] = tuple(dict.fromkeys(name for names in missing.values() for name in names))
    return missing


def to_mapping(findings: list[Finding]) -> dict[str, Any]:
    return {
        "findings": [{"name": f.name, "state": f.state, "detail": f.detail} for f in findings],
        "missing": {verb: list(names) for verb, names in missing_for(findings).items()},
    }


def render(findings: list[Finding]) -> list[Table | str]:
    """The report for a terminal, and one line for every verb that is not ready."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("what", "", "detail"):
        table.add_column(column)
    colours = {"ok": "green", "missing": "red", "wrong": "red", "note": "yellow"}
    for finding in findings:
        colour = colours[finding.state]
        table.add_row(finding.name, f"[{colour}]{finding.state}[/{colour}]", escape(finding.detail))
    missing = missing_for(findings)
    ready = [verb for verb, names in missing.items() if not names]
    lines = [f"ready: {', '.join(ready)}"]
    for verb, names in missing.items():
        if names:
            extras = ",".join(dict.fromkeys(EXTRAS[name] for name in names if name in EXTRAS))
            fix = f"pip install 'lowkv[{extras}]'" if extras else "pip install --force-reinstall lowkv"
            lines.append(escape(f"not ready: {verb} lacks {', '.join(names)}; {fix}"))
    return [table, *lines]


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")


def _cpu() -> list[Finding]:
    name, flags = "unknown", set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    cores = len(os.sched_getaffinity(0))
    has = [flag for flag in CPU_FLAGS if flag in flags]
    lacks = [flag for flag in CPU_FLAGS[:3] if flag not in flags]
    slow = f"; without {', '.join(lacks)} the CPU kernels are slow" if lacks else ""
    return [
        Finding("cpu", "ok", f"{name}, {cores} core{'s' if cores != 1 else ''} usable"),
        Finding("cpu flags", "note" if lacks else "ok", (" ".join(has) or "none that count") + slow),
    ]


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return Finding("memory", "ok", f"{format_bytes(total)}, {format_bytes(free)} of it free")


def _gpu() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("gpu", "note", "no nvidia-smi: the CPU engine is what runs here")
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode or not done.stdout.strip():
        return Finding("gpu", "note", f"nvidia-smi answers: {(done.stderr or done.stdout).strip()[:100]}")
    return Finding("gpu", "ok", "; ".join(done.stdout.strip().splitlines()))


def _packages() -> list[Finding]:
    names = dict.fromkeys(name for needed in NEEDS.values() for name in needed if name != "tritonserver")
    return [_package(name) for name in names]


def _package(name: str) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "missing", f"pip install 'lowkv[{EXTRAS[name]}]'" if name in EXTRAS else "")
    if name == "numpy" and int(version.split(".")[0]) >= 2:
        return Finding(name, "wrong", f"{version}: Triton's Python stub needs one below 2; pip install 'numpy<2'")
    return Finding(name, "ok", version)


def _tritonserver() -> Finding:
    program = shutil.which("tritonserver")
    if program is None and Path("/opt/tritonserver/bin/tritonserver").is_file():
        program = "/opt/tritonserver/bin/tritonserver"
    if program is not None:
        return Finding("tritonserver", "ok", program)
    try:
        return Finding("tritonserver", "ok", f"bundled in nvidia-pytriton {metadata.version('nvidia-pytriton')}")
    except metadata.PackageNotFoundError:
        return Finding("tritonserver", "missing", "pip install 'lowkv[triton]'")
