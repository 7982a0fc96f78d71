"""`report.json`: every figure of a campaign, computed from its raw records.

Three figures that must not be merged into one:

    G0  bytes of a 16-bit sequence over bytes of this one, by arithmetic (whole blocks, residual and sink included)
    G1  most sequences resident at once in the same KV budget: predicted by the planner, and read from the server
    G2  largest closed concurrency at which the SLO is kept

Each figure of a format is the median of its runs, with the range beside it where there are several.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from lowkv.loadtest.campaign import Subject
from lowkv.loadtest.metrics import (
    BOUND_OCCUPANCY,
    LevelResult,
    kv_bound,
    level_result,
    output_throughput,
    resident_peak,
    saturated_span,
)
from lowkv.loadtest.run import Run
from lowkv.loadtest.sweep import knee
from lowkv.loadtest.workload import Workload

BASELINE = "fp16"

LIMITS = (
    "G3, saturated throughput under open (Poisson) arrivals, is not measured: the load is closed-loop.",
    "Times are those of a CPU engine on the machine named here: they do not carry over to others, nor do G2 and tok/s.",
    "The ratios G0 and G1 are arithmetic over bytes and carry over, for the same shape of request.",
    "One shape of request. Other lengths give other ratios: residual and sink weigh more on short sequences.",
    "Quality is that of the KV format on one text and one small model, not of an application.",
)


def build_report(
    title: str,
    workload: Workload,
    subjects: Sequence[Subject],
    runs: Mapping[str, Sequence[Run]],
    machine: Mapping[str, Any],
    quality: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of a campaign as plain values.

    `runs` are those of each subject by its name; `quality` is `lowkv.evaluation`'s mapping, its results by subject
    name (a control has the quality of the baseline, being the same format).
    """
    first = subjects[0]
    dense = max(s.plan.bytes_at(workload.tokens) * s.plan.compression(workload.tokens) for s in subjects)
    formats = {
        subject.name: _format(subject, workload, runs[subject.name], dense, _quality_of(subject, quality))
        for subject in subjects
    }
    shared = set.intersection(*({level["level"] for level in entry["levels"]} for entry in formats.values()))
    problems = [f"{name}: {problem}" for name, entry in formats.items() for problem in entry["problems"]]
    return {
        "title": title,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": "CPU engine" if first.about.get("compute", "cpu") == "cpu" else first.about["compute"],
        "machine": dict(machine),
        "model": dict(first.about),
        "workload": workload.to_mapping(),
        "kv_budget_bytes": next((s.budget for s in subjects if not s.control), first.budget),
        "policy": first.serving.policy,
        "max_tokens": workload.output_tokens,
        "max_tokens_per_step": first.serving.max_tokens_per_step,
        "max_sequences": first.serving.max_sequences,
        "common_levels": sorted(shared),
        "kv_binds": _binds(subjects, formats),
        "quality": {key: value for key, value in (quality or {}).items() if key != "results"} or None,
        "valid": not problems,
        "problems": problems,
        "formats": formats,
        "limits": list(LIMITS),
    }


def _quality_of(subject: Subject, quality: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if quality is None:
        return None
    results: Mapping[str, Mapping[str, Any]] = quality["results"]
    return results.get(subject.name) or results.get(subject.plan.default)


def _format(
    subject: Subject, workload: Workload, runs: Sequence[Run], dense: float, quality: Mapping[str, Any] | None
) -> dict[str, Any]:
    tokens = workload.tokens
    capacity = subject.capacity(workload)
    results = [_levels(run) for run in runs]
    knees = [knee({r.level: r.verdict.passed for r in levels}) for levels in results]
    peaks = [resident_peak(run.server) for run in runs]
    spans = [saturated_span(run.windows, peak) for run, peak in zip(runs, peaks, strict=True)]
    speeds = [output_throughput(run.requests, span) for run, span in zip(runs, spans, strict=True)]
    misses = [k.failed for k in knees if k.failed is not None]
    entry: dict[str, Any] = {
        "format": subject.plan.default,
        "plan": subject.plan.summary(),
        "control": subject.control,
        "kv_budget_bytes": subject.budget,
        "effective_bits": subject.plan.effective_bits(tokens),
        "bytes_per_sequence": subject.plan.bytes_at(tokens),
        "reserved_bytes_per_sequence": capacity.bytes_per_sequence,
        "g0": dense / subject.plan.bytes_at(tokens),
        "g1_predicted": capacity.sequences,
        "g1_measured": _median(peaks),
        "g2": _median([k.passed for k in knees]),
        "g2_missed_at": _median(misses) if misses else None,
        "output_tokens_per_s": _median(speeds),
        "saturated_seconds": sum(span.seconds for span in spans),
        "goodput_per_s": _median([max((r.goodput_per_s for r in levels), default=0.0) for levels in results]),
        "kv_bound": _largest([kv_bound(run.server, window) for run in runs for window in run.windows]),
        "memory_bytes": _largest([s.memory for run in runs for s in run.server]),
        "preemptions": max((s.preemptions for run in runs for s in run.server), default=0),
        "perplexity": quality["perplexity"]["value"] if quality else None,
        "perplexity_ratio": quality["ratio"]["value"] if quality else None,
        "kl": quality["kl"]["value"] if quality else None,
        "top1": quality["top1"]["value"] if quality else None,
        "quality": dict(quality) if quality else None,
        "ranges": {
            "g1_measured": [min(peaks), max(peaks)],
            "g2": [min(k.passed for k in knees), max(k.passed for k in knees)],
            "output_tokens_per_s": [min(speeds), max(speeds)],
        },
        "levels": _merged(results),
        "runs": len(runs),
        "cut_short": any(run.cut_short for run in runs),
        "problems": [p for run, levels in zip(runs, results, strict=True) for p in _problems(run, levels)],
        "series": _series(runs[0]),
    }
    return entry


def _levels(run: Run) -> list[LevelResult]:
    slo = run.workload.slo
    return [
        level_result(run.requests, run.server, run.client, window, slo)
        for window in sorted(run.windows, key=lambda window: window.level)
    ]


def _problems(run: Run, levels: Sequence[LevelResult]) -> list[str]:
    found = [f"{result.level} users: {problem}" for result in levels for problem in result.problems]
    used = [record.prompt for record in run.requests]
    if len(set(used)) < len(used):
        found.append("the prompts ran out, so that some were used twice; raise `prompts` in the workload")
    return found


_MERGED: tuple[tuple[str, Callable[[LevelResult], Any]], ...] = (
    *(
        (f"{name}_{p}", lambda r, name=name, p=p: getattr(getattr(r, name), p, None))
        for name in ("ttft", "tpot", "itl_token", "itl_chunk", "e2e", "dispatch_delay")
        for p in ("p50", "p90", "p95", "p99")
    ),
    ("output_tokens_per_s", lambda r: r.output_tokens_per_s),
    ("requests_per_s", lambda r: r.requests_per_s),
    ("goodput_per_s", lambda r: r.goodput_per_s),
    ("concurrency", lambda r: r.concurrency),
    ("attainment", lambda r: r.verdict.attainment),
    ("client_cpu_percent", lambda r: r.client_cpu_percent),
    ("running_max", lambda r: r.running_max),
    ("waiting_median", lambda r: r.waiting_median),
    ("kv_occupancy_max", lambda r: r.kv_occupancy_max),
)


def _merged(results: Sequence[Sequence[LevelResult]]) -> list[dict[str, Any]]:
    """One entry a level: medians over the runs that measured it, sums of counts, and all verdicts."""
    by_level: dict[int, list[LevelResult]] = {}
    for levels in results:
        for result in levels:
            by_level.setdefault(result.level, []).append(result)
    return [
        {
            "level": level,
            "runs": len(group),
            "passed": [r.verdict.passed for r in group],
            "steady": all(r.window.steady for r in group),
            "window_seconds": sum(r.window.seconds for r in group),
            "attempted": sum(r.verdict.attempted for r in group),
            "kept": sum(r.verdict.kept for r in group),
            "incomplete": sum(r.incomplete for r in group),
            "errors": sum(r.errors for r in group),
            **{name: _median_of([value(r) for r in group]) for name, value in _MERGED},
            "windows": [asdict(r.window) for r in group],
        }
        for level, group in sorted(by_level.items())
    ]


def _binds(subjects: Sequence[Subject], formats: Mapping[str, Any]) -> dict[str, Any] | None:
    """Is it the KV cache that limits the baseline? Read where it first missed the SLO, else at its last level."""
    name = next((s.name for s in subjects if s.plan.default == BASELINE and not s.control), None)
    if name is None:
        return None
    entry = formats[name]
    level = entry["g2_missed_at"] or entry["levels"][-1]["level"]
    at = min(entry["levels"], key=lambda item: abs(item["level"] - level))
    committed = min(1.0, entry["g1_measured"] * entry["reserved_bytes_per_sequence"] / entry["kv_budget_bytes"])
    return {
        "baseline": name,
        "level": at["level"],
        "occupancy": at["kv_occupancy_max"],
        "committed": committed,
        "waiting": at["waiting_median"],
        "binds": at["waiting_median"] > 0 and max(at["kv_occupancy_max"], committed) >= BOUND_OCCUPANCY,
    }


def _series(run: Run) -> list[dict[str, Any]]:
    """The server's samples of a run, seconds from its start, for the plots."""
    start = run.server[0].t if run.server else 0.0
    return [
        {
            "t": round(s.t - start, 2),
            "kv_used": s.kv_used,
            "kv_total": s.kv_total,
            "running": s.running,
            "waiting": s.waiting,
        }
        for s in run.server
    ]


def _median(values: Sequence[float]) -> float:
    """The median; a whole number where the values are."""
    middle = statistics.median(values)
    return int(middle) if middle == int(middle) and all(isinstance(v, int) for v in values) else middle


def _median_of(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return _median(there) if there else None


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
