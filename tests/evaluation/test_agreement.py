"""Greedy answers compared: the marks, and that it is the serving engine that gives them."""

from __future__ import annotations

import numpy as np
import pytest

from lowkv.engine import EngineDir
from lowkv.errors import LowkvError
from lowkv.evaluation import evaluate
from lowkv.evaluation.agreement import AgreementMeasure
from lowkv.evaluation.quality import Documents
from lowkv.evaluation.subjects import Subject
from lowkv.serving.engine import ServingEngine
from lowkv.serving.params import SamplingParams

from .conftest import TEXT


def test_marks(tiny_engines: dict[str, EngineDir]) -> None:
    measure = AgreementMeasure(prompts=3, output_tokens=4)
    base = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    mine = [[1, 2, 3, 4], [5, 6, 0, 8], [0, 0, 0, 0]]
    found = measure.figures(tiny_engines["kivi2"].cache_plan, [mine], [base])
    assert found["agreement"]["value"] == pytest.approx((1 + 0.75 + 0) / 3)
    assert found["agreement_until"]["value"] == 2
    assert (found["agreement_until"]["low"], found["agreement_until"]["high"]) == (0, 4)


def test_the_answers_are_those_of_a_server(tiny_engines: dict[str, EngineDir]) -> None:
    engine = tiny_engines["kivi2"]
    measure = AgreementMeasure(prompts=2, prompt_tokens=200, output_tokens=12, documents=Documents(TEXT))
    (part,) = measure.prepare(engine)
    (answers,) = part.run([Subject("it", engine.load_decoder(), engine.cache_plan, engine.scales)], lambda tokens: None)
    served = ServingEngine.from_directory(engine).generate(part.prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    assert np.mean(np.array(answers) == np.array([one.token_ids for one in served])) > 0.9  # chunks differ, codes may


def test_answers_need_room(tiny_engines: dict[str, EngineDir]) -> None:
    measure = AgreementMeasure(prompts=1, prompt_tokens=2040, documents=Documents(TEXT))
    with pytest.raises(LowkvError, match="longer than the model's positions: got 2104, expected at most 2048"):
        evaluate(tiny_engines, [measure])
