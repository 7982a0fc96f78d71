"""The TensorRT executor over stand-ins for CUDA and TensorRT: whole requests, what is captured, what is copied."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowkv.errors import LowkvError
from lowkv.kvcache import SequenceCache
from lowkv.recipe import ServingConfig
from lowkv.serving import SamplingParams, ServingEngine

Rig = Any
MakeRig = Callable[..., Rig]
VOCAB = 300


class Letters:
    """A tokenizer of one letter per token."""

    eos_ids = ()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(char) % VOCAB for char in text]

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return "x" * len(ids)


def serving(rig: Rig, **settings: Any) -> ServingEngine:
    config = ServingConfig(**({"max_sequences": rig.max_sequences, "max_tokens_per_step": rig.max_tokens} | settings))
    return ServingEngine(rig.executor, Letters(), config, vocab=rig.vocab, max_model_len=4096)  # type: ignore[arg-type]


def formula(rig: Rig, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(rig.after(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


def prompts(count: int, high: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, high))] for _ in range(count)]


def feed(rig: Rig, work: list[tuple[SequenceCache, int]], rows: list[int]) -> Any:
    """One step of made-up tokens; returns its candidates."""
    cache = rig.executor.cache
    step = cache.prepare(work)
    found = rig.executor.execute(np.arange(step.batches[0].tokens) % VOCAB, step, np.array(rows, np.int64))
    cache.commit(step)
    return found


@pytest.mark.parametrize("windows", [(None, None), (100, None)])
@pytest.mark.parametrize("name", ["fp16", "kivi2"])
def test_answers_are_the_models_whatever_is_padded_captured_and_sealed(rig: MakeRig, name: str, windows: Any) -> None:
    made = rig(name, windows=windows)
    engine = serving(made)
    texts = prompts(40, 300)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=True)
    for text, completion in zip(texts, engine.generate(texts, params), strict=True):
        assert completion.token_ids == formula(made, text, 40)
        expected = [-(0.5 + token) for token in completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-6)
    assert {profile for profile, _ in made.engine.steps} == {0, 1}
    assert made.driver.graphs > 0
    assert ("cuLaunchKernel" in made.driver.calls) == (name == "kivi2")  # only seals are launched by the cache
    assert engine.stats().kv_bytes_used == 0


def test_one_copy_in_and_one_out_per_step(rig: MakeRig) -> None:
    made = rig()
    sequences = [made.executor.cache.add() for _ in range(5)]
    for rows in ([], [39, 79], [0, 1, 2, 3, 4]):
        work = [(s, 1) for s in sequences] if len(rows) == 5 else [(s, 40) for s in sequences[:2]]
        made.driver.calls.clear()
        feed(made, work, rows)
        copies = [name for name in made.driver.calls if name.startswith("cuMemcpy")]
        assert copies == ["cuMemcpyHtoDAsync"] + ["cuMemcpyDtoHAsync"] * bool(rows)
        assert made.driver.calls.count("cuStreamSynchronize") == bool(rows)


def test_a_decode_step_is_enqueued_then_captured_then_replayed(rig: MakeRig) -> None:
    made = rig()
    sequences = [made.executor.cache.add() for _ in range(6)]
    contexts = made.engine.contexts
    seen = []
    for count in (5, 5, 6, 7, 5, 1):  # 5 to 8 sequences share a graph; one alone has its own
        while len(sequences) < count:
            sequences.append(made.executor.cache.add())
        made.driver.calls.clear()
        found = feed(made, [(s, 1) for s in sequences[:count]], list(range(count)))
        assert [int(ids[0]) for ids in found.ids] == [
            made.after(token, s.tokens - 1) for token, s in enumerate(sequences[:count])
        ]
        seen.append(tuple(name for name in made.driver.calls if "Capture" in name or name == "cuGraphLaunch"))
    captured = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphLaunch")
    replayed = ("cuGraphLaunch",)
    assert seen == [(), captured, replayed, replayed, replayed, ()]
    assert made.engine.contexts == contexts + 2
    assert {shapes["tokens"] for _, shapes in made.engine.steps} == {(8,), (1,)}


def test_a_step_that_cannot_be_captured_yet_is_enqueued(rig: MakeRig) -> None:
    made = rig()
    made.engine.ready = False
    sequence = made.executor.cache.add()
    for _ in range(3):
        feed(made, [(sequence, 1)], [0])
    assert made.driver.graphs == 0
    made.engine.ready = True
    feed(made, [(sequence, 1)], [0])
    assert made.driver.graphs == 1
    assert len(made.engine.steps) == 4


def test_graphs_that_were_not_used_for_long_are_dropped(rig: MakeRig) -> None:
    made = rig(graphs=2)
    sequences = [made.executor.cache.add() for _ in range(8)]

    def decode(count: int, times: int = 2) -> None:
        for _ in range(times):
            feed(made, [(s, 1) for s in sequences[:count]], list(range(count)))

    decode(1)
    decode(2)
    assert made.driver.graphs == 2
    decode(1, 1)  # now 2 is the oldest
    decode(4)
    assert made.driver.graphs == 2
    before = len(made.driver.calls)
    decode(1, 1)
    assert "cuGraphLaunch" in made.driver.calls[before:]
    before = len(made.driver.calls)
    decode(2, 1)
    assert "cuGraphLaunch" not in made.driver.calls[before:]


def test_prompts_and_mixtures_go_through_the_prefill_profile(rig: MakeRig) -> None:
    made = rig()
    first, second = made.executor.cache.add(), made.executor.cache.add()
    feed(made, [(first, 33)], [32])
    feed(made, [(first, 1), (second, 50)], [0, 50])
    feed(made, [(first, 1), (second, 1)], [0])  # one of them is a prompt that goes on
    feed(made, [(first, 1), (second, 1)], [0, 1])
    assert [profile for profile, _ in made.engine.steps] == [0, 0, 0, 1]
    assert [shapes["tokens"] for _, shapes in made.engine.steps] == [(33,), (51,), (2,), (2,)]


def test_what_tensorrt_refuses_is_said_in_its_words(rig: MakeRig) -> None:
    made = rig()
    made.engine.failing = True
    cache = made.executor.cache
    step = cache.prepare([(cache.add(), 1)])
    with pytest.raises(LowkvError, match="could not run a step: out of luck"):
        made.executor.execute(np.zeros(1, np.int64), step, np.zeros(1, np.int64))
    cache.abandon(step)
    wide = [(cache.add(), 1) for _ in range(made.max_sequences + 1)]
    with pytest.raises(LowkvError, match=r"could not take tokens of shape \(97,\)"):
        feed(made, [(wide[0][0], made.max_tokens + 1)], [0])
