"""The scheduler over a real cache, with a stand-in for the model: every sampled token is 7."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from kvattention import select
from lowkv.errors import LowkvError
from lowkv.kvcache import CachePlan, KVCache, max_resident
from lowkv.recipe import KVCacheConfig, ServingConfig
from lowkv.serving.detokenizer import IncrementalDetokenizer
from lowkv.serving.params import SamplingParams
from lowkv.serving.sampler import Sampler
from lowkv.serving.scheduler import Scheduler
from lowkv.serving.sequence import Sequence

ONE_WINDOW: tuple[int | None, ...] = (None,)
TWO_WINDOWS: tuple[int | None, ...] = (50, 50, None)


@dataclass(frozen=True)
class Tiny:
    windows: tuple[int | None, ...] = ONE_WINDOW
    kv_heads: int = 1
    head_dim: int = 32
    softmax_scale: float = 0.2

    @property
    def layers(self) -> int:
        return len(self.windows)


class Letters:
    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return "x" * len(ids)


def make(
    budget_blocks: float, name: str = "kivi2", *, windows: tuple[int | None, ...] = ONE_WINDOW, **serving: Any
) -> Scheduler:
    settings = {"residual_length": 32, "sink_tokens": 32} if name != "fp16" else {}
    plan = CachePlan.from_config(Tiny(windows), KVCacheConfig(format=name, **settings))  # type: ignore[arg-type]
    cache = KVCache(plan, int(budget_blocks * plan.hot_block_bytes), select("reference"))
    return Scheduler(cache, ServingConfig(**({"max_sequences": 16, "max_tokens_per_step": 96} | serving)))


def request(name: str, prompt: int, output: int) -> Sequence:
    params = SamplingParams(max_tokens=output)
    ids = list(range(1, prompt + 1))
    state = Sampler(5000, ()).admit(params, ids)
    return Sequence(name, ids, prompt, params, state, IncrementalDetokenizer(Letters(), ids))


def step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """One step without a model; returns what was fed and drops finished sequences."""
    work = scheduler.schedule()
    prepared = scheduler.cache.prepare([(item.cache, count) for item, count in work if item.cache is not None])
    sampled = [item for item, count in work if count == item.pending]
    scheduler.cache.commit(prepared)
    for item in sampled:
        item.token_ids.append(7)
        if item.output_length == item.params.max_tokens:
            scheduler.remove(item)
    return [(item.request_id, count) for item, count in work]


def submit(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.check(sequence)
        scheduler.add(sequence)


def test_decode_comes_first_and_prompts_share_the_rest() -> None:
    scheduler = make(100)
    submit(scheduler, request("a", 40, 10))
    assert step(scheduler) == [("a", 40)]
    submit(scheduler, request("b", 200, 10), request("c", 10, 10))
    # 96 tokens a step: one for a; 95 for b, cut at a block border; the rest for c.
    assert step(scheduler) == [("a", 1), ("b", 64), ("c", 10)]
    assert step(scheduler) == [("a", 1), ("c", 1), ("b", 64)]
    assert step(scheduler) == [("a", 1), ("c", 1), ("b", 72)]
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 1)]


def test_a_step_never_exceeds_its_token_budget() -> None:
    scheduler, rng = make(400), random.Random(1)
    submit(scheduler, *(request(str(index), rng.randint(1, 300), rng.randint(1, 20)) for index in range(40)))
    fed: dict[str, int] = {}
    while scheduler.has_work:
        work = step(scheduler)
        assert sum(count for _, count in work) <= 96
        for name, count in work:
            fed[name] = fed.get(name, 0) + count
    assert len(fed) == 40
    assert scheduler.preemptions == 0
    assert scheduler.cache.arena.bytes_used == 0


@pytest.mark.parametrize(
    ("name", "windows", "blocks"),
    [("fp16", ONE_WINDOW, 24), ("fp8", ONE_WINDOW, 24), ("kivi2", ONE_WINDOW, 24), ("kivi2", TWO_WINDOWS, 13)],
)
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_everything_finishes_in_a_small_cache(
    policy: str, name: str, windows: tuple[int | None, ...], blocks: int
) -> None:
    """More requests than the cache holds: all end, nothing leaks, and only max_utilization preempts."""
    rng = random.Random(2)
    scheduler = make(blocks, name, windows=windows, policy=policy)
    sequences = [request(str(index), rng.randint(1, 200), rng.randint(50, 300)) for index in range(60)]
    submit(scheduler, *sequences)
    steps = 0
    while scheduler.has_work:
        assert step(scheduler), "a step with work waiting does something"
        scheduler.cache.check_integrity()
        steps += 1
        assert steps < 20_000
    assert all(item.output_length == item.params.max_tokens for item in sequences)
    assert (scheduler.preemptions > 0) == (policy == "max_utilization")
    assert scheduler.cache.arena.bytes_used == 0


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make(8, "fp16", policy="max_utilization")
    submit(scheduler, request("old", 64, 150), request("young", 64, 150), request("next", 64, 150))
    while not scheduler.preemptions:
        step(scheduler)
    assert [item.request_id for item in scheduler.running] == ["old"]
    assert [item.request_id for item in scheduler.waiting][:2] == ["young", "next"]
    young = scheduler.waiting[0]
    assert young.cache is None
    assert young.pending == len(young.token_ids) > 64, "prompt and output are recomputed"


@pytest.mark.parametrize("windows", [ONE_WINDOW, TWO_WINDOWS])
@pytest.mark.parametrize("name", ["fp16", "fp8", "kivi2"])
@pytest.mark.parametrize(("prompt", "output"), [(60, 70), (300, 60)])
def test_as_many_run_as_the_planner_says(name: str, prompt: int, output: int, windows: tuple[int | None, ...]) -> None:
    scheduler = make(64, name, windows=windows, max_sequences=64)
    predicted = max_resident(
        scheduler.cache.plan, scheduler.cache.arena.budget, prompt, output, max_tokens_per_step=96
    ).sequences
    submit(scheduler, *(request(str(index), prompt, output) for index in range(2 * predicted)))
    peak = 0
    while scheduler.has_work:
        step(scheduler)
        peak = max(peak, len(scheduler.running))
    assert peak == predicted


def test_windows_let_more_run_in_the_same_bytes() -> None:
    peaks = {}
    for windows in (ONE_WINDOW * 3, TWO_WINDOWS):
        scheduler = make(64, "fp16", windows=windows, max_sequences=64)
        submit(scheduler, *(request(str(index), 300, 200) for index in range(40)))
        peak = 0
        while scheduler.has_work:
            step(scheduler)
            peak = max(peak, len(scheduler.running))
        peaks[windows] = peak
    # 64 blocks of three layers: 16 for a sequence, or 16 of one layer and 3 of two; one in prefill takes 4 more of two.
    assert peaks == {ONE_WINDOW * 3: 4, TWO_WINDOWS: 8}


def test_what_never_fits_is_refused_with_the_sizes() -> None:
    scheduler = make(8, "fp16")
    with pytest.raises(LowkvError, match=r"max_tokens.*got '200 \+ 90 tokens.*at most \d+ bytes"):
        scheduler.check(request("huge", 200, 90))
    scheduler.check(request("fits", 200, 50))


def test_a_large_request_is_not_overtaken() -> None:
    scheduler = make(16, "fp16")
    submit(scheduler, request("a", 90, 200), request("large", 300, 150), request("small", 10, 10))
    step(scheduler)
    step(scheduler)
    assert [item.request_id for item in scheduler.running] == ["a"]


def test_cancelling_frees_blocks_wherever_the_sequence_is() -> None:
    scheduler = make(16, "fp16")
    running, waiting = request("running", 300, 100), request("waiting", 300, 100)
    submit(scheduler, running, waiting)
    step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert not scheduler.has_work
    assert scheduler.cache.arena.bytes_used == 0
    scheduler.cache.check_integrity()


@pytest.mark.parametrize(("name", "slab"), [("fp16", 1), ("fp8", 1), ("kivi2", 3)])
def test_a_cache_smaller_than_one_sequence_is_refused_with_the_bytes_it_takes(name: str, slab: int) -> None:
    with pytest.raises(LowkvError, match="not even one short sequence") as caught:
        make(slab, name)
    assert caught.value.expected is not None
    enough = int(caught.value.expected.split()[2])
    blocks = enough / make(1000, name).cache.plan.hot_block_bytes
    scheduler = make(blocks, name)
    with pytest.raises(LowkvError, match=f"at least {enough} bytes"):
        make(blocks * 0.99, name)
    scheduler.check(request("a", 32, 32))
