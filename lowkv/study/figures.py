"""The page's plots and heat maps, drawn by Matplotlib into SVG. Nothing is drawn that is not in the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lowkv.pages import GRID, MUTED, PALETTE, PLOTS, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Report = Mapping[str, Any]

_WIDTH = 10.5


def tradeoff_svg(report: Report) -> str:
    """Perplexity against effective bits at the recipe's length, a point a served plan, the limit across."""
    import matplotlib as mpl

    with mpl.rc_context(PLOTS):
        figure = _figure(3.6)
        axis = figure.subplots()
        for name, entry in report["configurations"].items():
            if entry["served"] is not None:
                named = name in report["sections"]["formats"] or name == report["baseline"]
                _point(axis, entry, chosen=name == report["choice"]["name"], named=named)
        axis.axhline(100 * (report["limit"] - 1), color="#dc2626", linewidth=0.9)
        axis.axhline(0, color=MUTED, linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(bits := (3, 4, 5, 6, 8, 16), [str(bit) for bit in bits])
        axis.set_yscale("symlog", linthresh=2)
        axis.set_yticks(steps := (0, 1, 2, 5, 10, 20, 50), [f"{step} %" for step in steps])
        axis.minorticks_off()
        axis.set_title("Perplexity over the baseline's, served, and effective bits: the limit is the red line")
        axis.set_xlabel(f"effective bits per value at {report['length']:,} tokens, residual and sink included")
        axis.grid(color=GRID)
        return svg(figure)


def _point(axis: Axes, entry: Mapping[str, Any], *, chosen: bool, named: bool) -> None:
    colour = PALETTE[0] if chosen else "#94a3b8"
    low, value, high = (100 * (entry["served"]["ratio"][key] - 1) for key in ("low", "value", "high"))
    x = entry["bits_at_length"]
    axis.errorbar(x, value, [[value - low], [high - value]], fmt="o", markersize=4, color=colour, linewidth=1)
    if chosen or named:
        ink = colour if chosen else MUTED
        label = entry["label"] if chosen else entry["format"]
        axis.annotate(label, (x, value), xytext=(5, 3), textcoords="offset points", fontsize=7.5, color=ink)


def channels_svg(report: Report) -> str:
    """Mean |K| and |V| of every channel of every layer."""
    return _pair(report, lambda layer: layer["channel"]["mean"], "mean |{}| by channel", "channel (heads side by side)")


def tokens_svg(report: Report) -> str:
    """Largest |K| and |V| of tokens along the text, every layer."""
    return _pair(report, lambda layer: layer["token"]["max"], "max |{}| along the text", "position", tokens=True)


def _pair(report: Report, row: Any, title: str, label: str, *, tokens: bool = False) -> str:
    import matplotlib as mpl

    with mpl.rc_context(PLOTS):
        figure = _figure(3.2)
        for axis, part in zip(figure.subplots(1, 2), ("k", "v"), strict=True):
            values = np.array([row(layer) for layer in report["statistics"][part]])
            width = report["text"]["tokens"] if tokens else values.shape[1]
            _heat(figure, axis, values, (0, width, len(values), 0))
            axis.set_title(title.format(part.upper()))
            axis.set_xlabel(label)
            axis.set_ylabel("layer")
        return svg(figure)


def maps_svg(report: Report) -> str:
    """Of some layers, the head whose K has the largest outlier (and V's): tokens down, channels across."""
    import matplotlib as mpl

    shown = [index for index, layer in enumerate(report["statistics"]["k"]) if "map" in layer]
    with mpl.rc_context(PLOTS):
        figure = _figure(5.4)
        axes = figure.subplots(2, len(shown), squeeze=False)
        for line, part in zip(axes, ("k", "v"), strict=True):
            for axis, index in zip(line, shown, strict=True):
                layer = report["statistics"][part][index]
                values = np.array(layer["map"])
                _heat(figure, axis, values, (0, values.shape[1], report["text"]["tokens"], 0))
                axis.set_title(f"|{part.upper()}|, layer {index}, head {layer['head']}")
            line[0].set_ylabel("position")
        for axis in axes[-1]:
            axis.set_xlabel("channel")
        return svg(figure)


def outliers_svg(report: Report) -> str:
    """Outlier ratios by layer."""
    curves = {
        f"{part.upper()}, {name}": [layer[key] for layer in report["statistics"][part]]
        for part in ("k", "v")
        for name, key in (("channels", "outlier"), ("tokens", "token_outlier"))
    }
    return _lines(curves, "Largest channel (by mean) and largest token (by maximum) over the median one")


def errors_svg(report: Report) -> str:
    """Relative error of attention's output by layer, for both axes of K and of V at 2 bits."""
    entries = [report["configurations"][name] for name in report["sections"]["axes"]]
    curves = {
        f"K per {settings['k']['axis']}, V per {settings['v']['axis']}": entry["errors_by_layer"]["output"]
        for entry in entries
        if (settings := entry["settings"])["k"]["codec"] == "int2"
    }
    return _lines(curves, "Relative error of attention's output at 2 bits, its inputs exact")


def _lines(curves: Mapping[str, Any], title: str) -> str:
    import matplotlib as mpl

    with mpl.rc_context(PLOTS):
        figure = _figure(2.8)
        axis = figure.subplots()
        for (name, values), colour in zip(curves.items(), PALETTE, strict=False):
            axis.plot(values, color=colour, marker="o", markersize=3, linewidth=1.4, label=name)
        axis.set_title(title)
        axis.set_xlabel("layer")
        axis.set_ylim(bottom=0)
        axis.grid(color=GRID)
        axis.legend(fontsize=8, ncols=2)
        return svg(figure)


def _heat(figure: Figure, axis: Axes, values: Any, extent: tuple[float, float, float, float]) -> None:
    """Colours on a logarithmic scale over two decades: outliers stand out, and so does what is no outlier."""
    from matplotlib.colors import LogNorm

    top = max(float(values.max()), 1e-6)
    picture = axis.imshow(
        np.maximum(values, top / 100),
        extent=extent,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        norm=LogNorm(top / 100, top),
    )
    figure.colorbar(picture, ax=axis, pad=0.02)


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height), layout="constrained")
