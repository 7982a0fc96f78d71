"""The kernels over the case table: interpreted in fp16 on any machine, compiled and in bf16 too on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import kvattention
from kvattention.cases import CASES, POISON, Case, Playback
from kvattention.gpu.attention import GpuAttention
from kvattention.gpu.goldens import in_bf16

NewAttention = Callable[..., GpuAttention]

# Left out where kernels are interpreted, at seconds each: what they cover is covered by the cases named.
REPEATED = {
    "f16-sinks": "e4m3-sinks and plan-mixed",
    "int4-mixture": "k4v2-sinks and int2-mixture",
    "k4v2-mixture": "k4v2-sinks and int2-mixture",
    **dict.fromkeys(
        [f"k4v2-{values}" for values in ("outlier", "constant", "extreme")], "int4 and int2 of these values"
    ),
    **dict.fromkeys(["f16-outlier", "f16-constant"], "f16-mixture and f16-extreme"),
    "int4-sinks": "k4v2-sinks",
    "int2-sinks": "k4v2-sinks",
    "int4-window": "e4m3-window and int2-window",
    "k4v2-window": "e4m3-window and int2-window",
    "plan-windows": "plan-all-windows",
    **dict.fromkeys([f"int2-gqa{n}" for n in (2, 4, 6, 7)], "int2-gqa 1, 3, 5, 8, 12"),
    **dict.fromkeys([f"{name}-d{d}" for name in ("int4", "int2") for d in (96, 256)], "k4v2 and e4m3 of that head_dim"),
    **dict.fromkeys([f"{name}-d128" for name in ("int4", "int2", "e4m3")], "e4m3-sinks and k4v2-sinks"),
    **dict.fromkeys(
        [f"{name}-g{g}" for name in ("int4", "f16") for g in (64, 128)], "k4v2 and e4m3 of that group_size"
    ),
    "int2-g64": "k4v2-g64",
    # The younger codecs differ in how one value is written and read, and in nothing else.
    **{
        f"{name}-{rest}": "the codec's channels, outlier and constant"
        for name in ("e5m2", "int8", "int2c")
        for rest in ("mixture", "sinks", "window", "g64", "g128", "extreme")
    },
    **{f"{name}-{values}": f"{name} per channel" for name in ("e5m2", "int8") for values in ("outlier", "constant")},
    **dict.fromkeys(["int8-channels", "e4m3-channels", "e4m3-channels-d80", "e5m2-channels-d80"], "int8-channels-d80"),
    "plan-channels": "plan-mixed and the codecs' own cases",
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_golden(case: Case, new_attention: NewAttention, stage: SimpleNamespace, gpu: bool) -> None:
    if not gpu and case.hot == "bf16":
        pytest.skip("Triton's interpreter computes wrongly in bf16")
    if not gpu and case.name in REPEATED:
        pytest.skip(f"slow when interpreted, and covered by {REPEATED[case.name]}")
    stage.check(new_attention(), case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES.values() if c.hot == "f16"], ids=lambda case: case.name)
def test_matches_the_golden_in_bf16(case: Case, new_attention: NewAttention, stage: SimpleNamespace) -> None:
    stage.check(new_attention(), in_bf16(case))


@pytest.mark.parametrize("name", ["e4m3-window", "e4m3-d80", "e4m3-outlier", "e4m3-channels"])
def test_fp8_queries(name: str, new_attention: NewAttention, stage: SimpleNamespace) -> None:
    stage.check(new_attention(fp8_query=True), CASES[name])


def test_fp8_queries_are_not_the_default(new_attention: NewAttention, stage: SimpleNamespace) -> None:
    """The two paths differ by more than the default's tolerance: else the tests above compared one with itself."""
    attention = new_attention(fp8_query=True)
    stage.check(attention, CASES["e4m3-g64"])
    with pytest.raises(AssertionError, match="instead of"):
        stage.check(attention, CASES["e4m3-g64"], fp8_query=False)


@pytest.mark.parametrize("pair", [("int2", "int2"), ("e4m3", "e4m3")], ids="-".join)
def test_company_does_not_change_a_sequence(
    pair: tuple[str, str], new_attention: NewAttention, stage: SimpleNamespace
) -> None:
    """Sequences of 5 and 131 tokens together and alone, split in parts as well: the same rows to the last bit."""
    steps = ((5, 131), (1, 1), (2, 1))
    case = Case("company", (pair,), steps, gqa=3, residual=32)
    together = list(stage.play(new_attention(part_tokens=32), case))
    for s in range(2):
        alone = Playback(dataclasses.replace(case, steps=tuple((step[s],) for step in steps)))
        attention = new_attention(part_tokens=32)
        arena = attention.allocate(alone.arena.size)
        for step, whole in zip(alone, together, strict=True):
            mine = slice(int(whole.step.batch.query_start[s]), int(whole.step.batch.query_start[s + 1]))
            step.q[0], step.k[0], step.v[0] = (x[0][mine] for x in (whole.step.q, whole.step.k, whole.step.v))
            output = stage.run_layer(attention, arena, step, 0, alone.layers[0])
            attention.seal(arena, step.seal, alone.layers)
            np.testing.assert_array_equal(output, whole.outputs[0][mine])


def test_splitting_hardly_changes_the_result(new_attention: NewAttention, stage: SimpleNamespace) -> None:
    case = Case("split", (("int4", "int2"),), ((150,), (1,), (6,)), gqa=3, residual=32)
    whole, split = (list(stage.play(new_attention(part_tokens=n), case)) for n in (256, 32))
    for a, b in zip(whole, split, strict=True):
        np.testing.assert_allclose(a.outputs[0], b.outputs[0], rtol=0, atol=2e-3)
    assert any((a.outputs[0] != b.outputs[0]).any() for a, b in zip(whole, split, strict=True))  # it did split


def test_strided_inputs_and_a_given_output(new_attention: NewAttention) -> None:
    """q, k, v as slices of one fused projection."""
    import torch

    playback = Playback(Case("fused", (("int2", "int2"),), ((40,),), gqa=3))
    step, layer = next(iter(playback)), playback.layers[0]
    attention = new_attention()
    arena = attention.allocate(playback.arena.size)
    flat = [torch.from_numpy(x[0]).half().reshape(40, -1) for x in (step.q, step.k, step.v)]
    fused = torch.cat(flat, dim=1).to(attention.device.device)
    views = [x.reshape(40, -1, 64) for x in fused.split([x.shape[1] for x in flat], dim=1)]
    assert views[2].stride() == (10 * 64, 64, 1)
    expected = attention.paged_attention(*(x.contiguous() for x in views), arena, step.batch, layer)
    out = torch.full((40, 6, 64), torch.nan, dtype=torch.float16, device=fused.device)
    assert attention.paged_attention(*views, arena, step.batch, layer, out) is out
    assert torch.equal(out, expected)


def test_move(new_attention: NewAttention) -> None:
    attention = new_attention()
    words = 16 * 300  # more than one program copies
    arena = attention.allocate(words * 5)
    arena.words.copy_(arena.words.new_tensor(np.arange(words * 5)))
    before = arena.words.cpu().numpy().copy()
    attention.move(arena, np.array([[0, 900], [300, 600]], np.int32), words)
    expected = before.copy()
    expected[words * 3 : words * 4], expected[words * 2 : words * 3] = before[:words], before[words : words * 2]
    np.testing.assert_array_equal(arena.words.cpu().numpy(), expected)
    attention.move(arena, np.zeros((0, 2), np.int32), words)
    attention.seal(arena, np.zeros((0, 2), np.int32), [])


def test_seal_tells_lists_of_layers_apart(new_attention: NewAttention, stage: SimpleNamespace) -> None:
    """Sealing all layers after sealing the first alone: what is remembered of a list must not be used for another."""
    playback = Playback(Case("two", (("int2", "int2"), ("int4", "int4")), ((33,), (32,)), residual=0))
    attention = new_attention()
    spare = attention.allocate(playback.arena.size)
    attention.seal(spare, np.array([[0, playback.arena.size // 32]], np.int32), playback.layers[:1])
    for played in stage.play(attention, playback):
        np.testing.assert_array_equal(played.arena, played.expected)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda x: x.float(), "q is float32"),
        ("k", lambda x: x[:-1], "k is float16"),
        ("v", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "v has strides"),
        ("q", lambda x: x.repeat(1, 4, 1)[:, :7].contiguous(), "7 query heads over 2 KV heads"),
        ("out", lambda x: x.float(), "out is float32"),
        ("out", lambda x: x.repeat(1, 2, 1)[:, :2], "out has strides"),
        ("k", lambda x: x.new_zeros(40, 136)[:, :128].reshape(40, 2, 64), "expected multiples of 16"),
    ],
)
def test_misfits_are_refused(name: str, change: Callable, message: str, new_attention: NewAttention) -> None:
    import torch

    playback = Playback(Case("plain", (("int2", "int2"),), ((40,),)))
    step, layer = next(iter(playback)), playback.layers[0]
    attention = new_attention()
    arena = attention.allocate(1024)
    given = torch.zeros((40, 2, 64), dtype=torch.float16, device=attention.device.device)
    arrays = dict.fromkeys(("q", "k", "v"), given) | {name: change(given)}
    with pytest.raises(ValueError, match=message):
        attention.paged_attention(**arrays, arena=arena, batch=step.batch, layer=layer)


def test_poison_is_there_to_be_met() -> None:
    """The cases above leave NaN in what a kernel must not read."""
    playback = Playback(CASES["int2-window"])
    for _ in playback:
        pass
    assert (playback.arena == POISON).any()


def test_select_knows_it() -> None:
    assert "gpu" in kvattention.GPU_IMPLEMENTATIONS
    assert "gpu" not in kvattention.IMPLEMENTATIONS  # tested with NumPy arrays
