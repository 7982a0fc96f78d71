"""Section `kernels`: every case of kvattention's table on this GPU, against the goldens and the reference's arena.

In fp16 and in bf16, with FP8 queries too where there are FP8 tensor cores. Kernels are compiled on the way, which takes
longer than running them, so that the cases are spread over processes, those that share kernels in one. One small case
is run under compute-sanitizer, where that is installed.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.report import Section, table
from kvattention.cases import CASES, Case

SANITIZED = "k4v2-border-31"
TOY = ("k4v2-border-31", "e4m3-d16")
"""Cases of a rehearsal."""

PART_TOKENS = 64
"""Histories are split from this length on, so that small cases split too."""


@dataclass(frozen=True)
class Job:
    """Cases that share their kernels."""

    names: tuple[str, ...]
    hot: str
    fp8_query: bool
    device: str


def run(section: Section, device: str, fp8: bool, rehearse: bool) -> None:
    """All cases; fails the section for each that is wrong, and for those that there was no time for."""
    jobs = list(_jobs(device, fp8, rehearse))
    wanted = sum(len(job.names) for job in jobs)
    for result in _results(jobs, section, 0 if rehearse else max(1, min(12, (os.cpu_count() or 2) - 2))):
        row = section.row(**result)
        if not row["ok"]:
            section.fail(f"{row['case']} ({row['hot']}{', FP8 query' * row['fp8_query']}): {row['error']}")
    if len(section.rows) < wanted:
        section.fail(f"{wanted - len(section.rows)} of {wanted} cases were not run in time")
    _sanitize(section, device)


def check_case(name: str, hot: str, fp8_query: bool, device: str) -> float:
    """One case on this process's device. Returns the share of its tolerance that it used; AssertionError if more."""
    from kvattention.gpu.attention import GpuAttention
    from kvattention.gpu.goldens import check, in_bf16
    from kvattention.gpu.torch_device import TorchDevice

    case = CASES[name]
    attention = GpuAttention(TorchDevice(device), fp8_query=fp8_query, part_tokens=PART_TOKENS)
    return check(attention, in_bf16(case) if hot == "bf16" and case.hot == "f16" else case)


def run_job(job: Job) -> list[dict[str, Any]]:
    """In a process of its own: the rows of a job's cases."""
    rows = []
    for name in job.names:
        began = time.monotonic()
        row: dict[str, Any] = {"case": name, "hot": job.hot, "fp8_query": job.fp8_query, "ok": True}
        try:
            row["used"] = check_case(name, job.hot, job.fp8_query, job.device)
        except Exception as error:
            row |= {"ok": False, "error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        rows.append(row | {"seconds": round(time.monotonic() - began, 2)})
    return rows


def render(section: Section) -> list[str]:
    """A line per precision."""
    rows = []
    for hot, fp8_query in (("f16", False), ("bf16", False), ("f16", True), ("bf16", True)):
        found = [row for row in section.rows if (row["hot"], row["fp8_query"]) == (hot, fp8_query)]
        if found:
            right = [row for row in found if row["ok"]]
            worst = max((row["used"] for row in right), default=0.0)
            rows.append([hot + ", FP8 queries" * fp8_query, len(found), len(right), f"{worst:.0%}"])
    return table(["precision", "cases", "right", "of the tolerance, at most"], rows) if rows else []


def _jobs(device: str, fp8: bool, rehearse: bool) -> Iterator[Job]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in TOY if rehearse else CASES:
        case = CASES[name]
        for hot in ("f16",) if rehearse else ("f16", "bf16"):
            if case.hot == "bf16" and hot == "f16":
                continue
            for fp8_query in (False, True) if fp8 and _has_fp8(case) else (False,):
                groups.setdefault((hot, fp8_query, case.formats, case.head_dim, case.group_size), []).append(name)
    # Large heads take longest to compile; beginning with them keeps the last processes from waiting for one.
    for (hot, fp8_query, *_, head_dim, _), names in sorted(groups.items(), key=lambda item: -item[0][3]):
        del head_dim
        for begin in range(0, len(names), 12):
            yield Job(tuple(names[begin : begin + 12]), hot, fp8_query, device)


def _has_fp8(case: Case) -> bool:
    return ("e4m3", "e4m3") in case.formats


def _results(jobs: list[Job], section: Section, processes: int) -> Iterator[dict[str, Any]]:
    """Rows as they come, until the section's time is over. No processes: one after another in this one."""
    if not processes:
        for job in jobs:
            yield from run_job(job)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes' own: goldens in NumPy, one core each
    pool = multiprocessing.get_context("spawn").Pool(processes)
    try:
        arriving = pool.imap_unordered(run_job, jobs)
        for _ in jobs:
            try:
                yield from arriving.next(timeout=max(0.1, section.left - 60))  # the rest is the sanitizer's
            except multiprocessing.TimeoutError:
                return
    finally:
        pool.terminate()
        pool.join()


def _sanitize(section: Section, device: str) -> None:
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None or device == "cpu":
        section.note("compute-sanitizer: not installed" if program is None else "compute-sanitizer: needs a GPU")
        return
    script = Path(__file__).parents[1] / "gpu_check.py"
    command = [program, "--tool", "memcheck", sys.executable, str(script), "--case", SANITIZED]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # a block per tensor: overruns are seen
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(20.0, min(75.0, section.left)),
            check=False,
        )
    except subprocess.TimeoutExpired:
        section.note("compute-sanitizer: no verdict in time")
        return
    said = (done.stdout + done.stderr).strip()
    summary = next((line.strip("= ") for line in said.splitlines() if "ERROR SUMMARY" in line), "")
    if "Device not supported" in said or not summary:
        section.note(f"compute-sanitizer: no verdict: {said[-200:]}")
    elif done.returncode or not summary.endswith(": 0 errors"):
        section.fail(f"compute-sanitizer on {SANITIZED}: {summary}, exit status {done.returncode}: {said[:1500]}")
    else:
        section.note(f"compute-sanitizer on {SANITIZED}: {summary}")
