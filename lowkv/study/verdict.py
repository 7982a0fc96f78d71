"""What the figures say, in words. Everything here is arithmetic on outcomes: no model, no text.

The choice follows one rule: of the plans that a format serves and the recipe's target takes, the one with the fewest
effective bits at the recipe's length whose perplexity ratio's whole interval stays within the limit. Model precision
always does, so there is always a choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from lowkv.evaluation.intervals import Interval
from lowkv.study.configurations import grouped
from lowkv.study.outcomes import Outcome, ratio

OUTLIER = 4.0
"""A channel stands out that is, by mean magnitude, so many times its head's median channel."""

NEGLIGIBLE = 0.001
"""Perplexities closer than this are taken for equal, however sure the difference is."""


@dataclass(frozen=True)
class Plan:
    """A served configuration: its effective bits at the recipe's length, and perplexity over the baseline's.

    `refusal` says why the recipe's target does not serve it.
    """

    name: str
    label: str
    bits: float
    ratio: Mapping[str, float]
    refusal: str | None = None

    @property
    def interval(self) -> Interval:
        return Interval(self.ratio["value"], self.ratio["low"], self.ratio["high"])


def choose(plans: Sequence[Plan], limit: float, length: int, baseline: str) -> dict[str, Any]:
    """The plan by the rule above, and why, in `words`; `passed_over` are smaller ones that may cost too much."""
    possible = sorted(
        (plan for plan in plans if plan.refusal is None), key=lambda plan: (plan.bits, plan.ratio["value"])
    )
    within = [plan for plan in possible if plan.ratio["high"] <= limit]
    chosen = within[0] if within else max(possible, key=lambda plan: plan.bits)
    smaller = [plan for plan in possible if plan.bits < chosen.bits]
    allowed = f"{100 * (limit - 1):.3g} %"
    if chosen.label == baseline:
        words = [f"Keep {baseline}: no smaller plan keeps perplexity surely within {allowed} of {baseline}'s."]
    else:
        cost = f"perplexity {chosen.interval} times {baseline}'s, within {allowed}"
        words = [f"Choose {chosen.label}: {chosen.bits:.2f} bits per value at {length:,} tokens, {cost}."]
    if smaller:
        nearest = min(smaller, key=lambda plan: plan.ratio["high"])
        many = f"All {len(smaller)} smaller plans" if len(smaller) > 1 else "The one smaller plan"
        surely = "surely" if nearest.ratio["low"] > limit else "perhaps"
        figures = f"{nearest.bits:.2f} bits, {nearest.interval}, {surely} beyond"
        words.append(f"{many} may cost more than {allowed}; nearest comes {nearest.label}: {figures}.")
    same = [plan for plan in within if plan.bits == chosen.bits and plan is not chosen]
    if same:
        words.append(f"{_listed([plan.label for plan in same])} would do in as many bits.")
    refused = [plan for plan in plans if plan.refusal is not None and plan.bits < chosen.bits]
    if refused:
        words.append(
            f"Left out, because the recipe's target does not serve them: {_listed([plan.label for plan in refused])}."
        )
    return {
        **{key: value for key, value in asdict(chosen).items() if key != "refusal"},
        "passed_over": [plan.name for plan in smaller],
        "words": words,
    }


def orderings(outcomes: Mapping[str, Outcome], tokens: int) -> list[dict[str, Any]]:
    """KIVI's claims (arXiv 2402.02750, section 3.2), each as one perplexity over another on the same text.

    `holds` when the whole interval says so, `reversed` when it says the contrary, `open` otherwise, and where the
    difference is negligible.
    """
    found = []
    for bits in (2, 4):
        pairs = [
            ("K", f"V per {other}", grouped(bits, bits, "channel", other), grouped(bits, bits, "token", other))
            for other in ("token", "channel")
        ] + [
            ("V", f"K per {other}", grouped(bits, bits, other, "token"), grouped(bits, bits, other, "channel"))
            for other in ("channel", "token")
        ]
        for part, beside, better, worse in pairs:
            cost = ratio(outcomes[worse.name], outcomes[better.name], tokens)
            verdict = "holds" if cost.low > 1 else "reversed" if cost.high < 1 else "open"
            if abs(cost.value - 1) < NEGLIGIBLE:
                verdict = "open"
            first, second = ("channel", "token") if part == "K" else ("token", "channel")
            found.append(
                {
                    "bits": bits,
                    "part": part,
                    "beside": beside,
                    "claim": f"{part} per {first} beats per {second} at {bits} bits ({beside})",
                    "ratio": asdict(cost),
                    "verdict": verdict,
                }
            )
    return found


def remarks(
    statistics: Mapping[str, Any], ordered: Sequence[Mapping[str, Any]], entries: Mapping[str, Any]
) -> list[str]:
    """What the figures say about the model, a sentence each."""
    return [
        _about_outliers(statistics),
        *_about_orderings(ordered),
        _about_values(entries),
        *_about_ablations(entries),
    ]


def _about_outliers(statistics: Mapping[str, Any]) -> str:
    said = []
    for part in ("k", "v"):
        outliers = [layer["outlier"] for layer in statistics[part]]
        layer = max(range(len(outliers)), key=outliers.__getitem__)
        usual = median(outliers)
        kind = "outlier channels" if usual >= OUTLIER else "no channels that stand out"
        said.append(
            f"{part.upper()} has {kind}: the largest is {usual:.1f} times its head's median channel "
            f"in the median layer, at most {outliers[layer]:.1f} (layer {layer})"
        )
    return "; ".join(said) + "."


def _about_values(entries: Mapping[str, Any]) -> str:
    """Why V goes the other way: its own error says the contrary of attention's."""
    token, channel = (entries[grouped(2, 2, "channel", axis).name]["errors"] for axis in ("token", "channel"))
    own = f"V itself is off by {token['v']:.3f} per token and {channel['v']:.3f} per channel at 2 bits"
    output = f"attention's output by {token['output']:.3f} and {channel['output']:.3f}"
    if channel["v"] < token["v"] and token["output"] < channel["output"]:
        return f"{own}, but {output}: what attention picks is few tokens, and per token their errors stay their own."
    return f"{own}, {output} (K per channel)."


def _about_orderings(ordered: Sequence[Mapping[str, Any]]) -> list[str]:
    words = {"holds": "KIVI's ordering holds", "reversed": "The reverse of KIVI's ordering holds", "open": "Open"}
    return [
        f"{words[item['verdict']]}: {item['claim'] if item['verdict'] != 'open' else 'whether ' + item['claim']}; "
        f"the other way perplexity is {Interval.from_mapping(item['ratio'])} times as large."
        for item in ordered
        if item["bits"] == 2
    ]


def _about_ablations(entries: Mapping[str, Any]) -> list[str]:
    def cost(**settings: Any) -> float:
        value: float = entries[grouped(2, 2, **settings).name]["simulated"]["ratio"]["value"]
        return value

    least, residual, sink, both = (
        cost(residual_length=r, sink_tokens=s) for r, s in ((0, 0), (128, 0), (0, 32), (128, 32))
    )
    fine, coarse = cost(group_size=32, residual_length=128), cost(group_size=128, residual_length=128)
    larger = "the sink buys more" if sink < residual else "the residual buys more"
    if abs(sink - residual) < NEGLIGIBLE:
        larger = "they buy as much"
    parts = f"a residual of 128 makes that {residual:.3f}, a sink of 32 {sink:.3f}, both {both:.3f}"
    return [
        f"At 2 bits without residual and sink perplexity is {least:.3f} times as large; {parts}: {larger}.",
        f"Groups of 128 tokens instead of 32 take it from {fine:.3f} to {coarse:.3f} (R 128, no sink).",
    ]


def _listed(names: Sequence[str]) -> str:
    return "; ".join(names)
