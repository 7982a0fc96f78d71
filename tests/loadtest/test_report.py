"""From raw records to the page; the records come from a server whose capacity is known."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lowkv.errors import LowkvError
from lowkv.loadtest.campaign import Subject, check_comparable, run_campaign
from lowkv.loadtest.fake_server import FakeServer
from lowkv.loadtest.figures import summary_png
from lowkv.loadtest.page import render, write_report
from lowkv.loadtest.prompts import Encoder
from lowkv.loadtest.records import ClientSample, RequestRecord, ServerSample, Window, sole_writer
from lowkv.loadtest.report import build_report
from lowkv.loadtest.run import Run
from lowkv.loadtest.server import Endpoint
from lowkv.loadtest.workload import Workload

MakeSubject = Callable[..., Subject]
MACHINE = {
    "cpu": "Test CPU <1>",
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "system": "Linux",
    "versions": {"lowkv": "0"},
}


def quality(name: str) -> dict[str, object]:
    figures = {"perplexity": 20.0, "ratio": 1.1, "kl": 0.01, "top1": 0.9}
    return {"name": name} | {key: {"value": value, "low": value, "high": value} for key, value in figures.items()}


QUALITY = {
    "baseline": "fp16",
    "text": "a text",
    "windows": 4,
    "window_tokens": 128,
    "method": "teacher-forced",
    "results": {name: quality(name) for name in ("fp16", "kivi2")},
}


def canned_run(workload: Workload, places: int) -> Run:
    """A server with `places`: everybody who finds one waits 0.1 s for the first token, everybody else 1 s."""
    requests, windows, server = [], [], []
    for number, level in enumerate((1, places, places + 1, workload.saturation)):
        start = 10.0 * number
        windows.append(Window(level, start, start + 10))
        wait = 0.1 if level <= places else 1.0
        for i in range(8):
            sent = start + 1 + i
            times = [sent + wait + 0.02 * n for n in range(20)]
            requests.append(
                RequestRecord(
                    request=f"{level}-{i}",
                    user=str(i),
                    prompt=len(requests),
                    scheduled=sent - 0.0001,
                    sent=sent,
                    ended=times[-1],
                    event_times=times,
                    event_tokens=[1] * 20,
                    input_tokens=25,
                    output_tokens=20,
                    expected_input_tokens=25,
                    expected_output_tokens=20,
                    status="ok",
                )
            )
        running = min(level, places)
        server += [
            ServerSample(
                start + s, running, level - running, running, running * 100, places * 100, 3, 4, 0, 0, 0, 3.0, 10**9
            )
            for s in range(10)
        ]
    client = [ClientSample(sample.t, 12.0) for sample in server]
    return Run("key", workload, places, requests, server, client, windows, False)


@pytest.fixture
def runs(workload: Workload, subjects: Sequence[Subject]) -> dict[str, list[Run]]:
    places = {"fp16": 2, "kivi2": 5, "fp16-half": 1}
    return {subject.name: [canned_run(workload, places[subject.name])] for subject in subjects}


def test_report_has_every_figure(workload: Workload, subjects: list[Subject], runs: dict[str, list[Run]]) -> None:
    report = build_report("A title", workload, subjects, runs, MACHINE, QUALITY)
    kivi2, half = report["formats"]["kivi2"], report["formats"]["fp16-half"]
    assert (report["formats"]["fp16"]["g1_measured"], report["formats"]["fp16"]["g2"]) == (2, 2)
    assert (kivi2["g1_measured"], kivi2["g2"], kivi2["g2_missed_at"]) == (5, 5, 6)
    assert half["g1_measured"] == 1
    assert half["perplexity"] == 20.0  # the baseline's
    assert report["formats"]["fp16"]["g0"] == 1.0
    for key in ("g0", "g1_predicted", "g1_measured", "g2", "output_tokens_per_s", "perplexity"):
        assert isinstance(kivi2[key], int | float)
    assert kivi2["output_tokens_per_s"] == pytest.approx(16.0)
    assert report["kv_binds"]["binds"]
    assert report["common_levels"] == [1, workload.saturation]
    assert report["engine"] == "CPU engine"
    assert report["valid"]
    json.dumps(report)


def test_several_runs_give_median_and_range(workload: Workload, subjects: list[Subject]) -> None:
    runs = {s.name: [canned_run(workload, places) for places in (2, 3, 6)] for s in subjects}
    entry = build_report("A title", workload, subjects, runs, MACHINE)["formats"]["kivi2"]
    assert entry["g2"] == 3
    assert entry["ranges"]["g2"] == [2, 6]
    assert entry["perplexity"] is None


def test_a_run_that_breaks_a_rule_is_said_to_be_void(
    workload: Workload, subjects: list[Subject], runs: dict[str, list[Run]]
) -> None:
    runs["kivi2"][0].client.append(ClientSample(5.0, 95.0))
    report = build_report("A title", workload, subjects, runs, MACHINE)
    assert not report["valid"]
    assert "not valid by its own rules" in render(report)


def test_the_page_needs_nothing_but_itself(
    tmp_path: Path, workload: Workload, subjects: list[Subject], runs: dict[str, list[Run]]
) -> None:
    report = build_report("A title", workload, subjects, runs, MACHINE, QUALITY)
    page = write_report(report, tmp_path)
    text = page.read_text()
    assert json.loads((tmp_path / "report.json").read_text()) == report
    fetched = re.findall(r"""(?:src|href)\s*=\s*["'](?!\#)[^"']+""", text)
    assert fetched == []
    assert "@import" not in text
    assert "Test CPU &lt;1&gt;" in text
    for said in (
        "CPU engine",
        "guaranteed_no_evict",
        "Does the KV cache bind?",
        "KV occupancy over time",
        "Every level that was measured",
        "How it was measured",
        "What this does not show",
        "The negative control",
    ):
        assert said in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 4
    for drawing in drawings:
        ET.fromstring(drawing)


def test_the_page_lives_without_quality_and_without_a_baseline(workload: Workload, make_subject: MakeSubject) -> None:
    subject = make_subject("kivi2")
    report = build_report("A title", workload, [subject], {"kivi2": [canned_run(workload, 3)]}, MACHINE)
    assert report["kv_binds"] is None
    assert "<svg" in render(report)


def test_summary_picture(
    tmp_path: Path, workload: Workload, subjects: list[Subject], runs: dict[str, list[Run]]
) -> None:
    report = build_report("A title", workload, subjects, runs, MACHINE, QUALITY)
    assert summary_png(report, tmp_path / "a" / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_refused(workload: Workload, make_subject: MakeSubject) -> None:
    with pytest.raises(LowkvError, match="budgets differ"):
        check_comparable(workload, [make_subject("fp16"), make_subject("kivi2", budget=2**17)])
    with pytest.raises(LowkvError, match="not even one sequence"):
        check_comparable(workload, [make_subject("fp16", budget=1000)])
    with pytest.raises(LowkvError, match="same name"):
        check_comparable(workload, [make_subject("fp16"), make_subject("fp16")])


def test_a_campaign_keeps_what_is_finished(
    tmp_path: Path, workload: Workload, words: Encoder, make_subject: MakeSubject
) -> None:
    started: list[str] = []

    @contextmanager
    def start(subject: Subject, folder: Path) -> Iterator[Endpoint]:
        started.append(subject.name)
        with FakeServer(ttft=0.02, gap=0.005, slots=3) as server:
            yield Endpoint("fake", server.url, f"{server.url}/metrics")

    subject = make_subject("fp16", budget=2**15)
    workload = replace(workload, saturation=4, window_seconds=0.5, time_limit_seconds=0.1)  # two levels
    text = " ".join(f"w{i}" for i in range(300))
    first = run_campaign(workload, [subject], text, words, tmp_path, start=start)
    again = run_campaign(workload, [subject], text, words, tmp_path, start=start)
    assert started == ["fp16"]
    assert again["fp16"][0].windows == first["fp16"][0].windows
    report = build_report("A title", workload, [subject], again, MACHINE)
    assert report["formats"]["fp16"]["g1_measured"] == 3


def test_two_measurements_never_share_a_folder(tmp_path: Path) -> None:
    with (
        sole_writer(tmp_path),
        pytest.raises(LowkvError, match="another measurement is writing"),
        sole_writer(tmp_path),
    ):
        pass
    with sole_writer(tmp_path):
        pass
