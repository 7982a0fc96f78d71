"""The cache against the golden: what attention reads is what the plan says is stored, wherever blocks lie."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvattention import select
from kvattention.reference import as_stored, attention
from lowkv.kvcache import KVCache, SequenceCache, SlabGeometry

HEADS, KV_HEADS, SIZE = 4, 2, 16


class Story:
    """One sequence's exact keys and values per layer, kept beside the cache."""

    def __init__(self, cache: KVCache, rng: np.random.Generator) -> None:
        self.cache, self.rng = cache, rng
        self.sequence: SequenceCache = cache.add()
        layers = len(cache.specs)
        self.k = [np.empty((0, KV_HEADS, SIZE), np.float32) for _ in range(layers)]
        self.v = [np.empty((0, KV_HEADS, SIZE), np.float32) for _ in range(layers)]

    def grow(self, layer: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = self.rng.standard_normal((2, count, KV_HEADS, SIZE)).astype(np.float32)
        self.k[layer] = np.concatenate((self.k[layer], k))
        self.v[layer] = np.concatenate((self.v[layer], v))
        return k, v

    def golden(self, layer: int, q: np.ndarray, past: int) -> np.ndarray:
        """Attention over the history as the plan stores it after `past` tokens, own tokens at hot precision."""
        plan, spec = self.cache.plan, self.cache.specs[layer]
        k, v = as_stored(spec, self.k[layer], self.v[layer], range(plan.sink_blocks, plan.cold_end(past)))
        return attention(q, k, v, softmax_scale=spec.softmax_scale, window=spec.window)


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("fp16", {}),
    ("bf16", {}),
    ("fp8", {}),
    ("kivi2", {"residual_length": 64, "sink_tokens": 32}),
    ("kivi2", {"residual_length": 64, "sink_tokens": 0, "residual": "flush"}),
    ("k4v2", {"residual_length": 0, "sink_tokens": 0, "overrides": {1: "kivi4"}}),
    ("kivi4", {"residual_length": 32, "sink_tokens": 32, "skip_layers": (0,), "window": 90}),
    ("fp16", {"window": 50}),
]


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize(("name", "settings"), PLANS)
def test_attention_reads_what_the_plan_says(make_plan: Any, name: str, settings: dict[str, Any], kernels: str) -> None:
    """Random chunks, decodes, arrivals and departures in an arena so small that blocks must be moved."""
    rng, choose = np.random.default_rng(5), random.Random(5)
    plan = make_plan(name, layers=2, kv_heads=KV_HEADS, head_dim=SIZE, **settings)
    cache = KVCache(plan, 26 * plan.hot_block_bytes, select(kernels))
    stories: list[Story] = []
    for _ in range(60):
        if len(stories) < 5 and choose.random() < 0.5:
            stories.append(Story(cache, rng))
        if len(stories) > 1 and choose.random() < 0.15:
            cache.release(stories.pop(choose.randrange(len(stories))).sequence)
        work: list[tuple[Story, int]] = []
        hot = cold = 0
        for story in stories:
            count = choose.choice((1, 1, 2, 31, 32, 33, 100))
            more_hot, more_cold = cache.need(story.sequence, count)
            if story.sequence.tokens < 300 and cache.fits(hot + more_hot, cold + more_cold):
                work.append((story, count))
                hot, cold = hot + more_hot, cold + more_cold
        if not work:
            cache.release(stories.pop(0).sequence) if stories else None
            continue
        step = cache.prepare([(story.sequence, count) for story, count in work])
        for layer in range(2):
            q = rng.standard_normal((step.batch.tokens, HEADS, SIZE)).astype(np.float32)
            k, v = (np.concatenate(part) for part in zip(*(s.grow(layer, n) for s, n in work), strict=True))
            out = cache.attend(layer, q, k, v, step)
            for (story, _), start, stop in zip(
                work, step.batch.query_start[:-1], step.batch.query_start[1:], strict=True
            ):
                golden = story.golden(layer, q[start:stop], story.sequence.tokens)
                np.testing.assert_allclose(out[start:stop], golden, atol=1e-4)
        cache.commit(step)
        cache.check_integrity()
    for story in stories:
        cache.release(story.sequence)
    assert cache.arena.bytes_used == 0
    cache.check_integrity()


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_moved_blocks_keep_their_content(make_plan: Any, kernels: str) -> None:
    """Every slab is left with one hot block; a long prompt's cold blocks need whole slabs."""
    rng = np.random.default_rng(9)
    plan = make_plan("kivi2", layers=2, kv_heads=KV_HEADS, head_dim=SIZE, residual_length=32, sink_tokens=0)
    cache = KVCache(plan, 6 * SlabGeometry.for_plan(plan).bytes, select(kernels))

    def feed(story: Story, count: int) -> None:
        step = cache.prepare([(story.sequence, count)])
        for layer in range(2):
            q = rng.standard_normal((count, HEADS, SIZE)).astype(np.float32)
            out = cache.attend(layer, q, *story.grow(layer, count), step)
            np.testing.assert_allclose(out, story.golden(layer, q, story.sequence.tokens), atol=1e-4)
        cache.commit(step)
        cache.check_integrity()

    short = [Story(cache, rng) for _ in range(6 * cache.arena.geometry.hot_slots)]
    for story in short:
        feed(story, 20)
    assert not cache.fits(1, 0)
    for story in short:
        if story.sequence.table[0] % cache.arena.geometry.units:  # not the first slot of its slab
            cache.release(story.sequence)
    short = [story for story in short if story.sequence in cache.sequences]
    assert not cache.arena.has_room(0, 1)
    long = Story(cache, rng)
    feed(long, 32 * 32)
    assert cache.moved_blocks > 0
    for story in [*short, long]:
        feed(story, 1)


def test_an_abandoned_step_leaves_nothing(make_plan: Any) -> None:
    cache = KVCache(make_plan("kivi2", layers=1), 2**22, select("reference"))
    sequence = cache.add()
    cache.commit(cache.prepare([(sequence, 190)]))
    before = dict(cache.arena.used), sequence.table.copy()
    cache.abandon(cache.prepare([(sequence, 40)]))
    assert (cache.arena.used, sequence.table.tolist()) == (before[0], before[1].tolist())
    cache.check_integrity()


def test_preparing_what_does_not_fit_is_a_bug(make_plan: Any) -> None:
    cache = KVCache(make_plan("fp16", layers=1), 2**18, select("reference"))
    with pytest.raises(RuntimeError, match="ask `fits`"):
        cache.prepare([(cache.add(), 100_000)])
