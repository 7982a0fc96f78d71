"""The serving engine on a tiny real model: answers do not depend on who else is served, or how."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowkv.errors import LowkvError
from lowkv.kvcache import FORMATS
from lowkv.recipe import ScalesConfig
from lowkv.serving import Completion, Delta, EngineLoop, Request, SamplingParams, ServingEngine

Build = Callable[..., Path]
QUANTIZED = [name for name, row in FORMATS.items() if not row.model_precision]


def prompts(count: int, low: int = 1, high: int = 400) -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(256) for _ in range(rng.randint(low, high))] for _ in range(count)]


def greedy(output: int = 40, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=output, ignore_eos=True, logprobs=True, **settings)


def alone(path: Path, texts: list[list[int]], params: SamplingParams) -> list[Completion]:
    engine = ServingEngine.load(path)
    return [engine.generate([text], params)[0] for text in texts]


def same(left: list[Completion], right: list[Completion], tolerance: float = 1e-4) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance)


def stored_as(name: str, **settings: Any) -> dict[str, Any]:
    """The recipe's `kv_cache`; 8-bit integers are nothing without scales."""
    scales = {"scales": ScalesConfig(source="random")} if FORMATS[name].needs_scales else {}
    return {"format": name, **scales, **settings}


@pytest.mark.parametrize("name", FORMATS)
def test_alone_and_in_a_full_batch(build_tiny: Build, name: str) -> None:
    """Whole prompts in one step each (the step budget is larger), so that nothing else is stored."""
    texts = prompts(12, high=120)
    path = build_tiny(stored_as(name, budget=64 * 2**20), {"max_tokens_per_step": 2048})
    same(alone(path, texts, greedy()), ServingEngine.load(path).generate(texts, greedy()))


@pytest.mark.parametrize("chunk", [16, 33, 128, 1000])
def test_chunk_size_changes_nothing_in_model_precision(build_tiny: Build, chunk: int) -> None:
    texts = prompts(6)
    whole = build_tiny({"format": "fp16"}, {"max_tokens_per_step": 2048})
    chunked = build_tiny({"format": "fp16"}, {"max_tokens_per_step": chunk, "max_sequences": 6})
    same(alone(whole, texts, greedy()), ServingEngine.load(chunked).generate(texts, greedy()))


@pytest.mark.parametrize("name", QUANTIZED)
def test_chunks_within_the_residual_change_nothing(build_tiny: Build, name: str) -> None:
    """A prompt no longer than residual and sink is read in model precision, however it is cut."""
    limit = max(31, FORMATS[name].residual_length)
    texts = prompts(6, high=limit)
    whole = build_tiny(stored_as(name), {"max_tokens_per_step": 2048})
    chunked = build_tiny(stored_as(name), {"max_tokens_per_step": 32, "max_sequences": 8})
    output = 1 if FORMATS[name].residual_length == 0 else 40
    same(alone(whole, texts, greedy(output)), ServingEngine.load(chunked).generate(texts, greedy(output)))


def test_preempted_and_resumed(build_tiny: Build) -> None:
    texts = prompts(8, low=100)
    roomy = build_tiny({"format": "fp16", "budget": 64 * 2**20})
    tight = build_tiny({"format": "fp16", "budget": 2**19}, {"policy": "max_utilization"})
    engine = ServingEngine.load(tight)
    completions = engine.generate(texts, greedy(120))
    assert engine.stats().preempted_total > 0
    same(alone(roomy, texts, greedy(120)), completions)
    assert engine.stats().kv_bytes_used == 0
    engine.cache.check_integrity()


@pytest.mark.parametrize("name", QUANTIZED)
def test_preemption_of_quantized_formats_leaks_nothing(build_tiny: Build, name: str) -> None:
    """What recomputation stores may differ (docs/serving.md), but all end, at their lengths, and nothing leaks."""
    texts = prompts(10, low=20, high=60)
    engine = ServingEngine.load(build_tiny(stored_as(name, budget=2**18), {"policy": "max_utilization"}))
    completions = engine.generate(texts, greedy(400))
    assert engine.stats().preempted_total > 0
    assert [len(item.token_ids) for item in completions] == [400] * 10
    assert engine.stats().kv_bytes_used == 0
    engine.cache.check_integrity()


def test_seeded_sampling_ignores_the_batch(build_tiny: Build) -> None:
    texts = prompts(6, high=100)
    params = greedy(30, temperature=0.9, top_p=0.9, top_k=50, seed=11)
    path = build_tiny({"format": "fp16"})
    same(alone(path, texts, params), ServingEngine.load(path).generate(texts, params))


def test_streamed_text_is_the_whole_text(build_tiny: Build) -> None:
    engine = ServingEngine.load(build_tiny())
    engine.submit(Request("a", "Größe – 気", greedy(60, temperature=1.0, seed=3)))
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
    ids = [token for delta in deltas for token in delta.token_ids]
    assert "".join(delta.text for delta in deltas) == engine.tokenizer.decode(ids)
    assert [delta.num_output_tokens for delta in deltas] == list(range(1, 61))
    assert deltas[-1].finish_reason == "length"


def test_stop_string_ends_the_answer(build_tiny: Build) -> None:
    engine = ServingEngine.load(build_tiny({"format": "fp16"}))
    free = engine.generate(["stop here"], greedy(40))[0]
    stop = free.text[10:13]
    stopped = engine.generate(["stop here"], greedy(40, stop=(stop,)))[0]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "output", "message"),
    [
        ("", 5, r"text_input.* is empty"),
        ([1, 999], 5, "token id that the model does not have: got 999"),
        ("x" * 2000, 100, r"max_tokens exceed.*got '2000 \+ 100 tokens', expected at most 2048"),
        ("x" * 1800, 200, r"more KV cache than there is"),
    ],
)
def test_bad_requests_change_nothing(build_tiny: Build, prompt: Any, output: int, message: str) -> None:
    engine = ServingEngine.load(build_tiny({"format": "fp16", "budget": 2**18}))
    with pytest.raises(LowkvError, match=message):
        engine.submit(Request("bad", prompt, SamplingParams(max_tokens=output)))
    assert not engine.has_work
    assert len(engine.generate(["good"], greedy(3))[0].token_ids) == 3


def test_request_ids_are_unique(build_tiny: Build) -> None:
    engine = ServingEngine.load(build_tiny())
    engine.submit(Request("a", "x", greedy(3)))
    with pytest.raises(LowkvError, match="in use"):
        engine.submit(Request("a", "y", greedy(3)))


def test_a_failing_step_ends_its_requests_and_leaks_nothing(build_tiny: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ServingEngine.load(build_tiny())
    engine.submit(Request("a", "x" * 300, greedy(3)))
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "attend", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    (delta,) = engine.abort_all(LowkvError("failed"))
    assert delta.finish_reason == "error"
    assert engine.stats().kv_bytes_used == 0
    engine.cache.check_integrity()
    assert len(engine.generate(["good"], greedy(3))[0].token_ids) == 3


def test_loop_serves_many_threads_and_cancels(build_tiny: Build) -> None:
    """1,000 requests from 4 threads, a third of them cancelled at random: every one ends once, no block is left."""
    engine = ServingEngine.load(build_tiny({"budget": 2**20}))
    last: dict[str, Delta] = {}
    done = threading.Semaphore(0)

    def on_delta(delta: Delta) -> None:
        if delta.finished:
            assert delta.request_id not in last
            last[delta.request_id] = delta
            done.release()

    loop = EngineLoop(engine, on_delta)

    def client(number: int) -> None:
        rng = random.Random(number)
        for index in range(250):
            name = f"{number}-{index}"
            loop.submit(Request(name, "y" * rng.randint(1, 250), greedy(rng.randint(1, 30))))
            if rng.random() < 0.33:
                loop.cancel(name)
            if index % 8 == 7:
                done.acquire()
                done.release()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(1000):
        assert done.acquire(timeout=60)
    loop.stop()
    assert len(last) == 1000
    assert {delta.finish_reason for delta in last.values()} == {"length", "cancelled"}
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_bytes_used) == (0, 0, 0)
    engine.cache.check_integrity()


def test_stopping_the_loop_ends_what_runs(build_tiny: Build) -> None:
    seen: list[Delta] = []
    loop = EngineLoop(ServingEngine.load(build_tiny()), seen.append)
    loop.submit(Request("long", "z", greedy(1500)))
    loop.stop()
    assert seen[-1].finish_reason == "error"
    with pytest.raises(LowkvError, match="shutting down"):
        loop.submit(Request("late", "z", greedy(1)))
