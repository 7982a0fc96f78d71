"""A report's figures as rows of text, for the terminal, the page and the CSV file. Pure functions of the report."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lowkv.evaluation.intervals import Interval

if TYPE_CHECKING:
    from rich.table import Table

Report = Mapping[str, Any]

TITLES = {
    "axes": "K and V along either axis, nothing but the block being written in full precision",
    "residual": "Residual (R, the newest tokens) and sink (the first tokens) in full precision, at 2 bits",
    "group": "Group size (G, tokens of a channel that share a scale; V's groups are 32 channels), at 2 bits",
    "formats": "Formats as a recipe gets them, and K at 2 beside V at 4 bits",
    "eight": "8 bits with static scales",
}
NOTES = {
    "axes": "Served figures are measured with the serving kernels, where a format has this layout.",
    "eight": "int8 with scale 1.0 would round to whole numbers; no recipe may ask for it.",
}


def header(report: Report) -> tuple[str, ...]:
    """Of `rows`: perplexities are over the baseline's, KL and top-1 simulated."""
    bits = ("bits", f"at {report['length']:,}")
    return ("", *bits, "error of K", "of V", "of output", "perplexity, simulated", "served", "KL", "top-1")


def rows(report: Report, section: str) -> list[tuple[str, ...]]:
    """One row a configuration, as `header` says."""
    found = []
    for name in report["sections"][section]:
        entry = report["configurations"][name]
        served, simulated = entry["served"], entry["simulated"]
        found.append(
            (
                entry["label"],
                f"{entry['bits']:.2f}",
                "–" if entry["bits_at_length"] is None else f"{entry['bits_at_length']:.2f}",
                *(f"{entry['errors'][part]:.3f}" for part in ("k", "v", "output")),
                str(Interval.from_mapping(simulated["ratio"])),
                "–" if served is None else str(Interval.from_mapping(served["ratio"])),
                f"{simulated['kl']['value']:.4f}",
                f"{simulated['top1']['value']:.3f}",
            )
        )
    return found


def caption(report: Report) -> str:
    """Where the figures come from, in a sentence."""
    base = report["configurations"][report["baseline"]]
    simulated, served = (base[way]["perplexity"]["value"] for way in ("simulated", "served"))
    return (
        f"{report['text']['tokens']:,} tokens of {report['text']['source']}; {base['label']}'s perplexity "
        f"{simulated:.3f} simulated, {served:.3f} served; bits of a cold value, and of all of a sequence of "
        f"{report['length']:,} tokens; relative errors, mean of "
        f"the layers; [{report['confidence']:.0%} interval]"
    )


def tables(report: Report) -> list[Table]:
    """For a terminal."""
    from rich.table import Table

    found = []
    for section, title in TITLES.items():
        table = Table(title=title, title_justify="left", caption=NOTES.get(section), caption_justify="left")
        for column in header(report):
            table.add_column(column)
        for row in rows(report, section):
            table.add_row(*row)
        found.append(table)
    return found


def to_csv(report: Report) -> str:
    """One row a configuration, every figure in full."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    lines = [
        _flat(name, entry, [section for section, names in report["sections"].items() if name in names])
        for name, entry in report["configurations"].items()
    ]
    writer.writerow(lines[0])
    writer.writerows(line.values() for line in lines)
    return buffer.getvalue()


def _flat(name: str, entry: Mapping[str, Any], sections: list[str]) -> dict[str, Any]:
    settings = entry["settings"]
    flat: dict[str, Any] = {"name": name, "label": entry["label"], "sections": " ".join(sections)}
    flat["format"] = entry["format"] or ""
    for part in ("k", "v"):
        flat |= {f"{part}_{key}": settings[part][key] for key in ("codec", "axis")}
    flat |= {key: value for key, value in settings.items() if key not in ("k", "v")}
    flat |= {"bits": entry["bits"], "bits_at_length": entry["bits_at_length"]}
    flat |= {f"{part}_error": error for part, error in entry["errors"].items()}
    for way in ("simulated", "served"):
        for figure in ("perplexity", "ratio", "kl", "top1"):
            for bound in ("value", "low", "high"):
                key = f"{way}_{figure}" + ("" if bound == "value" else f"_{bound}")
                flat[key] = None if entry[way] is None else entry[way][figure][bound]
    return flat
