"""SamplingParams: what is allowed, and that a refusal names the field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lowkv.errors import LowkvError
from lowkv.serving.params import MAX_SEED, SamplingParams


def test_defaults_are_greedy_and_change_no_logit() -> None:
    params = SamplingParams(max_tokens=1)
    assert params.greedy
    assert not params.penalized


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams(max_tokens=1).top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 5, "min_tokens": 5},
        {"max_tokens": 5, "temperature": 2},
        {"max_tokens": 5, "seed": 0},
        {"max_tokens": 5, "seed": MAX_SEED},
        {"max_tokens": 5, "presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"max_tokens": 5, "stop": ("\n", "END"), "stop_token_ids": (0, 7), "bad_words": ("x",)},
    ],
)
def test_accepted(values: dict[str, Any]) -> None:
    SamplingParams(**values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("min_tokens", 9),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 0.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", "1"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("-inf")),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
        ("seed", 1.5),
        ("stop", "END"),
        ("stop", ["END"]),
        ("stop", ("",)),
        ("stop", (b"END",)),
        ("stop_token_ids", [1]),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("1",)),
        ("bad_words", ("ok", "")),
        ("ignore_eos", 1),
        ("logprobs", None),
    ],
)
def test_refusals_name_the_field(field: str, value: Any) -> None:
    values: dict[str, Any] = {"max_tokens": 8, field: value}
    with pytest.raises(LowkvError, match=field):
        SamplingParams(**values)
