from __future__ import annotations

from dataclasses import replace

import pytest

from lowkv.loadtest import metrics
from lowkv.loadtest.records import ClientSample, InFlight, RequestRecord, ServerSample, Window
from lowkv.loadtest.workload import Slo

SLO = Slo(ttft_seconds=1.0, tpot_seconds=0.5, attainment=0.95)
WINDOW = Window(level=2, start=10.0, end=20.0)


def request(sent: float, times: list[float], tokens: list[int] | None = None, **changes: object) -> RequestRecord:
    tokens = tokens or [1] * len(times)
    record = RequestRecord(
        request=f"r{sent}",
        user="u",
        prompt=int(sent * 1000),
        scheduled=sent - 0.001,
        sent=sent,
        ended=times[-1] if times else sent,
        event_times=times,
        event_tokens=tokens,
        input_tokens=8,
        output_tokens=sum(tokens),
        expected_input_tokens=8,
        expected_output_tokens=sum(tokens),
        status="ok",
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def sample(t: float, running: int = 2, waiting: int = 0, used: int = 50, peak: int = 2) -> ServerSample:
    return ServerSample(t, running, waiting, peak, used, 100, 1, 1, 0, 0, 0, 16.0)


def test_times_of_one_request() -> None:
    record = request(10.0, [10.5, 11.0, 12.0], [1, 2, 2])
    assert metrics.time_to_first_token(record) == 0.5
    assert metrics.time_per_output_token(record) == pytest.approx(1.5 / 4)
    assert metrics.end_to_end(record) == 2.0
    assert metrics.dispatch_delay(record) == pytest.approx(0.001)
    assert metrics.inter_chunk_latencies([record], WINDOW) == [0.5, 1.0]
    assert metrics.inter_token_latencies([record], WINDOW) == [0.25, 0.25, 0.5, 0.5]


def test_a_request_without_tokens_has_no_times() -> None:
    record = request(10.0, [])
    assert metrics.time_to_first_token(record) is None
    assert metrics.time_per_output_token(record) is None
    assert metrics.end_to_end(record) is None


def test_only_what_happens_inside_the_window_counts() -> None:
    record = request(8.0, [9.0, 9.9, 10.0, 19.9, 20.0], [1, 1, 3, 5, 7])
    assert metrics.output_tokens_in([record], WINDOW) == 8
    assert metrics.output_throughput([record], WINDOW) == pytest.approx(0.8)
    assert metrics.request_throughput([record], WINDOW) == 0.0  # its last token came after the end
    assert metrics.achieved_concurrency([record], WINDOW) == pytest.approx(1.0)


def test_goodput_counts_only_requests_that_kept_the_slo() -> None:
    good, late = request(11.0, [11.5, 12.0]), request(11.0, [12.5, 13.0])
    assert metrics.request_throughput([good, late], WINDOW) == pytest.approx(0.2)
    assert metrics.goodput([good, late], WINDOW, SLO) == pytest.approx(0.1)


def test_verdict_counts_those_who_still_wait() -> None:
    good = request(11.0, [11.5, 12.0])
    earlier = request(8.0, [9.0, 11.0])  # decided before the window
    waits_too_long = InFlight("a", "u", sent=18.0, first=None, last=None, output_tokens=0)
    undecided = InFlight("b", "u", sent=19.5, first=None, last=None, output_tokens=0)
    verdict = metrics.slo_verdict([good, earlier, waits_too_long, undecided], 0, WINDOW, SLO)
    assert (verdict.attempted, verdict.kept, verdict.passed) == (2, 1, False)
    assert metrics.slo_verdict([good, undecided], 0, WINDOW, SLO).passed
    assert not metrics.slo_verdict([good], 1, WINDOW, SLO).passed  # an error counts as attempted
    assert not metrics.slo_verdict([], 0, WINDOW, SLO).passed  # nothing was decided


def test_verdict_of_a_request_whose_first_token_came_after_the_window() -> None:
    late = request(18.0, [25.0, 26.0])
    assert metrics.slo_verdict([late], 0, WINDOW, SLO).attempted == 1


def test_an_unsteady_window_judges_only_what_was_sent_inside_it() -> None:
    window = Window(WINDOW.level, WINDOW.start, WINDOW.end, steady=False)
    behind_the_ramp = request(WINDOW.start - 6.0, [WINDOW.start + 1.0])
    good = request(11.0, [11.5, 12.0])
    assert not metrics.slo_verdict([behind_the_ramp, good], 0, WINDOW, SLO).passed
    assert metrics.slo_verdict([behind_the_ramp, good], 0, window, SLO) == metrics.slo_verdict([good], 0, WINDOW, SLO)


def test_tpot_is_part_of_the_slo() -> None:
    slow = request(11.0, [11.5, 12.5])
    assert not metrics.slo_verdict([slow], 0, WINDOW, SLO).passed


def test_percentiles_are_interpolated_from_raw_values() -> None:
    found = metrics.percentiles([float(i) for i in range(101)] + [None])
    assert found is not None
    assert (found.count, found.p50, found.p95, found.p99, found.mean) == (101, 50.0, 95.0, 99.0, 50.0)
    assert metrics.percentiles([None]) is None


def test_level_result_and_its_rules() -> None:
    records = [request(11.0 + i, [11.5 + i, 11.75 + i]) for i in range(4)]
    server = [sample(11.0), sample(12.0, running=3, waiting=2, used=97), sample(25.0, running=9)]
    clean = metrics.level_result(records, server, [ClientSample(12.0, 30.0)], WINDOW, SLO)
    assert clean.problems == ()
    assert clean.verdict.passed
    assert clean.running_max == 3
    assert clean.kv_occupancy_max == pytest.approx(0.97)
    assert clean.output_tokens_per_s == pytest.approx(0.8)

    busy = metrics.level_result(records, server, [ClientSample(12.0, 91.0)], WINDOW, SLO)
    assert any("91 % of a core" in problem for problem in busy.problems)
    late = [replace(r, scheduled=r.sent - 0.2) for r in records]
    assert any("late" in p for p in metrics.level_result(late, server, [], WINDOW, SLO).problems)
    failed = [*records, request(12.0, [], status="error", error="boom", ended=12.1)]
    assert any("boom" in p for p in metrics.level_result(failed, server, [], WINDOW, SLO).problems)


def test_capacity_and_binding_are_read_from_the_server() -> None:
    server = [sample(11.0, used=99), sample(12.0, running=4, waiting=1, used=96, peak=5)]
    assert metrics.resident_peak(server) == 5
    assert metrics.kv_bound(server, WINDOW) == pytest.approx(0.96)
    assert metrics.kv_bound([sample(11.0, used=99)], WINDOW) is None  # nobody waited


def test_tpot_of_a_request_under_way_is_judged_from_sixteen_tokens() -> None:
    young = InFlight("a", "u", sent=11.0, first=11.5, last=14.5, output_tokens=4)
    old = replace(young, output_tokens=16, last=11.5 + 0.6 * 15)
    assert metrics.slo_verdict([young], 0, WINDOW, SLO).passed
    assert not metrics.slo_verdict([old], 0, WINDOW, SLO).passed


def test_the_saturated_span_reaches_back_over_warm_ups_but_not_over_a_level_that_fits() -> None:
    windows = [Window(2, 0, 10), Window(4, 20, 30), Window(5, 40, 50), Window(12, 60, 70)]
    assert metrics.saturated_span(windows, resident=4) == Window(12, 40, 70)
    assert metrics.saturated_span([*windows[:3], Window(3, 52, 55), Window(12, 60, 70)], 4) == Window(12, 60, 70)
    assert metrics.saturated_span(windows, resident=12) == Window(12, 60, 70)
