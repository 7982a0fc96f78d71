"""What the benchmarks of this folder share: engines of the demo's model, prompts, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lowkv.engine import EngineDir
    from lowkv.serving import ServingEngine

ROOT = Path(__file__).resolve().parents[1]


def engine_of(kv_format: str) -> EngineDir:
    """The demo's engine with this KV format, built the first time."""
    from lowkv.engine import build_engine
    from lowkv.recipe import load_recipe

    name = f"smollm2-{kv_format}"
    return build_engine(load_recipe(ROOT / "build" / "recipes" / f"{name}.yaml"), ROOT / "engines" / name, force=True)


def serving(engine: EngineDir, sequences: int, tokens: int) -> ServingEngine:
    """A serving engine with room for `sequences` of `tokens` tokens."""
    from lowkv.kvcache import SlabGeometry, reservation
    from lowkv.serving import ServingEngine

    plan = engine.cache_plan
    held = reservation(plan, tokens, engine.recipe.serving.max_tokens_per_step)
    geometry = SlabGeometry.for_plan(plan)
    slabs = geometry.slabs_for(tuple(sequences * count for count in held)) + 1
    return ServingEngine.from_directory(engine, budget=slabs * geometry.bytes)


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Prompts of random token ids, the same every time: what a step costs does not depend on what they say."""
    drawn: list[list[int]] = np.random.default_rng(0).integers(100, vocab, (count, length)).tolist()
    return drawn


def decoding(engine: ServingEngine, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Submits prompts and runs the engine until all of them are past their prefill."""
    from lowkv.serving import Request, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.submit(Request(str(index), prompt, params))
    begun: set[str] = set()
    while len(begun) < len(prompts):
        begun.update(delta.request_id for delta in engine.step())


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def profile_of(engine: ServingEngine, steps: int = 5) -> dict[str, float]:
    """Mean milliseconds per step: in attention, in the rest of the model, and in Python around it."""
    attend, spent = engine.cache.attend, [0.0]

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        out = attend(*arguments)
        spent[0] += time.perf_counter() - began
        return out

    engine.cache.attend = timed  # type: ignore[method-assign]
    before = engine.stats()
    for _ in range(steps):
        engine.step()
    after = engine.stats()
    engine.cache.attend = attend  # type: ignore[method-assign]
    model = after.model_seconds_total - before.model_seconds_total
    whole = after.step_seconds_total - before.step_seconds_total
    return {
        "attention_ms": 1e3 * spent[0] / steps,
        "rest_of_model_ms": 1e3 * (model - spent[0]) / steps,
        "python_ms": 1e3 * (whole - model) / steps,
    }
