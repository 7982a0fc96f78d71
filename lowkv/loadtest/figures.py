"""The plots of the report, drawn by Matplotlib into SVG (for the page) or PNG (for a README).

One colour a format, the same in every plot. Nothing is drawn that is not in `report.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.pages import GRID, INK, MUTED, PALETTE, PLOTS, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = Mapping[str, Any]

_BASELINE = "#475569"
_CONTROL = "#b6c0cd"


def colours(report: Report) -> dict[str, str]:
    """A colour for each of the report's formats, in its order."""
    chosen: dict[str, str] = {}
    rest = iter(PALETTE * 4)
    for name, entry in report["formats"].items():
        control, baseline = entry["control"], entry["format"] == "fp16"
        chosen[name] = _CONTROL if control else _BASELINE if baseline else next(rest)
    return chosen


def summary_svg(report: Report) -> str:
    """Concurrency, throughput and quality, side by side, a bar a format."""
    return svg(_drawn(_summary, report))


def summary_png(report: Report, path: Path) -> Path:
    """The same as a picture of its own, with a title and the machine under it. Returns `path`."""
    import matplotlib as mpl

    with mpl.rc_context(PLOTS):
        figure = _summary(report)
        figure.set_size_inches(11.5, 4.6)
        figure.suptitle(_headline(report), x=0.012, ha="left", fontsize=13, fontweight="bold")
        machine = report["machine"]
        under = (
            f"{report['engine']}, {machine['cpu']}, {machine['cores']} cores · SLO, lengths and limits in the report"
        )
        figure.text(0.012, 0.012, under, fontsize=8.5, color=MUTED)
        figure.set_layout_engine("constrained", rect=(0, 0.05, 1, 0.95))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, facecolor="white")
    return path


def latency_svg(report: Report) -> str:
    """TTFT and TPOT percentiles against concurrency, a line a format, the SLO across."""
    return svg(_drawn(_latency, report))


def throughput_svg(report: Report) -> str:
    """Output tokens per second against concurrency, a line a format."""
    return svg(_drawn(_throughput, report))


def occupancy_svg(report: Report) -> str:
    """Share of the KV budget in use, and requests running and waiting, over the time of a run; a panel a format."""
    return svg(_drawn(_occupancy, report))


def _headline(report: Report) -> str:
    formats = report["formats"]
    base = next((e for e in formats.values() if e["format"] == "fp16" and not e["control"]), None)
    best = max((e for e in formats.values()), key=lambda e: e["g1_measured"])
    if base is None or not base["g1_measured"] or best is base:
        return str(report["title"])
    gain = best["g1_measured"] / base["g1_measured"]
    return f"{gain:.1f}x the sequences of FP16 in the same bytes of KV cache ({best['format']})"


def _drawn(draw: Any, report: Report) -> Figure:
    import matplotlib as mpl

    with mpl.rc_context(PLOTS):
        figure: Figure = draw(report)
        figure.canvas.draw()
        return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _labels(report: Report) -> list[str]:
    return [name.replace("-", "\n", 1) if entry["control"] else name for name, entry in report["formats"].items()]


def _summary(report: Report) -> Figure:
    entries = list(report["formats"].values())
    colour = list(colours(report).values())
    with_quality = any(e["perplexity_ratio"] is not None for e in entries)
    figure = _figure(10.5, 3.5)
    axes = figure.subplots(1, 3 if with_quality else 2, width_ratios=(1.5, 1, 1) if with_quality else (1.5, 1))
    _concurrency_bars(axes[0], report, entries, colour)
    speed = [e["output_tokens_per_s"] for e in entries]
    _bars(axes[1], _labels(report), speed, colour, "{:.0f}")
    axes[1].set_title("Output tokens/s with the cache full")
    if with_quality:
        shown = [
            (label, e, c) for label, e, c in zip(_labels(report), entries, colour, strict=True) if not e["control"]
        ]
        loss = [100 * ((e["perplexity_ratio"] or 1.0) - 1) for _, e, _ in shown]
        _bars(axes[2], [label for label, _, _ in shown], loss, [c for _, _, c in shown], "{:+.1f} %")
        axes[2].axhline(0, color=_BASELINE, linewidth=0.8)
        axes[2].set_title("Perplexity against FP16")
    return figure


def _concurrency_bars(axis: Axes, report: Report, entries: Sequence[Any], colour: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for index, (entry, c) in enumerate(zip(entries, colour, strict=True)):
        axis.bar(index - 0.2, entry["g1_measured"], 0.38, color=c)
        axis.bar(index + 0.2, entry["g2"], 0.38, color=c, alpha=0.42)
        axis.text(index - 0.2, entry["g1_measured"], f"{entry['g1_measured']:g}", ha="center", va="bottom")
        axis.text(index + 0.2, entry["g2"], f"{entry['g2']:g}", ha="center", va="bottom", color=MUTED)
        axis.plot([index - 0.37, index - 0.03], [entry["g1_predicted"]] * 2, color=INK, linewidth=1.6)
    axis.set_xticks(range(len(entries)), _labels(report))
    axis.set_title("Sequences and users in the same KV bytes")
    axis.margins(y=0.38)
    axis.grid(axis="y", color=GRID)
    axis.tick_params(length=0)
    axis.legend(
        handles=[
            Patch(color=MUTED, label="resident at once (G1)"),
            Line2D([], [], color=INK, linewidth=1.6, label="G1 predicted"),
            Patch(color=MUTED, alpha=0.42, label="within the SLO (G2)"),
        ],
        loc="upper left",
        fontsize=8,
    )


def _bars(axis: Axes, labels: Sequence[str], values: Sequence[float], colour: Sequence[str], form: str) -> None:
    bars = axis.bar(range(len(values)), values, 0.62, color=list(colour))
    axis.bar_label(bars, [form.format(value) for value in values], padding=2)
    axis.set_xticks(range(len(values)), labels)
    axis.margins(y=0.15)
    axis.grid(axis="y", color=GRID)
    axis.tick_params(length=0)


def _latency(report: Report) -> Figure:
    figure = _figure(10.5, 3.6)
    slo = report["workload"]["slo"]
    axes = figure.subplots(1, 2)
    titles = (("ttft", "Time to first token (s)"), ("tpot", "Time per output token (s)"))
    for axis, (metric, title) in zip(axes, titles, strict=True):
        _curves(axis, report, f"{metric}_p50", "-", label=True)
        _curves(axis, report, f"{metric}_p95", (0, (1, 1.5)), label=False)
        limit = slo[f"{metric}_seconds"]
        axis.axhline(limit, color="#dc2626", linewidth=0.9)
        axis.annotate("SLO", (1, limit), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="#dc2626")
        axis.set_title(f"{title}: p50 solid, p95 dotted")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    return figure


def _throughput(report: Report) -> Figure:
    figure = _figure(10.5, 3.0)
    axis = figure.subplots()
    _curves(axis, report, "output_tokens_per_s", "-", label=True)
    axis.set_title("Output tokens per second, inside the window")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return figure


def _curves(axis: Axes, report: Report, key: str, style: Any, *, label: bool) -> None:
    for name, colour in colours(report).items():
        points = [(lv["level"], lv[key]) for lv in report["formats"][name]["levels"] if lv[key] is not None]
        if points:
            x, y = zip(*points, strict=True)
            axis.plot(
                x,
                y,
                linestyle=style,
                color=colour,
                marker="o",
                markersize=3.5,
                linewidth=1.6,
                label=name if label else None,
            )
    axis.set_xlabel("concurrent users")
    axis.grid(color=GRID)
    axis.tick_params(length=0)


def _occupancy(report: Report) -> Figure:
    names = list(report["formats"])
    figure = _figure(10.5, 1.0 + 1.25 * len(names))
    axes = figure.subplots(len(names), 2, squeeze=False, sharex=True, sharey="col")
    for (left, right), name in zip(axes, names, strict=True):
        series = report["formats"][name]["series"]
        colour = colours(report)[name]
        t = [s["t"] for s in series]
        left.fill_between(t, [100 * s["kv_used"] / s["kv_total"] for s in series], color=colour, alpha=0.8, linewidth=0)
        left.set_ylim(0, 100)
        left.set_ylabel(name, color=INK)
        right.plot(t, [s["running"] for s in series], color=colour, linewidth=1.6, label="running")
        right.plot(
            t, [s["waiting"] for s in series], color=MUTED, linewidth=1, linestyle=(0, (2, 1.5)), label="waiting"
        )
        for axis in (left, right):
            axis.grid(color=GRID)
            axis.tick_params(length=0)
    axes[0][0].set_title("KV budget in use (%)")
    axes[0][1].set_title("Requests: running (solid), waiting (dashed)")
    for axis in axes[-1]:
        axis.set_xlabel("seconds of load")
    return figure
