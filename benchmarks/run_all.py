"""Every benchmark of this folder, one after another, into one file.

    python benchmarks/run_all.py [--out reports/bench.json] [--quick]

Each runs in a process of its own, so that none inherits another's memory or thread pools. Ratios are of medians
taken in one run; larger is better, but for `engine.python_ms_per_step_32`. A benchmark that fails makes this fail,
after the others have run; the comparison with OpenVINO is null where OpenVINO cannot be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from prepared import ROOT

from lowkv.openmp import limit_spinning

BENCHMARKS = ("decode_attention", "engine_decode", "openvino_compare")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "f16c", "fma")
_PACKAGES = ("torch", "transformers", "numba", "numpy")
_ENGINE_KEYS = (
    "over_transformers_b16",
    "over_transformers_b16_fp16",
    "c16_over_c1",
    "python_ms_per_step_32",
)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    facts = {"model name": platform.processor(), "flags": ""}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in facts:
                facts[key.strip()] = value.strip()
    return {
        "cpu": facts["model name"],
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in _FLAGS if flag in facts["flags"].split()],
        "load_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": {name: metadata.version(name) for name in _PACKAGES},
    }


def run(quick: bool) -> tuple[dict[str, Any], list[str]]:
    """Runs everything; the report, and the names of benchmarks that failed."""
    environment = dict(os.environ)
    limit_spinning(environment)
    report: dict[str, Any] = {"machine": machine(), "quick": quick, "raw": {}}
    raw, failed = report["raw"], []
    with tempfile.TemporaryDirectory() as scratch:
        for name in BENCHMARKS:
            print(f"== {name}", flush=True)
            out = Path(scratch) / f"{name}.json"
            command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--json", str(out)]
            command += ["--quick"] if quick else []
            if subprocess.run(command, env=environment, check=False).returncode:
                failed.append(name)
                continue
            raw[name] = json.loads(out.read_text(encoding="utf-8"))
    if "decode_attention" in raw:
        key = "kivi2_over_sdpa_fp32"
        report["decode_attention"] = {key: raw["decode_attention"][key]}
    engine = raw.get("engine_decode", {})
    report["engine"] = {key: engine[key] for key in _ENGINE_KEYS if key in engine}
    if "openvino_compare" in raw:
        report["engine"]["over_openvino_b8"] = raw["openvino_compare"]["over_openvino_b8"]
    return report, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench.json", help="where the report goes")
    parser.add_argument("--quick", action="store_true", help="small shapes: does it run, not how fast")
    options = parser.parse_args()
    report, failed = run(options.quick)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written: {options.out}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
