"""The case table and its playback: what the other tests stand on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvattention import CODECS
from kvattention.cases import CASES, Case, Playback


def test_cases_survive_json() -> None:
    for case in CASES.values():
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case


def test_the_table_covers_what_it_must() -> None:
    cases = CASES.values()
    pairs = {(name, name) for name in CODECS if name != "int2c"} | {("int4", "int2"), ("int2c", "int2")}
    assert {pair for case in cases for pair in case.formats} >= pairs
    assert {case.gqa for case in cases} >= {1, 3, 4, 8}
    assert {case.head_dim for case in cases} >= {64, 80, 96, 128}
    assert {case.group_size for case in cases} == {32, 64, 128}
    assert {case.policy for case in cases} == {"window", "flush"}
    assert {case.values for case in cases} == {"normal", "outlier", "constant", "extreme"}
    assert {pair for case in cases if case.scales == "channel" for pair in case.formats} >= {
        (name, name) for name, codec in CODECS.items() if codec.scaled
    }
    assert any(len(case.formats) > 2 for case in cases)


def test_scales_differ_where_the_case_says_so() -> None:
    per_head, per_channel = (CASES[name].layers()[0] for name in ("int8-mixture", "int8-channels"))
    assert len(np.unique(per_head.k_scales)) == 2
    assert len(np.unique(per_channel.k_scales)) == 2 * 64
    assert len(np.unique(per_channel.v_scales)) == 2


@pytest.mark.parametrize(
    ("policy", "residual", "ends"),
    [
        # tokens: end of the cold blocks (32 tokens each)
        ("window", 64, {63: 0, 64: 0, 95: 0, 96: 1, 127: 1, 128: 2}),
        ("window", 0, {31: 0, 32: 1, 63: 1, 64: 2}),
        ("flush", 64, {63: 0, 64: 2, 65: 2, 127: 2, 128: 4}),
    ],
)
def test_cold_blocks_by_hand(policy: str, residual: int, ends: dict[int, int]) -> None:
    case = Case("by-hand", (("int2", "int2"),), ((1,),), policy=policy, residual=residual)
    assert {tokens: case.cold_end(tokens) for tokens in ends} == ends


@pytest.mark.parametrize("length", [127, 128, 129, 300])
def test_hot_tokens_stay_bounded_over_single_steps(length: int) -> None:
    case = Case("steps", (("int2", "int2"),), tuple((1,) for _ in range(length)), residual=64)
    hot = []
    playback = Playback(case)
    for step in playback:
        total = int(step.batch.total[0])
        playback.arena[:] = 0  # only the bookkeeping matters here
        hot.append(total - case.cold_end(total) * case.group_size)
    assert max(hot) == min(length, 64 + 31)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="policy 'fifo'"):
        Case("x", (("int2", "int2"),), ((1,),), policy="fifo")
    with pytest.raises(ValueError, match="values 'odd'"):
        Case("x", (("int2", "int2"),), ((1,),), values="odd")
    with pytest.raises(ValueError, match="scales 'token'"):
        Case("x", (("int8", "int8"),), ((1,),), scales="token")
    with pytest.raises(ValueError, match="multiple of 32"):
        Case("x", (("int2", "int2"),), ((1,),), policy="flush", residual=40)


def test_quantization_is_visible_in_the_golden() -> None:
    """A format that stores what it says must differ from the exact values, and less so with more bits of precision."""
    errors: dict[str, float] = {}
    for name in ("int2", "int4", "e5m2", "e4m3", "int8", "f16"):
        for step in Playback(CASES[f"{name}-g64"]):
            errors[name] = max(errors.get(name, 0.0), float(np.abs(step.golden[0] - step.exact[0]).max()))
    assert errors["int2"] > errors["int4"] > errors["int8"] > errors["f16"] > 0
    assert errors["int2"] > errors["e5m2"] > errors["e4m3"] > errors["f16"]
