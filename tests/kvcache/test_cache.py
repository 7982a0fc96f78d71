"""The cache against the golden: what attention reads is what the plan says is stored, wherever blocks lie."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvattention import select
from kvattention.reference import as_stored, attention
from lowkv.kvcache import KVCache, SequenceCache, SlabGeometry, added, reservation

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
        group, spec = self.cache.plan.groups[self.cache.plan.group_of[layer]], self.cache.specs[layer]
        k, v = as_stored(spec, self.k[layer], self.v[layer], range(group.sink_blocks, group.cold_end(past)))
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
    ("fp16", {"window": (50, None)}),
    ("fp8", {"window": (90, None), "skip_layers": ("sliding_window",)}),
    ("kivi2", {"window": (None, 90), "residual_length": 32, "sink_tokens": 32, "overrides": {1: "k4v2"}}),
    ("kivi4", {"window": (70, None), "residual_length": 64, "residual": "flush", "sink_tokens": 0}),
]


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize(("name", "settings"), PLANS)
def test_attention_reads_what_the_plan_says(make_plan: Any, name: str, settings: dict[str, Any], kernels: str) -> None:
    """Random chunks, decodes, arrivals, departures and abandoned steps in an arena so small that blocks must be moved.

    What a step that is abandoned wrote is written again by the next one, so it may not be seen in between.
    """
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
        needed = plan.no_blocks
        for story in stories:
            count = choose.choice((1, 1, 2, 31, 32, 33, 100))
            more = added(needed, cache.need(story.sequence, count))
            if story.sequence.tokens < 300 and cache.fits(more):
                work.append((story, count))
                needed = more
        if not work:
            cache.release(stories.pop(0).sequence) if stories else None
            continue
        step = cache.prepare([(story.sequence, count) for story, count in work])
        starts = step.batches[0].query_start
        abandoned = choose.random() < 0.15
        for layer in range(2):
            q = rng.standard_normal((starts[-1], HEADS, SIZE)).astype(np.float32)
            if abandoned:
                k, v = rng.standard_normal((2, starts[-1], KV_HEADS, SIZE)).astype(np.float32)
                cache.attend(layer, q, k, v, step)
                continue
            k, v = (np.concatenate(part) for part in zip(*(s.grow(layer, n) for s, n in work), strict=True))
            out = cache.attend(layer, q, k, v, step)
            for (story, _), start, stop in zip(work, starts[:-1], starts[1:], strict=True):
                golden = story.golden(layer, q[start:stop], story.sequence.tokens)
                np.testing.assert_allclose(out[start:stop], golden, atol=1e-4)
        cache.abandon(step) if abandoned else cache.commit(step)
        cache.check_integrity()
    for story in stories:
        cache.release(story.sequence)
    assert cache.arena.bytes_used == 0
    cache.check_integrity()


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_blocks_out_of_a_window_are_used_again(make_plan: Any, name: str) -> None:
    """1,500 tokens in less than half of what they take without windows: what some layers free, others take."""
    rng = np.random.default_rng(7)
    shape = {"layers": 6, "kv_heads": KV_HEADS, "head_dim": SIZE, "window": (50,) * 5 + (None,)}
    plan = make_plan(name, **shape)
    geometry = SlabGeometry.for_plan(plan)
    cache = KVCache(plan, geometry.slabs_for(reservation(plan, 1500, 64)) * geometry.bytes, select("cpu"))
    assert cache.arena.bytes_total < make_plan(name, **shape | {"window": None}).bytes_at(1500) / 2
    story = Story(cache, rng)
    offsets: set[int] = set()
    for count in (64,) * 20 + (1, 32, 7, 1, 64, 63, 52):
        step = cache.prepare([(story.sequence, count)])
        for layer in range(6):
            q = rng.standard_normal((count, HEADS, SIZE)).astype(np.float32)
            out = cache.attend(layer, q, *story.grow(layer, count), step)
            np.testing.assert_allclose(out, story.golden(layer, q, story.sequence.tokens), atol=1e-4)
        offsets |= set(step.batches[0].table[0].tolist())
        cache.commit(step)
        cache.check_integrity()
        assert cache.arena.bytes_used == plan.bytes_at(story.sequence.tokens)
    assert story.sequence.tokens == 1500
    assert len(offsets) < 12, "47 blocks of the sliding layers lay at few places"


@pytest.mark.parametrize("window", [None, (64, None)])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_moved_blocks_keep_their_content(make_plan: Any, kernels: str, window: Any) -> None:
    """Every slab is left with one hot block; a long prompt's cold blocks need whole slabs, and more than one kind's."""
    rng = np.random.default_rng(9)
    shape = {"layers": 2, "kv_heads": KV_HEADS, "head_dim": SIZE, "window": window}
    plan = make_plan("kivi2", residual_length=32, sink_tokens=0, **shape)
    slabs = 8
    cache = KVCache(plan, slabs * SlabGeometry.for_plan(plan).bytes, select(kernels))

    def feed(story: Story, count: int) -> None:
        step = cache.prepare([(story.sequence, count)])
        for layer in range(2):
            q = rng.standard_normal((count, HEADS, SIZE)).astype(np.float32)
            out = cache.attend(layer, q, *story.grow(layer, count), step)
            np.testing.assert_allclose(out, story.golden(layer, q, story.sequence.tokens), atol=1e-4)
        cache.commit(step)
        cache.check_integrity()

    short = [Story(cache, rng) for _ in range(slabs * cache.arena.geometry.cuts[0].slots // len(plan.groups))]
    for story in short:
        feed(story, 20)
    for group in plan.groups:
        assert not cache.fits(tuple(int(kind == group.hot) for kind, _ in enumerate(plan.no_blocks)))
    for story in short:
        if story.sequence.tables[0].offsets[0] % cache.arena.geometry.units:  # not the first slot of its slab
            cache.release(story.sequence)
    short = [story for story in short if story.sequence in cache.sequences]
    assert len(short) == slabs / len(plan.groups)
    long = Story(cache, rng)
    before = [{int(s.sequence.tables[group.index].offsets[0]) for s in short} for group in plan.groups]
    feed(long, 32 * (cache.arena.geometry.cuts[1].slots + 4))
    after = [{int(s.sequence.tables[group.index].offsets[0]) for s in short} for group in plan.groups]
    assert all(one != other for one, other in zip(before, after, strict=True)), "blocks of every group have moved"
    for story in [*short, long]:
        feed(story, 1)


def test_an_abandoned_step_leaves_nothing(make_plan: Any) -> None:
    cache = KVCache(make_plan("kivi2", layers=2, window=(64, None)), 2**22, select("reference"))
    sequence = cache.add()
    cache.commit(cache.prepare([(sequence, 190)]))

    def state() -> tuple[list[int], list[list[int]]]:
        return cache.arena.used.copy(), [table.offsets.tolist() for table in sequence.tables]

    before = state()
    cache.abandon(cache.prepare([(sequence, 40)]))
    assert state() == before
    cache.check_integrity()


def test_all_groups_batches_hold_the_same_tokens(make_plan: Any) -> None:
    cache = KVCache(make_plan("kivi2", layers=3, window=(64, None, 200)), 2**24, select("reference"))
    sequences = [cache.add() for _ in range(3)]
    for count in (300, 1):
        step = cache.prepare([(sequence, count + index) for index, sequence in enumerate(sequences)])
        first = step.batches[0]
        for group, batch in zip(cache.plan.groups, step.batches, strict=True):
            np.testing.assert_array_equal(batch.query_start, first.query_start)
            np.testing.assert_array_equal(batch.past, first.past)
            assert batch.table.shape == first.table.shape
            assert (batch.table >= 0).sum() == sum(
                len(range(group.dead_end(s.tokens), group.blocks(s.tokens + n))) for s, n in step.work
            )
        cache.commit(step)


def test_preparing_what_does_not_fit_is_a_bug(make_plan: Any) -> None:
    cache = KVCache(make_plan("fp16", layers=1), 2**18, select("reference"))
    with pytest.raises(RuntimeError, match="ask `fits`"):
        cache.prepare([(cache.add(), 100_000)])
