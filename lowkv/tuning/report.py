"""What a search found, for people: tables for a terminal, and what it comes to in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowkv.evaluation.intervals import CONFIDENCE

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.tuning.search import Judged, Tuning


def tables(tuning: Tuning) -> list[Table]:
    """Layers, then plans."""
    return [_layers(tuning), _plans(tuning)]


def verdicts(tuning: Tuning) -> list[str]:
    """A sentence for every plan that the tuned one was held against, on held-out text."""
    if not tuning.rivals:
        return [f"Every layer has {tuning.tuned.assignment[0]}: measuring chose the uniform plan itself."]
    return [_verdict(tuning, rival) for rival in tuning.rivals]


def _verdict(tuning: Tuning, rival: Judged) -> str:
    gain, tuned = tuning.gain(rival), tuning.tuned
    name = f"{rival.name} ({rival.bits:.2f} bits)"
    difference = f"{gain.value:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}] nats"
    if gain.high < 0 or gain.low > 0:
        part = abs(gain.value) / rival.held_out.divergence.value
        word = "less" if gain.value < 0 else "more"
        advice = "; take that one" if gain.low > 0 and rival.bits <= tuned.bits else ""
        return f"The tuned plan ({tuned.bits:.2f} bits) diverges {part:.0%} {word} than {name}: {difference}{advice}."
    advice = "; the simpler plan is as good" if rival.bits <= tuned.bits else ""
    return f"The tuned plan ({tuned.bits:.2f} bits) cannot be told from {name}: {difference}{advice}."


def _layers(tuning: Tuning) -> Table:
    from rich.table import Table

    sensitivity, space = tuning.sensitivity, tuning.space
    steps = sensitivity.steps
    shares = "; ".join(f"{step}: {step.rich} to {step.poor}" for step in steps)
    table = Table(
        title="KL divergence of each layer alone, in thousandths of a nat",
        caption=f"{tuning.calibration}, all other layers {space.hot}; {tuning.source}\n{shares}",
    )
    for column in ("layer", *space.formats, *map(str, steps)):
        table.add_column(column, justify="right")
    table.add_column("tuned")
    for layer, chosen in zip(space.layers, tuning.tuned.assignment, strict=True):
        costs = [f"{1000 * sensitivity.cost(layer, name):.3f}" for name in space.formats]
        parts = [f"{1000 * sensitivity.share(layer, step).value:.3f}" for step in steps]
        table.add_row(str(layer), *costs, *parts, chosen)
    sums = [sum(sensitivity.cost(layer, name) for layer in space.layers) for name in space.formats]
    sums += [sum(sensitivity.share(layer, step).value for layer in space.layers) for step in steps]
    table.add_section()
    table.add_row("sum", *(f"{1000 * total:.3f}" for total in sums), tuning.tuned.plan.summary())
    return table


def _plans(tuning: Tuning) -> Table:
    from rich.table import Table

    table = Table(
        title="whole plans",
        caption=f"KL in nats [{CONFIDENCE:.0%} interval]; predicted: sum over layers; "
        f"calibration: {tuning.calibration}; held-out: {tuning.held_out}",
    )
    for column in (
        "plan",
        "formats",
        "bits",
        "predicted",
        "calibration",
        "held-out KL",
        "ppl ratio",
        "tuned less this",
    ):
        table.add_column(column)
    for judged in (tuning.tuned, *tuning.rivals):
        gain = tuning.gain(judged)
        table.add_row(
            judged.name,
            judged.plan.summary(),
            f"{judged.bits:.2f}",
            f"{judged.predicted:.4f}",
            f"{judged.calibration.divergence.value:.4f}",
            str(judged.held_out.divergence),
            str(judged.held_out.ratio),
            "" if judged is tuning.tuned else f"{gain.value:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]",
        )
    return table
