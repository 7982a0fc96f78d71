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

from lowkv.gpus import visible_gpus
from lowkv.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["ok", "missing", "wrong", "note"]

CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile")
"""What the CPU kernels gain from: 8- and 16-wide arithmetic, half-precision conversion in hardware."""

NEEDS: dict[str, tuple[str, ...]] = {
    "plan": ("numpy",),
    "build": ("numpy", "torch", "safetensors", "tokenizers", "gguf"),
    "inspect": ("numpy",),
    "calibrate": ("numpy", "torch", "safetensors", "tokenizers", "gguf"),
    "study": ("numpy", "torch", "numba", "safetensors", "tokenizers", "gguf", "matplotlib"),
    "tune": ("numpy", "torch", "numba", "safetensors", "tokenizers", "gguf"),
    "repo": ("numpy", "torch", "safetensors", "tokenizers", "tritonclient"),
    "serve": ("numpy", "torch", "numba", "safetensors", "tokenizers", "tritonclient", "tritonserver"),
    "loadtest": ("numpy", "locust", "matplotlib", "tokenizers"),
    "eval": ("numpy", "torch", "numba", "safetensors", "tokenizers"),
}
"""Packages (and the server) that a verb cannot do without. `demo` needs them all."""

TARGETS: dict[str, tuple[str, ...]] = {
    "building for target tensorrt": ("onnx", "onnxscript", "triton (kernels)", "tensorrt"),
    "running target tensorrt": ("cuda", "cuda-bindings", "tensorrt"),
    "running target cuda": ("cuda", "triton (kernels)"),
}
"""What the verbs need besides, for recipes with another target than `cpu`."""

TENSORRT = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx"),
}
"""Module -> packages that have it."""

EXTRAS = {
    "torch": "cpu",
    "numba": "cpu",
    "safetensors": "cpu",
    "tokenizers": "cpu",
    "gguf": "cpu",
    "onnx": "tensorrt",
    "onnxscript": "tensorrt",
    "triton (kernels)": "tensorrt",
    "cuda-bindings": "tensorrt",
    "tensorrt": "tensorrt",
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
    return [
        _python(),
        *_cpu(),
        _memory(),
        _gpu(),
        _cuda(),
        *_packages(),
        _tritonserver(),
        _tensorrt(),
        *(_optional(name, package) for name, package in _FOR_TENSORRT.items()),
    ]


def missing_for(findings: list[Finding]) -> dict[str, tuple[str, ...]]:
    """Verb -> what it still needs. Verbs that are ready have an empty tuple."""
    ok = {finding.name for finding in findings if finding.state == "ok"}
    missing = {verb: tuple(name for name in names if name not in ok) for verb, names in NEEDS.items()}
    missing["demo"] = tuple(dict.fromkeys(name for names in missing.values() for name in names))
    return missing


def missing_for_targets(findings: list[Finding]) -> dict[str, tuple[str, ...]]:
    """The same for recipes with another target than `cpu`: what it is for -> what it still needs."""
    ok = {finding.name for finding in findings if finding.state == "ok"}
    return {purpose: tuple(name for name in names if name not in ok) for purpose, names in TARGETS.items()}


def to_mapping(findings: list[Finding]) -> dict[str, Any]:
    return {
        "findings": [{"name": f.name, "state": f.state, "detail": f.detail} for f in findings],
        "missing": {verb: list(names) for verb, names in missing_for(findings).items()},
        "missing_for_targets": {purpose: list(names) for purpose, names in missing_for_targets(findings).items()},
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
    missing, targets = missing_for(findings), missing_for_targets(findings)
    lines = [f"ready: {', '.join(verb for verb, names in missing.items() if not names)}"]
    lines += [f"ready: {purpose}" for purpose, names in targets.items() if not names]
    for verb, names in {**missing, **targets}.items():
        if names == ("cuda",):
            lines.append(f"not ready: {verb} lacks a GPU and its driver")
        elif names:
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


def _cuda() -> Finding:
    """What the driver itself says; nvidia-smi may be missing where it answers, in a container for one."""
    gpus = visible_gpus()
    if not gpus:
        return Finding("cuda", "note", "no NVIDIA driver answers: engines for GPUs are built here and run elsewhere")
    return Finding("cuda", "ok", "; ".join(map(str, gpus)))


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


_FOR_TENSORRT = {
    "onnx": "onnx",
    "onnxscript": "onnxscript",
    "triton (kernels)": "triton",
    "cuda-bindings": "cuda-bindings",
}
"""Line of the report -> package. The compiler called triton has nothing to do with the server of that name."""


def _optional(name: str, package: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding(name, "note", f"not installed: pip install 'lowkv[{EXTRAS[name]}]'")


def _tensorrt() -> Finding:
    found = [f"{module} {version}" for module in TENSORRT for version in [_tensorrt_version(module)] if version]
    if not found:
        return Finding("tensorrt", "note", "neither tensorrt nor tensorrt_rtx: pip install 'lowkv[tensorrt]'")
    return Finding("tensorrt", "ok", ", ".join(found))


def _tensorrt_version(module: str) -> str | None:
    for package in TENSORRT[module]:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


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
