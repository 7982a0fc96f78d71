"""The texts, the marks and the table; that a real model finds the numbers is in test_smollm2.py."""

from __future__ import annotations

from typing import Any

import pytest

from lowkv.engine import EngineDir
from lowkv.errors import LowkvError
from lowkv.evaluation import evaluate
from lowkv.evaluation.passkey import Item, PasskeyMeasure, PasskeyPart, _first_number


def test_the_number_stands_once_at_its_depth(tiny_engines: dict[str, EngineDir]) -> None:
    tokenizer = tiny_engines["kivi2"].tokenizer()
    for depth in (0.0, 0.3, 1.0):
        text, key, others = Item(1500, depth, 0).text(tokenizer)
        assert text.count(key) == 1
        assert len({key, *others}) == 4
        assert not any(other in text for other in others)
        assert text.endswith("The secret code of the vault is")
        assert len(tokenizer.encode(text)) == pytest.approx(1500, abs=60)
        needle, end = text.index("The secret code"), text.rindex("\n\nThe secret code")
        assert needle / end == pytest.approx(depth, abs=0.06)


def test_texts_depend_on_nothing_but_the_item(tiny_engines: dict[str, EngineDir]) -> None:
    tokenizer = tiny_engines["kivi2"].tokenizer()
    assert Item(300, 0.5, 1).text(tokenizer) == Item(300, 0.5, 1).text(tokenizer)
    assert len({Item(300, 0.5, repeat).text(tokenizer)[1] for repeat in range(5)}) == 5


@pytest.mark.parametrize(
    ("answer", "number"),
    [(" 27611.\n\nThe", "27611"), ("27611", "27611"), (" 276110", "276110"), (" a 27611", ""), ("", "")],
)
def test_the_number_that_an_answer_begins_with(answer: str, number: str) -> None:
    assert _first_number(answer) == number


def test_figures_by_length_and_depth(tiny_engines: dict[str, EngineDir]) -> None:
    measure = PasskeyMeasure(lengths=(100, 200), depths=(0.2, 0.8), repeats=5)
    assert measure.parts == 3
    answers = [
        {"found": item.depth < 0.5, "ranked": item.length < 150 or item.depth < 0.5, "logprob": -float(item.repeat)}
        for item in measure.items
    ]
    outcomes = [answers[:8], answers[8:16], answers[16:]]
    found = measure.figures(tiny_engines["kivi2"].cache_plan, outcomes, outcomes)
    assert found["passkey"]["value"] == 0.5
    assert found["passkey"]["low"] == pytest.approx(0.299, abs=1e-3)  # Wilson, 10 of 20
    assert found["passkey_ranked"]["value"] == 0.75
    assert found["passkey_logprob"]["value"] == -2
    assert found["passkey_cells"] == [
        {"length": 100, "depth": 0.2, "found": 5, "of": 5},
        {"length": 100, "depth": 0.8, "found": 0, "of": 5},
        {"length": 200, "depth": 0.2, "found": 5, "of": 5},
        {"length": 200, "depth": 0.8, "found": 0, "of": 5},
    ]


def test_answers_are_marked(tiny_engines: dict[str, EngineDir], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a random model's answers, those that are put into its mouth."""
    engine = tiny_engines["kivi2"]
    said = iter([" 12345. ", " 12346. ", "12345678"])
    part = PasskeyPart(engine.tokenizer(), [[1, 2, 3]] * 3, [("12345", "54321", "11111", "22222")] * 3)
    monkeypatch.setattr(
        "lowkv.evaluation.passkey.greedy",
        lambda run, last, count: [engine.tokenizer().encode(next(said)) for _ in last],
    )
    from lowkv.evaluation.subjects import Subject

    answers = part.run([Subject("it", engine.load_decoder(), engine.cache_plan)], lambda tokens: None)[0]
    assert [answer["found"] for answer in answers] == [True, False, False]
    assert len({answer["ranked"] for answer in answers}) == 1  # the same prompt and choices
    assert all(answer["logprob"] < 0 for answer in answers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": (20,)}, "too short: got 20, expected at least 64"),
        ({"depths": (0.5, 1.5)}, "depth is out of range: got 1.5"),
        ({"lengths": ()}, "nothing to ask"),
        ({"repeats": 0}, "nothing to ask"),
        ({"lengths": (4000,)}, "longer than the model's positions"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str, tiny_engines: dict[str, EngineDir]) -> None:
    with pytest.raises(LowkvError, match=message):
        evaluate(tiny_engines, [PasskeyMeasure(**settings)])
