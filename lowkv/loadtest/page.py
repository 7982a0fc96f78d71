"""`report.html`: the report as one page that needs nothing but itself. A pure function of `report.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowkv.loadtest.figures import colours, latency_svg, occupancy_svg, summary_svg, throughput_svg
from lowkv.loadtest.records import read_json, write_atomically
from lowkv.pages import escaped, page
from lowkv.units import format_bytes

Report = Mapping[str, Any]

_STYLE = """
.where { color: #6b7280; font-size: 13.5px; }
.tag { display: inline-block; background: #fef3c7; color: #92400e; border-radius: 4px; padding: 0 7px;
  font-weight: 600; }
.bad { background: #fee2e2; color: #991b1b; border-radius: 6px; padding: 8px 14px; margin: 12px 0; }
th small, td small { display: block; font-weight: 400; color: #6b7280; }
tr.control td { color: #6b7280; }
i.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; }
.miss { color: #b91c1c; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; font-size: 13.5px; }
dt { color: #6b7280; } dd { margin: 0; }
"""


def write_report(report: Report, folder: Path) -> Path:
    """Writes `report.json` and `report.html` into `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.json", json.dumps(report, indent=2) + "\n")
    path = folder / "report.html"
    write_atomically(path, render(report))
    return path


def read_report(folder: Path) -> dict[str, Any]:
    """The `report.json` in `folder`."""
    report: dict[str, Any] = read_json(folder / "report.json")
    return report


def render(report: Report) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escaped(report['title'])}</h1>",
        _where(report),
        _lead(report),
        _trouble(report),
        _table(report),
        _reading(report),
        "<h2>Concurrency, throughput and quality by format</h2>",
        summary_svg(report),
        "<h2>Latency against concurrency</h2>",
        latency_svg(report),
        "<h2>Throughput against concurrency</h2>",
        throughput_svg(report),
        _binding(report),
        "<h2>KV occupancy over time</h2>",
        occupancy_svg(report),
        "<h2>Every level that was measured</h2>",
        _levels(report),
        _how(report),
        "<h2>What this does not show</h2>",
        "<ul>" + "".join(f"<li>{escaped(limit)}</li>" for limit in report["limits"]) + "</ul>",
    ]
    return page(report["title"], _STYLE, parts)


def _number(value: float | None, digits: int, suffix: str = "") -> str:
    return "–" if value is None else f"{value:,.{digits}f}{suffix}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _pair(entry: Mapping[str, Any] | None, metric: str) -> str:
    if entry is None:
        return "–"
    return f"{_ms(entry[f'{metric}_p50'])}<small>{_ms(entry[f'{metric}_p95'])}</small>"


def _where(report: Report) -> str:
    machine, workload = report["machine"], report["workload"]
    return (
        f'<p class="where"><span class="tag">{escaped(report["engine"])}</span> {escaped(machine["cpu"])}, '
        f"{machine['cores']} cores, {format_bytes(machine['memory_bytes'])} memory · "
        f"{escaped(report['model'].get('model.source', 'model'))} · workload {escaped(workload['name'])} · "
        f"{escaped(report['created'])}</p>"
    )


def _baseline(report: Report) -> Mapping[str, Any] | None:
    entries: Iterable[Mapping[str, Any]] = report["formats"].values()
    return next((e for e in entries if e["format"] == "fp16" and not e["control"]), None)


def _lead(report: Report) -> str:
    base = _baseline(report)
    best = max(report["formats"].values(), key=lambda e: (e["g1_measured"], e["g0"]))
    if base is None or best is base or not base["g1_measured"]:
        return ""
    cost = "" if best["perplexity_ratio"] is None else f" Perplexity is {best['perplexity_ratio']:.3f} times FP16's."
    users = f"keeps the SLO for {best['g2']:g} concurrent users where FP16 keeps it for {base['g2']:g}"
    return (
        f'<p class="lead">In the same {format_bytes(report["kv_budget_bytes"])} of KV cache, '
        f"<b>{escaped(best['format'])} holds {best['g1_measured']:g} sequences at once where FP16 holds "
        f"{base['g1_measured']:g}</b> ({best['g1_measured'] / base['g1_measured']:.2f}x), and {users}.{cost}</p>"
    )


def _trouble(report: Report) -> str:
    if report["valid"]:
        return ""
    items = "".join(f"<li>{escaped(problem)}</li>" for problem in report["problems"])
    return f'<div class="bad"><b>This run is not valid by its own rules:</b><ul>{items}</ul></div>'


def _common(report: Report) -> int | None:
    return max(report["common_levels"], default=None)


def _at(entry: Mapping[str, Any], level: int | None) -> Mapping[str, Any] | None:
    levels: Sequence[Mapping[str, Any]] = entry["levels"]
    return next((item for item in levels if item["level"] == level), None)


def _table(report: Report) -> str:
    common = _common(report)
    head = (
        "<th>KV format</th><th>effective<br>bits</th><th>G0<small>bytes</small></th>"
        "<th>G1<small>predicted</small></th><th>G1<small>measured</small></th>"
        "<th>G2<small>within SLO</small></th>"
        "<th>out tok/s<small>KV full</small></th>"
        f"<th>TTFT p50<small>p95, at {common} users</small></th><th>TPOT p50<small>p95, at {common} users</small></th>"
        "<th>perplexity<small>over FP16</small></th><th>KL<small>nats</small></th>"
        "<th>top-1<small>as FP16</small></th>"
    )
    rows = "".join(_row(report, name, entry, common) for name, entry in report["formats"].items())
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(report: Report, name: str, entry: Mapping[str, Any], common: int | None) -> str:
    at = _at(entry, common)
    base = _baseline(report)
    gain = ""
    if base is not None and base["g1_measured"]:
        gain = f"<small>{entry['g1_measured'] / base['g1_measured']:.2f}x</small>"
    missed = entry["g2_missed_at"]
    knee = f"<small>missed at {missed:g}</small>" if missed is not None else "<small>never missed</small>"
    perplexity = _number(entry["perplexity"], 2)
    ratio = f"<small>{_number(entry['perplexity_ratio'], 4)}</small>"
    label = f"{escaped(name)}<small>control: half of the bytes</small>" if entry["control"] else escaped(name)
    cells = (
        f'<i class="dot" style="background:{colours(report)[name]}"></i>{label}',
        _number(entry["effective_bits"], 2),
        _number(entry["g0"], 2, "x"),
        _number(entry["g1_predicted"], 0),
        f"<b>{entry['g1_measured']:g}</b>{gain}",
        f"<b>{entry['g2']:g}</b>{knee}",
        _number(entry["output_tokens_per_s"], 0),
        _pair(at, "ttft"),
        _pair(at, "tpot"),
        perplexity + ratio,
        _number(entry["kl"], 4),
        "–" if entry["top1"] is None else f"{100 * entry['top1']:.1f} %",
    )
    return f"<tr{' class=control' if entry['control'] else ''}>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"


def _reading(report: Report) -> str:
    workload = report["workload"]
    slo = workload["slo"]
    shortest, longest = workload["prompt_tokens"]
    prompt = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
    return (
        '<p class="note">'
        f"Every request: {prompt} prompt tokens, {workload['output_tokens']} output tokens (forced), unique prompts, "
        "closed loop. "
        f"Same weights, kernels and scheduler ({escaped(report['policy'])}, max_tokens {report['max_tokens']}) "
        "for all; "
        f"KV budget {format_bytes(report['kv_budget_bytes'])}, scales and residual inside. "
        f"SLO: first token within {slo['ttft_seconds']:g} s and {1000 * slo['tpot_seconds']:g} ms per output token, "
        f"kept by {slo['attainment']:.0%} of the requests. G0, G1 and G2 are three answers to three questions and "
        "are not to be multiplied; effective bits are of a whole sequence of this length. A capacity gain is not a "
        "throughput gain: that is why both are here.</p>"
    )


def _binding(report: Report) -> str:
    bound = report["kv_binds"]
    if bound is None:
        return ""
    verdict = "The KV cache binds" if bound["binds"] else "It is not shown that the KV cache binds"
    return (
        "<h2>Does the KV cache bind?</h2>"
        f"<p>{verdict}: with FP16 at {bound['level']} users a median of {bound['waiting']:g} waited while up to "
        f"{bound['occupancy']:.1%} of the KV bytes were in use and {bound['committed']:.1%} were committed to the "
        "sequences admitted (prompt and max_tokens). The negative control, FP16 at half of the bytes, should lose "
        "about half of its residents; if it did not, something else would be the limit.</p>"
    )


def _levels(report: Report) -> str:
    head = (
        "<th>format</th><th>users</th><th>SLO kept</th><th>TTFT p50</th><th>p90</th><th>p95</th><th>p99</th>"
        "<th>TPOT p50</th><th>p95</th><th>ITL p50<small>per chunk</small></th><th>p99</th><th>E2E p50</th><th>p95</th>"
        "<th>tok/s</th><th>goodput<small>req/s</small></th><th>achieved<small>concurrency</small></th>"
        "<th>running<small>max</small></th><th>waiting<small>median</small></th><th>KV max</th>"
        "<th>late p99<small>dispatch</small></th><th>client<small>CPU</small></th><th>incomplete</th>"
    )
    rows = []
    for name, entry in report["formats"].items():
        for item in entry["levels"]:
            passed = all(item["passed"])
            kept = f"{item['kept']} of {item['attempted']}"
            cells = (
                escaped(name),
                f"{item['level']}{'' if item['steady'] else ' *'}",
                kept if passed else f'<span class="miss">{kept}</span>',
                *(_ms(item[f"ttft_{p}"]) for p in ("p50", "p90", "p95", "p99")),
                *(_ms(item[f"tpot_{p}"]) for p in ("p50", "p95")),
                *(_ms(item[f"itl_chunk_{p}"]) for p in ("p50", "p99")),
                *(_ms(item[f"e2e_{p}"]) for p in ("p50", "p95")),
                _number(item["output_tokens_per_s"], 1),
                _number(item["goodput_per_s"], 2),
                _number(item["concurrency"], 2),
                _number(item["running_max"], 0),
                _number(item["waiting_median"], 0),
                _number(100 * item["kv_occupancy_max"], 1, " %"),
                _ms(item["dispatch_delay_p99"]),
                _number(item["client_cpu_percent"], 0, " %"),
                _number(item["incomplete"], 0),
            )
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    note = (
        '<p class="note">* the limit of warm-up came before every user had had a first token at this level. '
        "Requests are counted where their first token arrived inside the window; only tokens inside it count. "
        "KV max is what was in use; admission also counts what is promised.</p>"
    )
    return table + note


def _how(report: Report) -> str:
    machine, workload = report["machine"], report["workload"]
    facts = {
        "engine": f"{report['engine']}; weights {report['model'].get('weights.dtype', '?')}, "
        f"logits {report['model'].get('lm_head.dtype', '?')}",
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}, "
        f"{machine['system']}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "scheduler": f"{report['policy']}, at most {report['max_sequences']} sequences, "
        f"{report['max_tokens_per_step']} tokens a step; no prefix reuse",
        "windows": f"{workload['window_seconds']:g} s, or longer until {workload['minimum_requests']} requests are "
        f"decided, after warm-up at load without draining; {workload['repeats']} fresh server(s) per format",
        "client": "Locust, closed loop, generate_stream; the clock is read when each line arrives",
        "void if": "client CPU above 80 % of a core, dispatch delay p99 above 5 % of the median TTFT, or any error",
    }
    quality = report["quality"]
    if quality is not None:
        facts["quality"] = (
            f"{quality['windows']} windows of {quality['window_tokens']} tokens, {quality['method']}; {quality['text']}"
        )
    terms = "".join(f"<dt>{escaped(term)}</dt><dd>{escaped(fact)}</dd>" for term, fact in facts.items())
    return f"<h2>How it was measured</h2><dl>{terms}</dl>"
