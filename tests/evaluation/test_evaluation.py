"""Parts are kept and never done twice; what identifies them; what all measures share."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lowkv.engine import EngineDir
from lowkv.errors import LowkvError
from lowkv.evaluation import MEASURES, evaluate
from lowkv.evaluation.agreement import AgreementMeasure
from lowkv.evaluation.passkey import PasskeyMeasure
from lowkv.evaluation.quality import Documents, TextMeasure
from lowkv.evaluation.records import Records
from lowkv.evaluation.subjects import Loader
from lowkv.evaluation.task import TaskMeasure

from .conftest import TEXT, Counting

if TYPE_CHECKING:
    from lowkv.evaluation.measure import Measure

DOCUMENTS = Documents(TEXT, "three sentences")
SMALL: dict[str, Measure] = {
    "text": TextMeasure(512, 256, DOCUMENTS),
    "passkey": PasskeyMeasure(lengths=(200,), depths=(0.2, 0.6), repeats=1),
    "task": TaskMeasure(questions=3, shots=1),
    "agreement": AgreementMeasure(prompts=2, prompt_tokens=128, output_tokens=16, documents=DOCUMENTS),
}


@dataclass
class Told:
    """A progress that remembers."""

    stages: list[tuple[str, int | None]] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)

    def begin(self, stage: str, total: int | None = None) -> None:
        self.stages.append((stage, total))
        self.done[stage] = 0

    def advance(self, amount: int) -> None:
        self.done[self.stages[-1][0]] += amount


def test_every_measure_is_tested_here() -> None:
    assert list(SMALL) == list(MEASURES)


@pytest.mark.parametrize("name", SMALL)
def test_a_measure_twice_gives_the_same_and_counts_its_tokens(
    name: str, tiny_engines: dict[str, EngineDir], sums: object
) -> None:
    told = Told()
    first = evaluate(tiny_engines, [SMALL[name]], progress=told).to_mapping()
    assert first == evaluate(tiny_engines, [SMALL[name]]).to_mapping()
    json.dumps(first)
    stage, total = told.stages[-1]
    assert stage == f"measuring {name}"
    assert told.done[stage] == total


@pytest.mark.parametrize("name", SMALL)
def test_the_baseline_differs_from_itself_in_nothing(
    name: str, tiny_engines: dict[str, EngineDir], sums: object
) -> None:
    found = evaluate({"kivi2": tiny_engines["kivi2"]}, [SMALL[name]], baseline="kivi2").results["kivi2"]
    exact = {"ratio": 1, "kl": 0, "top1": 1, "agreement": 1, "agreement_until": 16, "task_difference": 0}
    assert {key: found[key]["value"] for key in exact if key in found} == {k: v for k, v in exact.items() if k in found}


@pytest.mark.parametrize("name", SMALL)
def test_tables_name_every_engine(name: str, tiny_engines: dict[str, EngineDir], sums: object) -> None:
    from rich.console import Console

    console = Console(width=200, file=io.StringIO(), record=True)
    for table in evaluate(tiny_engines, [SMALL[name]]).tables():
        console.print(table)
    text = console.export_text()
    assert name in text
    assert [engine for engine in ("fp16", "kivi4", "kivi2") if engine in text] == ["fp16", "kivi4", "kivi2"]


@pytest.mark.parametrize("name", SMALL)
def test_what_is_recorded_loads_no_model(
    name: str, tiny_engines: dict[str, EngineDir], sums: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records.jsonl"
    first = evaluate(tiny_engines, [SMALL[name]], records=Records(path)).to_mapping()
    monkeypatch.setattr(Loader, "load", lambda *_: pytest.fail("a model was loaded"))
    again = evaluate(tiny_engines, [SMALL[name]], records=Records(path)).to_mapping()
    assert again == first


def test_a_stopped_measurement_goes_on(tiny_engines: dict[str, EngineDir], tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    stopped = Counting(stop_at=1)
    with pytest.raises(KeyboardInterrupt):
        evaluate(tiny_engines, [stopped], records=Records(path))
    assert stopped.ran == [("fp16", 0), ("kivi4", 0), ("kivi2", 0)]
    with path.open("a") as file:  # a kill in the middle of a line
        file.write('{"key": "cut sho')
    further = Counting()
    found = evaluate(tiny_engines, [further], records=Records(path))
    assert further.ran == [(name, part) for part in (1, 2) for name in ("fp16", "kivi4", "kivi2")]
    assert {name: figures["sum"] for name, figures in found.results.items()} == {"fp16": 3, "kivi4": 3, "kivi2": 3}
    assert [json.loads(line)["part"] for line in path.read_text().splitlines()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_another_engine_costs_only_itself(
    tiny_engines: dict[str, EngineDir], build_tiny: Callable[..., Path], tmp_path: Path
) -> None:
    records = Records(tmp_path / "records.jsonl")
    evaluate({"a": tiny_engines["kivi2"]}, [Counting()], records=records)
    further = Counting()
    evaluate(
        {"b": tiny_engines["kivi2"], "c": EngineDir.open(build_tiny({"format": "k4v2"}))}, [further], records=records
    )
    assert further.ran == [("c", 0), ("c", 1), ("c", 2)]  # b is a under another name; so is FP16


@pytest.mark.parametrize("change", [{"count": 2}, {"baseline": "kivi4"}, {"version": "9"}])
def test_other_inputs_are_measured_anew(
    change: dict[str, object], tiny_engines: dict[str, EngineDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Beside(Counting):
        beside_baseline = True

    records = Records()
    evaluate(tiny_engines, [Beside()], records=records)
    if "version" in change:
        monkeypatch.setattr("lowkv.__version__", change["version"])
    again = Beside(count=int(change.get("count", 3)))  # type: ignore[call-overload]
    evaluate(tiny_engines, [again], baseline=change.get("baseline"), records=records)  # type: ignore[arg-type]
    assert ("kivi2", 0) in again.ran


def test_a_measure_beside_the_baseline_runs_it_again_for_a_new_engine(
    tiny_engines: dict[str, EngineDir], build_tiny: Callable[..., Path]
) -> None:
    class Beside(Counting):
        beside_baseline = True

    records = Records()
    evaluate({"kivi2": tiny_engines["kivi2"]}, [Beside(count=1)], records=records)
    further = Beside(count=1)
    evaluate(tiny_engines, [further], records=records)
    assert further.ran == [("fp16", 0), ("kivi4", 0)]


def test_an_altered_engine_is_refused_before_it_is_measured(build_tiny: Callable[..., Path]) -> None:
    path = build_tiny({"format": "kivi4"})
    weights = path / "weights.safetensors"
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.unlink()  # other engines share the file
    weights.write_bytes(data)
    with pytest.raises(LowkvError, match="altered"):
        evaluate({"kivi4": EngineDir.open(path, verify=False)}, [Counting()])


def test_a_file_that_holds_no_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"key": "k", "part": 0, "outcome": 1}\n{"results": {}}\n')
    with pytest.raises(LowkvError, match=r"records\.jsonl does not hold records of measurements \(line 2\)"):
        Records(path)
    assert Records(path, fresh=True).get("k", 0) is None


@pytest.mark.parametrize(
    ("engines", "arguments", "message"),
    [
        ([], {}, "no engine to evaluate"),
        (["kivi2"], {"measures": []}, "nothing to measure"),
        (["kivi2"], {"baseline": "other"}, "no engine has the baseline's name: got 'other', expected kivi2"),
    ],
)
def test_refusals(
    engines: list[str], arguments: dict[str, object], message: str, tiny_engines: dict[str, EngineDir]
) -> None:
    given = {"measures": [Counting()]} | arguments
    with pytest.raises(LowkvError, match=message):
        evaluate({name: tiny_engines[name] for name in engines}, **given)  # type: ignore[arg-type]
