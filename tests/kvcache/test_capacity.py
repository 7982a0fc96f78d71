"""Reservations are true upper bounds; slabs and moving together lose little under a random load."""

from __future__ import annotations

import heapq
import random
from typing import Any

import pytest

from kvattention import select
from lowkv.kvcache import FORMATS, Arena, KVCache, SlabGeometry, max_resident, reservation

SIZES = list({(row.k.bits, row.v.bits, row.residual_length): name for name, row in FORMATS.items()}.values())
"""A format of every size that blocks and residuals come in."""


@pytest.mark.parametrize("window", [None, 100, (100, None)])
@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, {}) for name in SIZES]
    + [
        ("kivi2", {"residual": "flush"}),
        ("kivi2", {"residual_length": 0, "sink_tokens": 0}),
        ("kivi4", {"residual_length": 32, "sink_tokens": 64}),
        ("k4v2", {"group_size": 64, "residual": "flush", "sink_tokens": 0}),
    ],
)
def test_no_step_ever_exceeds_its_reservation(make_plan: Any, name: str, settings: dict[str, Any], window: Any) -> None:
    """Plays chunked prefills and decodes through the cache's own bookkeeping, counting at the worst moment."""
    rng = random.Random(3)
    plan = make_plan(name, layers=2, kv_heads=1, head_dim=16, window=window, **settings)
    cache = KVCache(plan, 400 * plan.hot_block_bytes, select("reference"))
    for _ in range(30):
        prompt, output, chunk = rng.randint(1, 700), rng.randint(1, 90), rng.choice((32, 100, 256))
        final = prompt + output - 1
        sequence = cache.add()
        while sequence.tokens < final:
            in_prompt = sequence.tokens < prompt
            count = min(chunk, prompt - sequence.tokens) if in_prompt else 1
            first = sequence.tokens == 0 and count == prompt
            most = reservation(plan, final, (count if first else chunk) if in_prompt else 0, first=first)
            step = cache.prepare([(sequence, count)])
            assert all(used <= limit for used, limit in zip(cache.arena.used, most, strict=True))
            cache.commit(step)
            cache.check_integrity()
        cache.release(sequence)
        assert cache.arena.bytes_used == 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in SIZES), ("kivi2", {"window": (512,) * 5 + (None,)})],
)
def test_less_than_five_percent_is_lost(make_plan: Any, name: str, settings: dict[str, Any]) -> None:
    """10,000 random arrivals of 50 to 4,000 tokens: when the next one does not fit, how much lies idle?

    Lost is what the budget holds beyond the blocks in use, less what the arrival that does not fit would take:
    slab rounding and fragmentation, not the coarseness of whole sequences.
    """
    rng = random.Random(11)
    plan = make_plan(name, **settings)
    geometry = SlabGeometry.for_plan(plan)
    arena: Arena[int] = Arena(geometry, 2 * 2**30)
    departures: list[tuple[float, int]] = []
    blocks: dict[int, list[int]] = {}
    clock = 0.0
    worst = total = 0.0
    refusals = moved = 0
    for arrival in range(10_000):
        clock += 1
        tokens = rng.randint(50, 4000)
        counts = plan.resident(tokens)
        while not arena.fits(counts):
            needed = plan.bytes_at(tokens)
            lost = max(0, arena.budget - arena.bytes_used - needed) / arena.budget
            worst, total, refusals = max(worst, lost), total + lost, refusals + 1
            clock, leaver = heapq.heappop(departures)
            for offset in blocks.pop(leaver):
                arena.free(offset)
        while not arena.has_room(counts):
            _, moves = arena.compact(counts)
            moved += len(moves)
            for old, new, owner in moves:
                owned = blocks[owner]
                owned[owned.index(old)] = new
        blocks[arrival] = [arena.allocate(kind, arrival) for kind, count in enumerate(counts) for _ in range(count)]
        heapq.heappush(departures, (clock + rng.expovariate(1 / 400), arrival))
    arena.check_integrity()
    assert refusals > 1000, "the load must fill the arena"
    assert worst < 0.05
    assert total / refusals < 0.02
    assert moved < 100_000


@pytest.mark.parametrize("name", SIZES)
def test_slab_waste_is_small(make_plan: Any, name: str) -> None:
    for shape in ({}, {"head_dim": 80}, {"skip_layers": ("0-3",)}, {"group_size": 128}):
        geometry = SlabGeometry.for_plan(make_plan(name, **shape))
        assert geometry.waste <= 0.02


SLIDING = (512,) * 5 + (None,)
MIXED_MODELS: dict[str, dict[str, Any]] = {
    "gemma-3-270m": {"layers": 18, "kv_heads": 1, "head_dim": 256, "window": SLIDING},
    "gemma-3-1b": {"layers": 26, "kv_heads": 1, "head_dim": 256, "window": SLIDING},
    "gemma-3-27b": {"layers": 62, "kv_heads": 16, "head_dim": 128, "window": (1024,) * 5 + (None,)},
    "gpt-oss-20b": {"layers": 24, "kv_heads": 8, "head_dim": 64, "window": (128, None)},
    "three windows": {"layers": 30, "window": (128, 512, 512, None)},
}


@pytest.mark.parametrize("skip", [(), ("sliding_window",)])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("model", MIXED_MODELS)
def test_slabs_fit_blocks_of_every_group(make_plan: Any, model: str, name: str, skip: tuple[str, ...]) -> None:
    geometry = SlabGeometry.for_plan(make_plan(name, skip_layers=skip, **MIXED_MODELS[model]))
    assert geometry.waste <= (0.005 if len(geometry.cuts) == 4 else 0.01)
    assert geometry.units <= 16 * max(cut.units for cut in geometry.cuts)


def test_one_window_gives_the_slabs_of_all_layers_together(make_plan: Any) -> None:
    """What a sliding window changes is how long blocks live, not how slabs are cut."""
    for name in SIZES:
        assert SlabGeometry.for_plan(make_plan(name, window=512)) == SlabGeometry.for_plan(make_plan(name))


@pytest.mark.parametrize(
    ("name", "settings", "cuts", "held", "capacities"),
    [
        ("fp16", {}, ((11520, 1), (11520, 1)), (94, 0), (18, 18, 20)),
        ("fp8", {}, ((11520, 1), (5760, 2)), (1, 93), (36, 36, 40)),
        ("kivi4", {}, ((11520, 5), (3600, 16)), (6, 88), (50, 50, 55)),
        ("k4v2", {}, ((11520, 1), (2880, 4)), (6, 88), (60, 59, 65)),
        ("kivi2", {}, ((11520, 3), (2160, 16)), (6, 88), (73, 73, 79)),
        ("kivi2", {"skip_layers": ("0-3",)}, ((11520, 8), (3408, 27)), (6, 88), (52, 52, 57)),
        ("kivi2", {"residual": "flush"}, ((11520, 3), (2160, 16)), (3, 91), (76, 76, 89)),
        ("kivi2", {"group_size": 128}, ((46080, 8), (7560, 49)), (3, 21), (61, 60, 64)),
        ("kivi2", {"head_dim": 80}, ((14400, 6), (2790, 31)), (6, 88), (57, 57, 62)),
        ("fp16", {"window": 512}, ((11520, 1), (11520, 1)), (17, 0), (85, 85, 85)),
        ("fp8", {"window": 512}, ((11520, 1), (5760, 2)), (1, 16), (153, 152, 161)),
        ("kivi2", {"window": 512}, ((11520, 3), (2160, 16)), (5, 12), (158, 157, 200)),
    ],
)
def test_models_with_one_window_take_what_they_always_took(
    make_plan: Any,
    name: str,
    settings: dict[str, Any],
    cuts: tuple[tuple[int, int], ...],
    held: tuple[int, int],
    capacities: tuple[int, int, int],
) -> None:
    """SmolLM2's shape: slabs, blocks of 3,000 tokens, and sequences of 2,000 + 500 tokens in 1 GiB."""
    plan = make_plan(name, **settings)
    assert tuple((cut.units, cut.slots) for cut in SlabGeometry.for_plan(plan).cuts) == cuts
    assert plan.resident(3000) == held
    found = [
        max_resident(plan, 2**30, 2000, 500, policy=policy, max_tokens_per_step=step).sequences
        for policy, step in (("guaranteed_no_evict", 0), ("guaranteed_no_evict", 256), ("max_utilization", 256))
    ]
    assert found == list(capacities)


def test_windows_multiply_the_sequences_that_fit(make_plan: Any) -> None:
    """Gemma 3 270M, 8,192 tokens: 15 of 18 layers keep 512 of them."""
    shape = MIXED_MODELS["gemma-3-270m"]
    counts = {}
    for name in ("fp16", "kivi2"):
        for window in (None, shape["window"]):
            plan = make_plan(name, **shape | {"window": window})
            counts[name, window is None] = max_resident(plan, 2**30, 8000, 192, max_tokens_per_step=256).sequences
    assert counts["fp16", False] > 4 * counts["fp16", True]
    assert counts["kivi2", False] > 3 * counts["kivi2", True]
    assert counts["kivi2", False] > 2 * counts["fp16", False]


def test_capacity_counts_whole_sequences(make_plan: Any) -> None:
    fp16, kivi2 = make_plan("fp16"), make_plan("kivi2")
    budget = 10 * 32 * fp16.hot_block_bytes  # ten sequences of 1,024 tokens
    assert max_resident(fp16, budget, 1000, 25).sequences == 10
    assert max_resident(fp16, budget, 1000, 26).sequences == 9  # one token more is one block more
    assert max_resident(kivi2, budget, 1000, 25).sequences == 28
    assert max_resident(kivi2, budget, 1000, 25, max_sequences=16).sequences == 16
    assert max_resident(kivi2, budget // 200, 1000, 25).sequences == 0


def test_max_utilization_holds_more(make_plan: Any) -> None:
    plan = make_plan("fp8")
    budget = 64 * 2**20
    reserved = max_resident(plan, budget, 200, 800, policy="guaranteed_no_evict").sequences
    held = max_resident(plan, budget, 200, 800, policy="max_utilization").sequences
    assert held > 1.4 * reserved
