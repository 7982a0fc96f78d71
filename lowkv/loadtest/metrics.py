"""The metrics of a load test, each with its formula, from raw records.

Notation: a request r is sent at s, its tokens arrive in events at times t_1 <= ... <= t_m with n_1 ... n_m
tokens, N = n_1 + ... + n_m. A window W is [a, b). Everything is in seconds. Percentiles are NumPy's, of the
raw values, linearly interpolated.

A request belongs to the window in which its **first token** arrived: that is when its TTFT is decided, and in
a steady state the requests that start and the requests that end in a window are alike. Choosing by the time
of sending would lose, in a short window, just the requests that wait longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from lowkv.loadtest.records import ClientSample, RequestRecord, ServerSample, Window

if TYPE_CHECKING:
    from lowkv.loadtest.workload import Slo

CLIENT_CPU_LIMIT = 80.0
"""Percent of a core above which a Locust process may have been late to read the clock."""
DISPATCH_LIMIT = 0.05
"""Largest p99 dispatch delay, as a share of the median TTFT."""
TPOT_TOKENS = 16
"""Tokens from which a request under way is judged by its TPOT; the mean of the first few gaps says little."""
BOUND_OCCUPANCY = 0.95
"""Share of the KV budget in use, with requests waiting, from which the KV cache is said to bind."""


class Request(Protocol):
    """What the metrics of one request need: a `RequestRecord`, or an `InFlight` one."""

    @property
    def sent(self) -> float: ...
    @property
    def first(self) -> float | None: ...
    @property
    def last(self) -> float | None: ...
    @property
    def output_tokens(self) -> int: ...


def time_to_first_token(request: Request) -> float | None:
    """TTFT = t_1 - s. None before the first token."""
    return None if request.first is None else request.first - request.sent


def time_per_output_token(request: Request) -> float | None:
    """TPOT = (t_m - t_1) / (N - 1). None before the second token."""
    if request.first is None or request.last is None or request.output_tokens < 2:
        return None
    return (request.last - request.first) / (request.output_tokens - 1)


def end_to_end(request: Request) -> float | None:
    """E2E = t_m - s. None before the first token."""
    return None if request.last is None else request.last - request.sent


def dispatch_delay(record: RequestRecord) -> float:
    """Delay = s - scheduled: how late the client itself was."""
    return record.sent - record.scheduled


def gaps(record: RequestRecord, window: Window) -> list[tuple[float, int]]:
    """(t_i - t_(i-1), n_i) for every event i >= 2 that arrived in the window."""
    times, tokens = record.event_times, record.event_tokens
    return [(times[i] - times[i - 1], tokens[i]) for i in range(1, len(times)) if window.holds(times[i])]


def inter_token_latencies(records: Iterable[RequestRecord], window: Window) -> list[float]:
    """ITL per token: the gap before an event, shared evenly by its tokens: (t_i - t_(i-1)) / n_i, n_i
    times.
    """
    return [gap / n for record in records for gap, n in gaps(record, window) for _ in range(n)]


def inter_chunk_latencies(records: Iterable[RequestRecord], window: Window) -> list[float]:
    """ITL per chunk: t_i - t_(i-1), however many tokens came at once."""
    return [gap for record in records for gap, _ in gaps(record, window)]


def output_tokens_in(records: Iterable[RequestRecord], window: Window) -> int:
    """Tokens whose event arrived in the window, whenever their request began or ended."""
    return sum(
        n for record in records for t, n in zip(record.event_times, record.event_tokens, strict=True) if window.holds(t)
    )


def output_throughput(records: Iterable[RequestRecord], window: Window) -> float:
    """Output tokens per second = tokens that arrived in the window / (b - a)."""
    return output_tokens_in(records, window) / window.seconds


def request_throughput(records: Iterable[RequestRecord], window: Window) -> float:
    """Requests per second = requests that ended well in the window / (b - a)."""
    return sum(r.status == "ok" and window.holds(r.last) for r in records) / window.seconds


def goodput(records: Iterable[RequestRecord], window: Window, slo: Slo) -> float:
    """Requests per second that ended well in the window and kept the SLO in TTFT and TPOT."""
    return sum(r.status == "ok" and window.holds(r.last) and _kept(r, slo) for r in records) / window.seconds


def achieved_concurrency(records: Iterable[RequestRecord], window: Window) -> float:
    """Mean number of requests under way = sum over requests of |[s, end) ∩ W| / (b - a)."""
    inside = (min(r.ended, window.end) - max(r.sent, window.start) for r in records)
    return sum(max(0.0, seconds) for seconds in inside) / window.seconds


def _kept(request: Request, slo: Slo) -> bool:
    ttft, tpot = time_to_first_token(request), time_per_output_token(request)
    ended = isinstance(request, RequestRecord) and request.status == "ok"
    if request.output_tokens < TPOT_TOKENS and not ended:
        tpot = None
    return ttft is not None and ttft <= slo.ttft_seconds and (tpot is None or tpot <= slo.tpot_seconds)


@dataclass(frozen=True)
class Verdict:
    """How many requests of a window were decided, how many kept the SLO, and whether that is enough."""

    attempted: int
    kept: int
    attainment: float
    passed: bool


def slo_verdict(requests: Iterable[Request], errors: int, window: Window, slo: Slo) -> Verdict:
    """Attempted = first token in the window, or none by its end after waiting longer than the SLO allows, or
    an error.

    Kept = TTFT and TPOT (of what has come so far) within the SLO. Requests that wait, but not yet too long,
    are undecided and left out. A window that decided nothing has not passed. In a window that is not steady only
    requests sent inside it count: the others waited behind the prompts of users who were still joining.
    """
    attempted, kept = errors, 0
    for request in requests:
        if not window.steady and request.sent < window.start:
            continue
        if window.holds(request.first):
            attempted += 1
            kept += _kept(request, slo)
        elif request.first is None or request.first >= window.end:
            # Sent, and at the window's end still without a token.
            attempted += request.sent < window.end - slo.ttft_seconds
    share = kept / attempted if attempted else 0.0
    return Verdict(attempted, kept, share, attempted > 0 and share >= slo.attainment)


@dataclass(frozen=True)
class Percentiles:
    """Of `count` values: the 50th, 90th, 95th and 99th percentile and the mean."""

    count: int
    p50: float
    p90: float
    p95: float
    p99: float
    mean: float


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """The percentiles of the values that are there; None when none are."""
    import numpy as np

    there = np.array([value for value in values if value is not None], np.float64)
    if not there.size:
        return None
    p50, p90, p95, p99 = (float(p) for p in np.percentile(there, (50, 90, 95, 99)))
    return Percentiles(int(there.size), p50, p90, p95, p99, float(there.mean()))


@dataclass(frozen=True)
class LevelResult:
    """One level of one server: every metric, and what makes it void."""

    level: int
    window: Window
    verdict: Verdict
    ttft: Percentiles | None
    tpot: Percentiles | None
    itl_token: Percentiles | None
    itl_chunk: Percentiles | None
    e2e: Percentiles | None
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    concurrency: float
    dispatch_delay: Percentiles | None
    client_cpu_percent: float | None
    running_max: int
    waiting_median: float
    kv_occupancy_max: float
    incomplete: int
    errors: int
    problems: tuple[str, ...]

    def to_mapping(self) -> dict[str, object]:
        return asdict(self) | {"valid": not self.problems}


def level_result(
    records: Sequence[RequestRecord],
    server: Sequence[ServerSample],
    client: Sequence[ClientSample],
    window: Window,
    slo: Slo,
) -> LevelResult:
    """All metrics of a window. `records` are those of the whole run: a request that began before it has
    tokens in it.
    """
    began = [r for r in records if window.holds(r.first)]
    ended = [r for r in records if r.status == "ok" and window.holds(r.last)]
    failed = [r for r in records if r.status == "error" and window.holds(r.ended)]
    sent = [r for r in records if window.holds(r.sent)]
    samples = [s for s in server if window.holds(s.t)]
    cpu = [s.cpu_percent for s in client if window.holds(s.t)]
    healthy = [r for r in records if r.status != "error"]
    ttft = percentiles(time_to_first_token(r) for r in began)
    delay = percentiles(dispatch_delay(r) for r in sent)
    busiest = max(cpu, default=None)
    return LevelResult(
        level=window.level,
        window=window,
        verdict=slo_verdict(healthy, len(failed), window, slo),
        ttft=ttft,
        tpot=percentiles(time_per_output_token(r) for r in ended),
        itl_token=percentiles(inter_token_latencies(records, window)),
        itl_chunk=percentiles(inter_chunk_latencies(records, window)),
        e2e=percentiles(end_to_end(r) for r in ended),
        output_tokens_per_s=output_throughput(records, window),
        requests_per_s=request_throughput(records, window),
        goodput_per_s=goodput(records, window, slo),
        concurrency=achieved_concurrency(records, window),
        dispatch_delay=delay,
        client_cpu_percent=busiest,
        running_max=max((s.running for s in samples), default=0),
        waiting_median=_median([s.waiting for s in samples]),
        kv_occupancy_max=max((s.kv_used / s.kv_total for s in samples), default=0.0),
        incomplete=sum(r.status == "incomplete" and r.sent < window.end and r.ended > window.start for r in records),
        errors=len(failed),
        problems=tuple(_problems(ttft, delay, busiest, failed)),
    )


def _problems(
    ttft: Percentiles | None,
    delay: Percentiles | None,
    busiest: float | None,
    failed: Sequence[RequestRecord],
) -> Iterable[str]:
    """The protocol's rules: what of this makes the window void."""
    if failed:
        yield f"{len(failed)} request(s) failed, the first with: {failed[0].error}"
    if busiest is not None and busiest > CLIENT_CPU_LIMIT:
        yield f"a Locust process used {busiest:.0f} % of a core, more than {CLIENT_CPU_LIMIT:.0f} %"
    if ttft is not None and delay is not None and delay.p99 > DISPATCH_LIMIT * ttft.p50:
        yield (
            f"requests were sent up to {delay.p99 * 1000:.1f} ms late (p99), "
            f"more than {DISPATCH_LIMIT:.0%} of the median TTFT"
        )


def kv_bound(server: Sequence[ServerSample], window: Window) -> float | None:
    """The largest share of the KV budget in use while requests waited, in the window; None when none
    waited.
    """
    return max((s.kv_used / s.kv_total for s in server if window.holds(s.t) and s.waiting > 0), default=None)


def resident_peak(server: Sequence[ServerSample]) -> int:
    """G1 as measured: the most sequences resident at once, by the server's own peak gauge and by every sample
    of `running`.
    """
    return max((max(s.running, s.running_peak) for s in server), default=0)


def saturated_span(windows: Sequence[Window], resident: int) -> Window:
    """The time in which more users than `resident` sequences were there without a break, up to the last window's end.

    Windows follow each other without draining, so the warm-up between two of them is saturated too. Throughput is read
    over all of it: a single window can be shorter than a request, and then sees mostly prompts or mostly answers. When
    the last window is not saturated itself, it is that window.
    """
    ordered = sorted(windows, key=lambda window: window.start)
    span = ordered[-1]
    for window in reversed(ordered):
        if window.level <= resident:
            break
        span = Window(span.level, window.start, ordered[-1].end, span.steady)
    return span


def _median(values: Sequence[int]) -> float:
    import statistics

    return float(statistics.median(values)) if values else 0.0
