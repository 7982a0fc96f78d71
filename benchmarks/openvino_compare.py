"""Decode throughput against OpenVINO GenAI's continuous batching, on the same GGUF file.

    python benchmarks/openvino_compare.py [--json PATH] [--quick]

8 sequences of 512 tokens; OpenVINO with its 8-bit KV cache and whatever it makes of the file's 4-bit weights, lowkv
with KIVI-2 KV and the same weights expanded to fp32: a comparison of engines as they come, not of attention kernels.
OpenVINO runs in an environment of its own (made in lowkv's cache folder, some 250 MB), in a process that takes a step
when it is told to: steps alternate, medians are compared. Where that environment cannot be made, this says so and
gives no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

from prepared import decoding, engine_of, median, profile_of, prompts, serving

from lowkv.openmp import limit_spinning

PACKAGE = "openvino-genai==2026.4.1.0"
SEQUENCES, CONTEXT, STEPS = 8, 512, 24

# Runs in OpenVINO's environment: prefills, then takes a step and prints its seconds for every line read.
_SERVER = """
import json, sys, time
import numpy, openvino, openvino_genai as genai
job = json.loads(sys.stdin.readline())
config = genai.SchedulerConfig()
config.cache_size, config.max_num_batched_tokens, config.max_num_seqs = 1, 256, 64
config.dynamic_split_fuse = True
pipeline = genai.ContinuousBatchingPipeline(job["model"], config, "CPU", {"KV_CACHE_PRECISION": "u8"})
generation = genai.GenerationConfig()
generation.max_new_tokens, generation.ignore_eos = job["max_tokens"], True
tensors = [openvino.Tensor(numpy.array([ids], numpy.int64)) for ids in job["prompts"]]
handles = [pipeline.add_request(index, tensor, generation) for index, tensor in enumerate(tensors)]
waiting = set(range(len(handles)))
while waiting:
    pipeline.step()
    waiting = {index for index in waiting if not handles[index].can_read()}
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    pipeline.step()
    print(time.perf_counter() - began, flush=True)
    assert pipeline.has_non_finished_requests(), "the requests ended early"
"""


def run(*, context: int = CONTEXT, steps: int = STEPS) -> dict[str, Any]:
    """Measure.

    Returns:
        `over_openvino_b8` (None where OpenVINO could not be had, with `reason`), and medians in seconds per step.
    """
    from lowkv.models.sources import fetch

    try:
        python = openvino_environment()
    except (subprocess.CalledProcessError, OSError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        return {"over_openvino_b8": None, "reason": f"no environment with {PACKAGE}: {reason}"}
    engine = engine_of("kivi2")
    batch = prompts(SEQUENCES, context, engine.model_config.vocab)
    max_tokens = SEQUENCES * context // 200 + steps + 64
    process = subprocess.Popen(
        [python, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        model = str(fetch(engine.recipe.model, lambda text: None))
        process.stdin.write(json.dumps({"model": model, "prompts": batch, "max_tokens": max_tokens}) + "\n")
        process.stdin.flush()
        if process.stdout.readline().strip() != "ready":
            reason = (process.stderr.read().strip().splitlines() or ["it ended without a word"])[-1]
            return {"over_openvino_b8": None, "reason": f"OpenVINO does not run here: {reason}"}
        ours = serving(engine, SEQUENCES, context + max_tokens)
        decoding(ours, batch, max_tokens)
        times: dict[str, list[float]] = {"openvino_u8": [], "kivi2": []}
        for _ in range(steps + 2):
            process.stdin.write("step\n")
            process.stdin.flush()
            times["openvino_u8"].append(float(process.stdout.readline()))
            began = time.perf_counter()
            deltas = ours.step()
            times["kivi2"].append(time.perf_counter() - began)
            assert len(deltas) == SEQUENCES, "a sequence ended early"
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
    seconds = {name: median(values[2:]) for name, values in times.items()}
    return {
        "over_openvino_b8": seconds["openvino_u8"] / seconds["kivi2"],
        "seconds_per_step": seconds,
        "profile": profile_of(ours),
        "openvino": PACKAGE,
        "context": context,
    }


def openvino_environment() -> Path:
    """The Python of an environment with OpenVINO GenAI, made the first time.

    Raises:
        CalledProcessError: pip cannot install it.
    """
    from lowkv.models.sources import cache_folder

    folder = cache_folder() / "environments" / PACKAGE.replace("==", "-")
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        print(f"installing {PACKAGE} into {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]
        subprocess.run(install, check=True, capture_output=True, text=True)
        ready.touch()
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--quick", action="store_true", help="64 tokens of context, 6 steps")
    options = parser.parse_args()
    limit_spinning(os.environ)
    result = run(context=64, steps=6) if options.quick else run()
    if result["over_openvino_b8"] is None:
        print(f"no comparison with OpenVINO: {result['reason']}")
    else:
        for name, value in result["seconds_per_step"].items():
            print(f"{name:>16}: {1e3 * value:8.1f} ms a step, {SEQUENCES / value:7.1f} tokens/s")
        parts = result["profile"].items()
        print("           kivi2:", ", ".join(f"{part[:-3].replace('_', ' ')} {ms:.1f} ms" for part, ms in parts))
        print(f"over OpenVINO, batch 8, {result['context']} context (aim 1): {result['over_openvino_b8']:.2f}x")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
