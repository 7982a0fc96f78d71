"""Kernels, attention and serving on an NVIDIA GPU, by one command.

    make gpu-check
    PYTHONPATH=.:plugins python3 benchmarks/gpu_check.py [--out reports/gpu] [--minutes 7.5] [--only kernels,attention]

Needs torch, triton and numpy, as a plain CUDA and PyTorch image has them; no TensorRT, no numba, no installed lowkv, no
model: weights are made on the spot in the shape of Llama-3-8B. Three sections, each within a share of the time:

    kernels     every case of kvattention's table against the goldens, in fp16 and bf16
    attention   one decode step of one layer against scaled_dot_product_attention, batch 1 to 256, contexts to 32k
    serving     throughput and resident sequences of every KV format at one and the same budget

What is measured is written as it comes: OUT/gpu_check.json, OUT/gpu_check.md. Exits with 0 when every check passed, 1
when one did not, 2 without a GPU. `--rehearse` runs the same code on the CPU, kernels interpreted, at toy sizes.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SECTIONS = ("kernels", "attention", "serving")


def main() -> int:
    options = _options()
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    trouble = _import_trouble()
    if trouble is None and not options.rehearse:
        trouble = _no_gpu()
    if trouble is not None:
        print(f"gpu_check: {trouble}", file=sys.stderr)
        return 2
    from gpu import attention, kernels, serving
    from gpu.report import Report

    device = "cpu" if options.rehearse else "cuda"
    fp8 = _has_fp8(device)
    if options.case is not None:  # what compute-sanitizer runs
        kernels.check_case(options.case, "f16", False, device)
        return 0
    report = Report(options.out, machine(device), 60 * options.minutes)
    if "kernels" in options.only:
        with report.section("kernels", 0.55, kernels.render) as section:
            kernels.run(section, device, fp8, options.rehearse)
    if "attention" in options.only:
        with report.section("attention", 0.5, attention.render) as section:
            attention.run(section, device, fp8, options.rehearse)
    if "serving" in options.only:
        with report.section("serving", 1.0, serving.render) as section:
            serving.run(section, device, options.rehearse)
    print(f"written: {report.page} and {report.json.name}")
    return 0 if report.passed else 1


def machine(device: str) -> dict[str, Any]:
    """What the figures were taken on."""
    import numpy as np
    import torch
    import triton

    facts: dict[str, Any] = {"device": "CPU, kernels interpreted: a rehearsal, whose figures mean nothing"}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts = {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "L2": f"{properties.L2_cache_size / 2**20:.0f} MiB",
            "driver": _driver(),
        }
    return facts | {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports/gpu"), help="folder of what is written")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for all of it")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to run, separated by commas")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, interpreted, at toy sizes")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.only = options.only.split(",")
    unknown = set(options.only) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return options


def _import_trouble() -> str | None:
    root = Path(__file__).resolve().parents[1]
    try:
        import numpy  # noqa: F401
        import torch  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error}; it needs torch, triton and numpy in {sys.executable}"
    try:
        import kvattention  # noqa: F401
        import lowkv  # noqa: F401
    except ImportError as error:
        return f"{error}; run it with PYTHONPATH={root}:{root / 'plugins'}"
    return None


def _no_gpu() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    built = "" if torch.version.cuda else " (built without CUDA)"
    return (
        f"no NVIDIA GPU that PyTorch {torch.__version__}{built} can use; run it where there is one, "
        "or with --rehearse to try the script itself"
    )


def _has_fp8(device: str) -> bool:
    import torch

    return device == "cuda" and torch.cuda.get_device_capability(0) >= (8, 9)


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


if __name__ == "__main__":
    sys.exit(main())
