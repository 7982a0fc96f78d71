"""How reports look: pages that need nothing but themselves, and the plots in them, drawn by Matplotlib into SVG."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#2563eb", "#0d9488", "#d97706", "#9333ea", "#dc2626", "#65a30d", "#db2777")
INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
PLOTS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lowkv",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#9ca3af",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
}
"""Matplotlib's settings, for `matplotlib.rc_context`."""

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #1f2937;
  background: #fff; margin: 0 auto; padding: 32px 24px 64px; max-width: 1140px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 6px; }
p { margin: 6px 0; max-width: 82ch; }
.lead { font-size: 17px; }
.note { color: #6b7280; font-size: 13.5px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 10px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 7px; text-align: right; white-space: nowrap; border-bottom: 1px solid #e5e7eb; }
th { color: #6b7280; font-weight: 600; vertical-align: bottom; }
td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, style: str, parts: Iterable[str]) -> str:
    """A whole HTML page of parts, which are HTML; `style` is CSS beside the one that all pages have."""
    head = f'<meta charset="utf-8"><title>{escaped(title)}</title><style>{_STYLE}{style}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>' + "\n".join(parts) + "</body></html>\n"


def escaped(value: object) -> str:
    """Text for a page."""
    return html.escape(str(value))


def svg(figure: Figure) -> str:
    """A figure for a page: the same bytes for the same figure."""
    import matplotlib as mpl

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context(PLOTS):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # without the XML declaration, which has no place inside a page
