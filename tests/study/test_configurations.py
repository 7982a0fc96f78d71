"""The list of what is measured: complete, each once, and costed as the cache plan costs it."""

from __future__ import annotations

import pytest

from lowkv.kvcache import FORMATS
from lowkv.study.configurations import baseline, every, grouped, of_format, sections


class Geometry:
    layers, kv_heads, windows, softmax_scale = 2, 2, (None, None), 0.125

    def __init__(self, head_dim: int = 64) -> None:
        self.head_dim = head_dim


def test_every_question_is_asked() -> None:
    found = sections(Geometry(), "float16")
    axes = {(one.k.codec, one.k.axis, one.v.axis) for one in found["axes"]}
    assert len(axes) == len(found["axes"]) == 8
    assert {(one.residual_length, one.sink_tokens) for one in found["residual"]} == {
        (r, s) for r in (0, 32, 64, 128) for s in (0, 32)
    }
    assert [one.group_size for one in found["group"]] == [32, 64, 128]
    assert len(found["eight"]) == 11
    everything = every(Geometry(), "float16")
    assert everything[0] == baseline("float16")
    assert len({one.name for one in everything}) == len({one.label for one in everything}) == len(everything)
    measured = {one.row for one in everything}
    assert measured >= {row for row in FORMATS.values() if row.name != "bf16"}


def test_heads_that_cannot_be_rotated_leave_the_rotated_formats_out() -> None:
    assert not any(one.rotate_values for one in every(Geometry(80), "bfloat16"))
    assert every(Geometry(80), "bfloat16")[0].label == "bf16"


@pytest.mark.parametrize("size", [16, 64, 80])
def test_bits_and_rules_are_the_plans(size: int) -> None:
    for one in every(Geometry(size), "float16"):
        plan = one.plan(Geometry(size), "float16")
        assert (plan.sink_tokens, plan.residual_length) == (one.sink_tokens, one.residual_length)
        if one.row is not None:
            assert plan.summary() == f"{one.row.name} x2"
            assert one.bits(size) == pytest.approx(plan.effective_bits())


def test_what_no_format_serves() -> None:
    assert grouped(2, 2).row is FORMATS["kivi2"]
    assert grouped(2, 2, "token").row is None
    assert grouped(2, 4).row is None
    assert of_format("k4v2plus").row is FORMATS["k4v2plus"]
