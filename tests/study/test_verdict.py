"""Words follow figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowkv.study.configurations import grouped
from lowkv.study.verdict import Plan, choose, orderings, remarks

TOKENS = 2049


def plan(name: str, bits: float, value: float, wide: float = 0.002, refusal: str | None = None) -> Plan:
    return Plan(name, name, bits, {"value": value, "low": value - wide, "high": value + wide}, refusal)


FP16, FP8, K4, K2 = plan("fp16", 16, 1, 0), plan("fp8", 8, 1.001), plan("kivi4", 5.2, 1.004), plan("kivi2", 3.2, 1.09)


def test_the_fewest_bits_within_the_limit() -> None:
    found = choose([FP16, K2, FP8, K4], 1.02, 8192, "fp16")
    assert (found["name"], found["passed_over"]) == ("kivi4", ["kivi2"])
    words = " ".join(found["words"])
    assert "Choose kivi4: 5.20 bits per value at 8,192 tokens" in words
    assert "within 2 %" in words
    assert "nearest comes kivi2: 3.20 bits, 1.0900 [1.0880, 1.0920], surely beyond" in words


def test_the_whole_interval_must_be_within() -> None:
    wide = plan("kivi2plus", 3.2, 1.015, 0.01)
    found = choose([FP16, FP8, K4, wide], 1.02, 8192, "fp16")
    assert found["name"] == "kivi4"
    assert "perhaps beyond" in found["words"][1]
    assert choose([FP16, FP8, K4, wide], 1.03, 8192, "fp16")["name"] == "kivi2plus"


def test_among_equal_bits_the_better_one_and_the_others_named() -> None:
    found = choose([FP16, plan("e4m3", 8, 1.003), plan("int8", 8, 1.0)], 1.02, 8192, "fp16")
    assert found["name"] == "int8"
    assert "e4m3 would do in as many bits" in " ".join(found["words"])


def test_nothing_is_good_enough() -> None:
    found = choose([FP16, K2], 1.02, 8192, "fp16")
    assert found["name"] == "fp16"
    assert found["words"][0].startswith("Keep fp16")


def test_what_the_target_refuses_is_not_chosen_and_said() -> None:
    found = choose([FP16, FP8, plan("k4v2plus", 4.2, 1.0, refusal="not in the GPU kernels")], 1.02, 8192, "fp16")
    assert found["name"] == "fp8"
    assert "Left out, because the recipe's target does not serve them: k4v2plus." in found["words"]


def outcomes(costs: dict[tuple[str, str], float], noise: float = 0.0) -> dict[str, Any]:
    """Block sums of 2,048 positions at two nats each, and more by the axes of K and V."""
    found = {}
    generator = np.random.default_rng(0)
    for bits in (2, 4):
        for (k, v), cost in costs.items():
            name = grouped(bits, bits, k, v).name  # type: ignore[arg-type]
            found[name] = {"nll": (64 * (2 + cost + noise * generator.permutation(np.tile([-1, 1], 16)))).tolist()}
    return found


KIVI = {("channel", "token"): 0.1, ("channel", "channel"): 0.3, ("token", "token"): 1.0, ("token", "channel"): 1.2}


@pytest.mark.parametrize(
    ("costs", "noise", "verdict"),
    [
        (KIVI, 0.0, "holds"),
        ({key: -cost for key, cost in KIVI.items()}, 0.0, "reversed"),
        (dict.fromkeys(KIVI, 0.1), 0.2, "open"),
        ({key: 0.0005 * cost for key, cost in KIVI.items()}, 0.0, "open"),  # surely, and by nothing that matters
    ],
)
def test_orderings(costs: dict[tuple[str, str], float], noise: float, verdict: str) -> None:
    found = orderings(outcomes(costs, noise), TOKENS)
    assert [item["verdict"] for item in found] == [verdict] * 8
    first = found[0]
    assert first["claim"] == "K per channel beats per token at 2 bits (V per token)"
    if verdict == "holds":
        assert first["ratio"]["value"] == pytest.approx(np.exp(0.9))
        assert found[2]["claim"] == "V per token beats per channel at 2 bits (K per channel)"
        assert found[2]["ratio"]["value"] == pytest.approx(np.exp(0.2))


def test_remarks_name_outliers_orderings_errors_and_what_buys_more() -> None:
    statistics = {"k": [{"outlier": x} for x in (3.0, 9.5, 7.0)], "v": [{"outlier": x} for x in (1.5, 8.0, 1.2)]}
    costs = {(0, 0): 1.4, (128, 0): 1.2, (0, 32): 1.15, (128, 32): 1.08}
    entries: dict[str, Any] = {
        grouped(2, 2, residual_length=r, sink_tokens=s).name: {"simulated": {"ratio": {"value": cost}}}
        for (r, s), cost in costs.items()
    }
    entries[grouped(2, 2, group_size=128, residual_length=128).name] = {"simulated": {"ratio": {"value": 1.3}}}
    entries[grouped(2, 2).name]["errors"] = {"v": 0.42, "output": 0.32}
    entries[grouped(2, 2, "channel", "channel").name] = {"errors": {"v": 0.36, "output": 0.53}}
    said = remarks(statistics, orderings(outcomes(KIVI), TOKENS), entries)
    assert said[0] == (
        "K has outlier channels: the largest is 7.0 times its head's median channel in the median layer, at most 9.5 "
        "(layer 1); V has no channels that stand out: the largest is 1.5 times its head's median channel in the "
        "median layer, at most 8.0 (layer 1)."
    )
    assert sum("KIVI's ordering holds" in sentence for sentence in said) == 4
    assert "0.420 per token and 0.360 per channel at 2 bits, but attention's output by 0.320 and 0.530" in said[-3]
    assert "the sink buys more" in said[-2]
    assert "from 1.200 to 1.300" in said[-1]
