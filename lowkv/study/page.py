"""`study.html`: the report as one page that needs nothing but itself. A pure function of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowkv.evaluation.intervals import Interval
from lowkv.pages import escaped, page
from lowkv.study import figures
from lowkv.study.rows import NOTES, TITLES, caption, header, rows

Report = Mapping[str, Any]

_STYLE = """
tr.chosen td { font-weight: 600; background: #eff6ff; }
pre { background: #f3f4f6; border-radius: 6px; padding: 10px 14px; font-size: 13px; width: max-content; }
"""

_WAYS = (
    "Served figures come from the kernels and block rules that serve; simulated ones from plain Torch with the same "
    "codecs, decode-style: history is read as the cache would hold it at that moment. KL and top-1 are simulated ones."
)


def render(report: Report) -> str:
    """The whole page."""
    title = f"Keys and values of {report['model']['source']}"
    words = report["choice"]["words"]
    parts = [
        f"<h1>{escaped(title)}</h1>",
        f'<p class="note">{escaped(_where(report))}</p>',
        f'<p class="lead">{escaped(words[0])}</p>',
        *(f"<p>{escaped(sentence)}</p>" for sentence in words[1:]),
        f"<pre>{escaped(report['choice']['kv_cache'])}</pre>",
        figures.tradeoff_svg(report),
        "<h2>What the figures say</h2>",
        "<ul>" + "".join(f"<li>{escaped(sentence)}</li>" for sentence in report["remarks"]) + "</ul>",
        _orderings(report),
        *(_section(report, section) for section in TITLES),
        f'<p class="note">{escaped(caption(report))}. {_WAYS}</p>',
        "<h2>Errors by layer</h2>",
        figures.errors_svg(report),
        "<h2>Keys and values, channel by channel</h2>",
        figures.outliers_svg(report),
        figures.channels_svg(report),
        "<h2>Keys and values along the text</h2>",
        figures.tokens_svg(report),
        "<h2>Some heads up close</h2>",
        figures.maps_svg(report),
        '<p class="note">Keys after RoPE. Colours are logarithmic over two decades.</p>',
    ]
    return page(title, _STYLE, parts)


def _where(report: Report) -> str:
    model = report["model"]
    size = f"{model['layers']} layers, {model['heads']} heads, {model['kv_heads']} KV heads of {model['head_dim']}"
    return (
        f"{model['architecture']}, {size}, weights {model['weights']} · {report['text']['tokens']:,} tokens of "
        f"{report['text']['source']} · recipe {report['recipe']} · lowkv {report['lowkv']}, {report['created']}"
    )


def _orderings(report: Report) -> str:
    lines = [
        (item["claim"], str(Interval.from_mapping(item["ratio"])), item["verdict"]) for item in report["orderings"]
    ]
    return _table(("KIVI's claim", "perplexity of the other over this one's", "on this model"), lines)


def _section(report: Report, section: str) -> str:
    note = f'<p class="note">{escaped(NOTES[section])}</p>' if section in NOTES else ""
    table = _table(header(report), rows(report, section), chosen=report["choice"]["label"])
    return f"<h2>{escaped(TITLES[section])}</h2>{table}{note}"


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]], chosen: str | None = None) -> str:
    head = "".join(f"<th>{escaped(cell)}</th>" for cell in titles)
    body = "".join(
        f"<tr{' class=chosen' if line[0] == chosen else ''}>"
        + "".join(f"<td>{escaped(cell)}</td>" for cell in line)
        + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
