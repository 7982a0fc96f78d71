"""Real Locust against a server whose timing is known."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lowkv.errors import LowkvError
from lowkv.loadtest.client import ClientPlan
from lowkv.loadtest.fake_server import FakeServer
from lowkv.loadtest.locust_process import LocustProcess
from lowkv.loadtest.metrics import level_result, resident_peak, time_per_output_token, time_to_first_token
from lowkv.loadtest.prompts import Encoder, write_prompts
from lowkv.loadtest.records import Clock, RequestRecord, read_requests
from lowkv.loadtest.run import Run, run_sweep
from lowkv.loadtest.server import Endpoint
from lowkv.loadtest.sweep import knee
from lowkv.loadtest.workload import Lengths, Workload

TEXT = " ".join(f"w{i}" for i in range(300))


@pytest.fixture
def prompts(tmp_path: Path, words: Encoder) -> Path:
    path = tmp_path / "prompts.jsonl"
    write_prompts(path, TEXT, words, Lengths(20, 30), 200, seed=1)
    return path


def requests_of(
    server: FakeServer, folder: Path, prompts: Path, *, users: int = 1, output_tokens: int = 40, wanted: int = 1
) -> list[RequestRecord]:
    """What `users` recorded by the time that `wanted` requests had ended."""
    folder.mkdir()
    plan = ClientPlan(server.url, "fake", str(prompts), output_tokens)
    with LocustProcess(folder, plan, Clock()) as locust:
        locust.users(users)
        deadline = time.monotonic() + 20
        while len(read_requests(folder)) < wanted and time.monotonic() < deadline:
            locust.check()
            time.sleep(0.1)
    return read_requests(folder)


def test_every_line_is_seen_when_it_arrives(tmp_path: Path, prompts: Path) -> None:
    """40 events 20 ms apart: a client that reads in chunks sees a few bursts, the first after hundreds of ms."""
    with FakeServer(ttft=0.05, gap=0.02) as server:
        record = requests_of(server, tmp_path / "run", prompts)[0]
    assert record.status == "ok"
    assert record.event_tokens == [1] * 40
    arrivals = record.event_times
    ttft, tpot = time_to_first_token(record), time_per_output_token(record)
    assert ttft is not None
    assert tpot is not None
    assert 0.05 <= ttft < 0.5
    assert 0.018 < tpot < 0.04
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert sum(gap > 0.005 for gap in gaps) >= 30, gaps  # arrivals of their own, not bursts
    assert record.input_tokens == record.expected_input_tokens


def test_what_is_under_way_at_the_end_is_incomplete(tmp_path: Path, prompts: Path) -> None:
    with FakeServer(ttft=0.01, gap=0.02) as server:
        records = requests_of(server, tmp_path / "run", prompts, users=3, output_tokens=30, wanted=4)
    assert {"ok", "incomplete"} == {record.status for record in records}
    assert all(r.output_tokens < 30 for r in records if r.status == "incomplete")
    assert len({r.user for r in records}) == 3
    assert len({r.prompt for r in records}) == len(records)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"fail_with": "no such model"}, "HTTP 400: "),
        ({"cut_after": 5}, ""),
        ({"miscount": 3}, "tokens on the server"),
    ],
)
def test_errors_are_records(tmp_path: Path, prompts: Path, trouble: dict[str, object], said: str) -> None:
    with FakeServer(ttft=0.01, gap=0.005, **trouble) as server:  # type: ignore[arg-type]
        record = requests_of(server, tmp_path / "run", prompts, output_tokens=10)[0]
    assert record.status == "error"
    assert record.error is not None
    assert said in record.error


def test_a_sweep_finds_capacity_and_knee(tmp_path: Path, prompts: Path, workload: Workload) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with FakeServer(ttft=0.05, gap=0.02, slots=4) as server:
        endpoint = Endpoint("fake", server.url, f"{server.url}/metrics", pid=None)
        run = run_sweep(workload, endpoint, prompts, folder, capacity=4, key="k")
    results = [level_result(run.requests, run.server, run.client, w, workload.slo) for w in run.windows]
    assert {1, 4, 5, 8} <= {r.level for r in results}
    assert knee({r.level: r.verdict.passed for r in results}).passed == 4
    assert resident_peak(run.server) == 4
    by_level = {r.level: r for r in results}
    # 4 of 4 places, each a token every 20 ms but for 50 ms before the first: about 4 / 0.0215 tokens a second at most.
    assert 90 < by_level[8].output_tokens_per_s < 200
    assert 3.5 < by_level[4].concurrency < 4.2
    assert by_level[8].waiting_median >= 3
    assert all(r.errors == 0 for r in results)
    assert Run.read(folder).key == "k"


def test_a_sweep_says_why_nothing_works(tmp_path: Path, prompts: Path, workload: Workload) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with FakeServer(fail_with="max_tokens is out of range") as server:
        endpoint = Endpoint("fake", server.url, f"{server.url}/metrics")
        with pytest.raises(LowkvError, match="max_tokens is out of range"):
            run_sweep(workload, endpoint, prompts, folder)
    assert not (folder / "run.json").exists()


def test_a_server_without_our_metrics_is_refused(tmp_path: Path, prompts: Path, workload: Workload) -> None:
    with FakeServer() as server:
        endpoint = Endpoint("another", server.url, f"{server.url}/metrics")
        with pytest.raises(LowkvError, match="no metric lowkv_requests"):
            run_sweep(workload, endpoint, prompts, tmp_path)


def test_several_processes_share_the_users(tmp_path: Path, prompts: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with FakeServer(ttft=0.01, gap=0.01) as server:
        plan = ClientPlan(server.url, "fake", str(prompts), 10, processes=2)
        with LocustProcess(folder, plan, Clock()) as locust:
            locust.users(4)
            deadline = time.monotonic() + 20
            while len({r.user for r in read_requests(folder)}) < 4 and time.monotonic() < deadline:
                time.sleep(0.1)
    records = read_requests(folder)
    assert len({r.user for r in records}) == 4
    assert len(list(folder.glob("requests-*.jsonl"))) == 2
    assert len({r.prompt for r in records}) == len(records)


def test_locust_ends_with_the_one_who_started_it(tmp_path: Path, prompts: Path) -> None:
    """Killed, not asked: nothing gets a chance to clean up."""
    folder = tmp_path / "run"
    folder.mkdir()
    with FakeServer() as server:
        code = (
            "import time; from pathlib import Path\n"
            "from lowkv.loadtest.client import ClientPlan\n"
            "from lowkv.loadtest.locust_process import LocustProcess\n"
            "from lowkv.loadtest.records import Clock\n"
            f"with LocustProcess(Path({str(folder)!r}), ClientPlan({server.url!r}, 'fake', {str(prompts)!r}, 10), "
            "Clock()) as locust:\n    locust.users(1)\n    time.sleep(60)\n"
        )
        starter = subprocess.Popen([sys.executable, "-c", code])
        try:
            deadline = time.monotonic() + 20
            while not list(folder.glob("requests-*.jsonl")) and time.monotonic() < deadline:
                time.sleep(0.1)
            children = psutil.Process(starter.pid).children(recursive=True)
        finally:
            starter.kill()
            starter.wait()
        assert children
        _, alive = psutil.wait_procs(children, timeout=8)
        assert not alive
