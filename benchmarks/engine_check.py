"""TensorRT engines of a real model, built and read back on a machine without a GPU.

    python benchmarks/engine_check.py [--out reports/engines.json] [--sm 80 89 120] [--engine fp16 kivi2 ...]

SmolLM2-135M in each KV format, mixed, and with 4-bit weights, for three GPU generations: exported once, then built with
its kernels for each. What was built is read back from the network as TensorRT parsed it and compared with the recipe.
Every export and every build is a process of its own, whose memory is watched with that of the compilers that it
starts. Fails when something is not as the recipe says, or takes more than three minutes or 6 GB.

Nothing here runs an engine: that needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from prepared import ROOT

from lowkv.recipe import KVCacheConfig, Recipe, TensorRTConfig, WeightsConfig, load_recipe

SMS = (80, 89, 120)
MAX_SECONDS = 180.0
MAX_BYTES = 6 * 10**9
_BASE = ROOT / "build" / "recipes" / "smollm2-kivi2-tensorrt.yaml"


@dataclass(frozen=True)
class Engine:
    """One recipe that is checked: how it differs from the base recipe."""

    kv_cache: dict[str, Any]
    quantization: str = "none"

    def recipe(self, name: str, sm: int) -> Recipe:
        base = load_recipe(_BASE)
        return replace(
            base,
            name=f"smollm2-{name}",
            weights=WeightsConfig("float16", self.quantization, 64),  # type: ignore[arg-type]
            kv_cache=KVCacheConfig(budget=base.kv_cache.budget, **self.kv_cache),
            tensorrt=TensorRTConfig(sm),
        )


ENGINES = {
    "fp16": Engine({"format": "fp16"}),
    "fp8": Engine({"format": "fp8"}),
    "k4v2": Engine({"format": "k4v2"}),
    "kivi2": Engine({"format": "kivi2"}),
    "mixed": Engine({"format": "kivi2", "skip_layers": (0, "28-29"), "overrides": {1: "kivi4", 2: "fp8"}}),
    "int4-kivi2": Engine({"format": "kivi2"}, "int4"),
}


def check(names: list[str], sms: list[int]) -> dict[str, Any]:
    """Builds everything; the report, with what is not as it should be in `failures`."""
    from lowkv.loadtest.machine import describe_machine

    report: dict[str, Any] = {
        "machine": describe_machine(),
        "model": str(load_recipe(_BASE).model),
        "limits": {"seconds": MAX_SECONDS, "bytes": MAX_BYTES},
        "engines": [],
        "failures": [],
    }
    for name in names:
        with tempfile.TemporaryDirectory(prefix=f"engine-check-{name}-") as folder:
            exported = _watched("export", name, sms[0], Path(folder))
            for sm in sms:
                entry: dict[str, Any] = {"engine": name, "sm": sm}
                built = _watched("build", name, sm, Path(folder)) if "error" not in exported else {}
                entry |= _merged(exported, built)
                entry["failures"] = list(_failures(ENGINES[name].recipe(name, sm), entry))
                report["engines"].append(entry)
                report["failures"] += [f"{name} for SM{sm}: {failure}" for failure in entry["failures"]]
                print(_line(entry), flush=True)
    return report


def _merged(exported: dict[str, Any], built: dict[str, Any]) -> dict[str, Any]:
    seconds = {**exported.get("seconds", {}), **built.get("seconds", {})}
    merged: dict[str, Any] = {
        "seconds": {"total": round(sum(seconds.values()), 1), **seconds},
        "cpu_seconds": round(exported.get("cpu_seconds", 0) + built.get("cpu_seconds", 0), 1),
        "peak_bytes": max(exported["peak_bytes"], built.get("peak_bytes", 0)),
    }
    merged |= {key: value for key, value in built.items() if key not in merged}
    return merged | {"error": exported["error"]} if "error" in exported else merged


def _failures(recipe: Recipe, entry: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    from lowkv.kvcache.formats import FORMATS
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.sources import open_source

    if "error" in entry:
        return [entry["error"]]
    plan = CachePlan.from_config(open_source(recipe.model).config, recipe.kv_cache)
    wanted = [
        (index, FORMATS[layer.format].k.name, FORMATS[layer.format].v.name) for index, layer in enumerate(plan.layers)
    ]
    stored = recipe.weights.dtype if recipe.weights.quantization == "none" else recipe.weights.quantization
    facts = (
        ("plugin layers", [(plugin["layer"], plugin["k"], plugin["v"]) for plugin in entry["plugins"]], wanted),
        ("weights", entry["weights"], [stored]),
        ("lm_head", entry["lm_head"], recipe.lm_head.effective),
    )
    failures = [f"{what} are {got}, not {expected}" for what, got, expected in facts if got != expected]
    if entry["seconds"]["total"] > MAX_SECONDS:
        busy = f"{entry['seconds']['total']} s ({entry['cpu_seconds']} s of a core)"
        failures.append(f"{busy}, more than {MAX_SECONDS:.0f}")
    if entry["peak_bytes"] > MAX_BYTES:
        failures.append(f"{entry['peak_bytes'] / 1e9:.1f} GB of memory, more than {MAX_BYTES / 1e9:.0f}")
    return failures


def _line(entry: dict[str, Any]) -> str:
    head = f"{entry['engine']:<12} SM{entry['sm']:<4}"
    if entry["failures"]:
        return f"{head} FAILED: {'; '.join(entry['failures'])}"
    seconds, size = entry["seconds"]["total"], entry["bytes"]
    parts = (
        f"{seconds:6.1f} s, {entry['cpu_seconds']:5.1f} of a core",
        f"plan {size['plan'] / 1e6:6.1f} MB",
        f"kernels {size['kernels'] / 1e6:5.2f} MB",
        f"memory {entry['peak_bytes'] / 1e9:4.2f} GB",
        f"{len(entry['plugins'])} plugin layers",
        f"lm_head {entry['lm_head']}",
    )
    return "   ".join((head, *parts))


def _watched(step: str, name: str, sm: int, folder: Path) -> dict[str, Any]:
    """Runs a step in a process of its own; what it printed last, with the most memory it and its children held."""
    command = [sys.executable, __file__, "--step", step, "--engine", name, "--sm", str(sm), "--folder", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        peak = [0]
        watcher = threading.Thread(target=_watch_memory, args=(process, peak))
        watcher.start()
        out, err = process.communicate()
        watcher.join()
    if process.returncode:
        last = err.strip().splitlines()[-1:] or ["no message"]
        return {"error": f"{step} ended with {process.returncode}: {last[0]}", "peak_bytes": peak[0]}
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result | {"peak_bytes": max(peak[0], result["peak_bytes"])}


def _watch_memory(process: subprocess.Popen[str], peak: list[int]) -> None:
    try:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            resident = 0
            for one in (watched, *watched.children(recursive=True)):
                try:
                    resident += one.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            peak[0] = max(peak[0], resident)
            time.sleep(0.1)
    except psutil.NoSuchProcess:
        return


def _step(step: str, name: str, sm: int, folder: Path) -> dict[str, Any]:
    """In a process of its own: exports a model, or builds what was exported."""
    from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

    from lowkv.engine.progress import NoProgress
    from lowkv.engine.tensorrt.target import KERNELS, ONNX, PLAN, write_kernels
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.sources import open_source

    recipe, progress = ENGINES[name].recipe(name, sm), NoProgress()
    checkpoint = open_source(recipe.model)
    config, plan = checkpoint.config, CachePlan.from_config(checkpoint.config, recipe.kv_cache)
    started = time.monotonic()
    result: dict[str, Any] = {}
    if step == "export":
        from lowkv.engine.tensorrt.export import export_onnx

        export_onnx(checkpoint, config, plan, recipe, folder / ONNX, progress)
        result["seconds"] = {"export": round(time.monotonic() - started, 1)}
    else:
        from lowkv.engine.tensorrt.backend import choose_backend
        from lowkv.engine.tensorrt.builder import build_plan

        backend, _ = choose_backend(sm)
        report = build_plan(folder / ONNX, folder / PLAN, recipe, config, plan, backend, sm, progress)
        built = time.monotonic()
        kernels = write_kernels(folder / f"SM{sm}" / KERNELS, recipe, config, plan, sm, progress)
        result = _read_back(report) | {
            "tensorrt": str(backend),
            "seconds": {"build": round(built - started, 1), "kernels": round(time.monotonic() - built, 1)},
            "bytes": {
                "plan": (folder / PLAN).stat().st_size,
                "kernels": sum((folder / f"SM{sm}" / kernel).stat().st_size for kernel in kernels),
            },
        }
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return result | {
        "cpu_seconds": sum(one.ru_utime + one.ru_stime for one in used),
        # The system's own figure for this process knows peaks between two looks.
        "peak_bytes": used[0].ru_maxrss * 1024,
    }


def _read_back(report: dict[str, Any]) -> dict[str, Any]:
    from lowkv.engine.tensorrt.network import effective_precision

    fields = [layer["fields"] for layer in report["attention"]]
    return {
        "plugins": [{"layer": f["layer"], "k": f["k_codec"], "v": f["v_codec"], "window": f["window"]} for f in fields],
        "weights": list(dict.fromkeys(matrix["weights"] for matrix in report["matrices"])),
        "matrices": len(report["matrices"]),
        "lm_head": effective_precision(report["lm_head"]),
        "network_layers": len(report["layers"]),
        "built_layers": [layer["name"] for layer in report["builder"]["layers"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "engines.json")
    parser.add_argument("--sm", type=int, nargs="+", default=list(SMS))
    parser.add_argument("--engine", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--step", choices=("export", "build"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        print(json.dumps(_step(arguments.step, arguments.engine[0], arguments.sm[0], arguments.folder)))
        return
    report = check(arguments.engine, arguments.sm)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written: {arguments.out}")
    sys.exit(1 if report["failures"] else 0)


if __name__ == "__main__":
    main()
