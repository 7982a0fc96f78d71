"""Every implementation over the whole case table, against goldens that never see an arena.

Tolerance 1e-4 (times the size of the values where they are extreme) is what float32 sums over a few hundred tokens
need with outlier channels; errors of packing, scale, mask or block bookkeeping are a thousand times larger. Beside
the outputs, the arenas of two implementations must be equal bit for bit after every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import kvattention
from kvattention import Attention, LayerSpec, RaggedBatch
from kvattention.cases import CASES, POISON, Case, Playback, Step

TOLERANCE = 1e-4

Output = list[np.ndarray]


@pytest.fixture(scope="module", params=kvattention.IMPLEMENTATIONS)
def attention(request: pytest.FixtureRequest) -> Attention:
    return kvattention.select(request.param)


@pytest.fixture(scope="module")
def cpu() -> Attention:
    return kvattention.select("cpu")


def run(attention: Attention, playback: Playback, step: Step) -> Output:
    outputs = [
        attention.paged_attention(step.q[i], step.k[i], step.v[i], playback.arena, step.batch, layer)
        for i, layer in enumerate(playback.layers)
    ]
    attention.seal(playback.arena, step.seal, playback.layers)
    return outputs


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_golden(attention: Attention, case: Case) -> None:
    playback = Playback(case)
    for number, step in enumerate(playback):
        for layer, (output, golden) in enumerate(zip(run(attention, playback, step), step.golden, strict=True)):
            assert output.dtype == np.float32
            size = max(1.0, float(np.abs(golden).max()))
            np.testing.assert_allclose(
                output, golden, rtol=0, atol=TOLERANCE * size, err_msg=f"step {number}, layer {layer}"
            )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_arena_is_the_references_bit_for_bit(cpu: Attention, case: Case) -> None:
    ours, theirs = Playback(case), Playback(case)
    reference = kvattention.select("reference")
    for number, (step, same) in enumerate(zip(ours, theirs, strict=True)):
        run(cpu, ours, step)
        run(reference, theirs, same)
        np.testing.assert_array_equal(ours.arena, theirs.arena, err_msg=f"step {number}")


def _plain_case(pair: tuple[str, str] = ("f16", "f16"), **options: object) -> Case:
    return dataclasses.replace(Case("plain", (pair,), ((100,), (1,)), gqa=3), **options)


def test_chunks_do_not_change_a_float16_cache(attention: Attention) -> None:
    """The same 100 tokens in one step or in five: equal outputs, since nothing is stored differently."""
    whole = Playback(_plain_case())
    step = next(iter(whole))
    expected = run(attention, whole, step)[0]
    chunks = Playback(_plain_case(steps=((7,), (25,), (1,), (32,), (35,))))
    done = 0
    for part in chunks:
        n = part.batch.tokens
        for mine, all_ in ((part.q, step.q), (part.k, step.k), (part.v, step.v)):
            mine[0] = np.ascontiguousarray(all_[0][done : done + n])
        np.testing.assert_allclose(run(attention, chunks, part)[0], expected[done : done + n], atol=1e-5)
        done += n


@pytest.mark.parametrize("pair", [("int2", "int2"), ("e4m3", "e4m3")], ids="-".join)
def test_company_does_not_change_a_sequence(attention: Attention, pair: tuple[str, str]) -> None:
    """Sequences of 5 and 131 tokens together and alone: the same rows to the last bit."""
    steps = ((5, 131), (1, 1), (1, 1))
    together = Playback(_plain_case(pair, steps=steps, residual=32))
    rows = [(step, run(attention, together, step)[0]) for step in together]
    for s in range(2):
        alone = Playback(_plain_case(pair, steps=tuple((step[s],) for step in steps), residual=32))
        for part, (step, output) in zip(alone, rows, strict=True):
            mine = slice(int(step.batch.query_start[s]), int(step.batch.query_start[s + 1]))
            part.q[0], part.k[0], part.v[0] = (np.ascontiguousarray(x[0][mine]) for x in (step.q, step.k, step.v))
            np.testing.assert_array_equal(run(attention, alone, part)[0], output[mine])


def test_sealing_equals_writing_cold(attention: Attention) -> None:
    """96 tokens appended one by one and sealed leave the bytes that one prefill writes straight to cold blocks."""
    slow = Playback(_plain_case(("int4", "int2"), steps=tuple((1,) for _ in range(96)), residual=0))
    fast = Playback(_plain_case(("int4", "int2"), steps=((96,),), residual=0))
    prefill = next(iter(fast))
    run(attention, fast, prefill)
    for t, step in enumerate(slow):
        step.k[0], step.v[0] = prefill.k[0][t : t + 1], prefill.v[0][t : t + 1]
        run(attention, slow, step)
        last = step
    layer = slow.layers[0]
    sealed = {block: int(last.batch.table[0, block]) for block in range(2)}
    sealed[2] = int(last.seal[0, 1])
    for block, offset in sealed.items():
        ours = layer.record(slow.arena, offset, cold=True)
        theirs = layer.record(fast.arena, int(prefill.batch.table[0, block]), cold=True)
        np.testing.assert_array_equal(ours, theirs)


def test_extreme_values_stay_within_the_values_seen(attention: Attention) -> None:
    playback = Playback(CASES["int2-extreme"])
    for step in playback:
        for output in run(attention, playback, step):
            assert np.isfinite(output).all()
            assert np.abs(output).max() <= 65504 * 1.01


def test_strided_inputs_and_a_given_output(cpu: Attention) -> None:
    """q, k, v as slices of one fused projection."""
    first, second = Playback(_plain_case()), Playback(_plain_case())
    a, b = next(iter(first)), next(iter(second))
    expected = run(cpu, first, a)[0]
    fused = np.concatenate([x[0].reshape(100, -1) for x in (b.q, b.k, b.v)], axis=1)
    q, k, v = np.split(fused, np.cumsum([6 * 64, 2 * 64]), axis=1)
    views = [x.reshape(100, -1, 64) for x in (q, k, v)]
    assert all(np.shares_memory(x, fused) for x in views)
    out = np.full((100, 6, 64), np.nan, np.float32)
    assert cpu.paged_attention(*views, second.arena, b.batch, second.layers[0], out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_thread_count_does_not_change_results(threads: int) -> None:
    outputs = []
    for count in (None, threads):
        attention = kvattention.select("cpu", threads=count)
        playback = Playback(CASES["plan-mixed"])
        outputs.append([output for step in playback for output in run(attention, playback, step)])
    for ours, theirs in zip(*outputs, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_move(attention: Attention) -> None:
    arena = kvattention.arena_words(16 * 12)
    arena[:] = np.arange(arena.size)
    expected = arena.copy()
    expected[16 * 9 : 16 * 11], expected[16 * 6 : 16 * 8] = arena[: 16 * 2], arena[16 * 3 : 16 * 5]
    attention.move(arena, np.array([[0, 9], [3, 6]], np.int32), 32)
    np.testing.assert_array_equal(arena, expected)


def test_columns_that_left_the_window_are_not_read(attention: Attention) -> None:
    playback = Playback(_plain_case(("int2", "int2"), steps=((200,), (1,), (1,)), windows=(40,), residual=0))
    for step in playback:
        np.testing.assert_allclose(run(attention, playback, step)[0], step.golden[0], atol=TOLERANCE)
    assert step.batch.table[0, 0] == -1  # the case does drop blocks
    assert (playback.arena == POISON).any()


Break = Callable[[Step], dict[str, np.ndarray]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: {"q": step.q[0].astype(np.float64)}, "q is float64"),
        (lambda step: {"k": step.k[0][:-1]}, "k is float32"),
        (lambda step: {"v": np.asfortranarray(step.v[0])}, "v has strides"),
        (lambda step: {"q": np.zeros((100, 7, 64), np.float32)}, "7 query heads over 2 KV heads"),
        (lambda step: {"out": np.zeros((100, 6, 64), np.float64)}, "out is float64"),
        (lambda step: {"arena": np.zeros(1024, np.int64)}, "arena is int64"),
    ],
)
def test_misfits_are_refused(cpu: Attention, change: Break, message: str) -> None:
    playback = Playback(_plain_case())
    step = next(iter(playback))
    arguments = {"q": step.q[0], "k": step.k[0], "v": step.v[0], "arena": playback.arena, **change(step)}
    with pytest.raises(ValueError, match=message):
        cpu.paged_attention(batch=step.batch, layer=playback.layers[0], **arguments)


def test_batch_check_names_the_sequence() -> None:
    def batch(**change: list[int]) -> RaggedBatch:
        fields: dict[str, object] = {
            "query_start": [0, 40],
            "past": [0],
            "table": [[0, 100]],
            "cold_begin": [0],
            "cold_end": [0],
            "direct_end": [1],
        }
        return RaggedBatch(**{name: np.array(value, np.int32) for name, value in {**fields, **change}.items()})

    batch().check(32, 16 * 200)
    for change, message in (
        ({"table": [[0, -1]]}, "block 1 is written to"),
        ({"table": [[0]]}, "only 1 columns"),
        ({"cold_end": [1]}, "cold_end 1 lies beyond"),
        ({"direct_end": [2]}, "direct_end 2 lies beyond"),
        ({"query_start": [0, 0]}, "give every sequence a token"),
    ):
        with pytest.raises(ValueError, match=message):
            batch(**change).check(32, 16 * 200)
    with pytest.raises(ValueError, match="needs query_start"):
        batch(query_start=[0, 1, 2])


def test_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="'gpu3' is not known"):
        kvattention.select("gpu3")


def test_layers_are_forgotten_with_their_spec(cpu: Attention) -> None:
    import gc
    import weakref

    playback = Playback(_plain_case())
    run(cpu, playback, next(iter(playback)))
    layer: weakref.ref[LayerSpec] = weakref.ref(playback.layers[0])
    del playback
    gc.collect()
    assert layer() is None
