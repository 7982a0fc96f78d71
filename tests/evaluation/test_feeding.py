"""Reading prompts of unequal lengths, and looking ahead without a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lowkv.engine import EngineDir
from lowkv.evaluation.choices import greedy, log_likelihoods
from lowkv.evaluation.feeding import Run
from lowkv.evaluation.subjects import Subject

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = (300, 64, 161)


@pytest.fixture(scope="module", params=["fp16", "fp8", "kivi2"])
def subject(request: pytest.FixtureRequest, build_tiny: Callable[..., Path]) -> Subject:
    settings: dict[str, Any] = {"format": request.param, "residual_length": 32, "sink_tokens": 0}
    engine = EngineDir.open(build_tiny(settings))
    return Subject(request.param, engine.load_decoder(), engine.cache_plan, engine.scales)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, length).tolist() for length in LENGTHS]


def logits(run: Run, hidden: Tensor) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return np.asarray(run.decoder.logits(hidden))


def test_prompts_of_unequal_lengths_are_read_as_each_alone(subject: Subject, prompts: list[list[int]]) -> None:
    run = Run(subject, len(prompts), max(LENGTHS))
    seen: list[int] = []
    together = logits(run, run.read(prompts, seen.append))
    assert sum(seen) == sum(LENGTHS)
    for row, prompt in enumerate(prompts):
        alone = Run(subject, 1, len(prompt))
        np.testing.assert_allclose(together[row], logits(alone, alone.read([prompt]))[0], atol=2e-3)


def test_looking_ahead_leaves_no_trace(subject: Subject, prompts: list[list[int]]) -> None:
    """Over a block's end, too: the next tokens give what they give when nobody looked."""
    ahead, after = list(range(40)), [7, 8, 9]
    found = []
    for looks in (0, 3):
        run = Run(subject, len(prompts), max(LENGTHS) + 40)
        run.read(prompts)
        for _ in range(looks):
            run.peek([(row, ahead) for row in range(len(prompts))])
        found.append(run.feed([(row, after) for row in range(len(prompts))]).numpy())
        run._executor.cache.check_integrity()
    np.testing.assert_array_equal(*found)


def test_looking_ahead_sees_what_feeding_sees_within_a_block(subject: Subject, prompts: list[list[int]]) -> None:
    run = Run(subject, len(prompts), max(LENGTHS) + 20)
    run.read(prompts)
    work = [(row, [5, 6, 7]) for row in range(len(prompts))]
    peeked = run.peek(work).numpy()
    np.testing.assert_array_equal(peeked, run.feed(work).numpy())


def test_log_likelihoods_are_the_sums_over_the_choices_tokens(subject: Subject, prompts: list[list[int]]) -> None:
    import torch

    choices = [[[3, 4, 5], [6], [7, 8]], [[9], [10, 11, 12, 13], [3]], [[4, 4], [5, 5], [6, 6]]]
    run = Run(subject, len(prompts), max(LENGTHS) + 8)
    last = run.read(prompts)
    found = log_likelihoods(run, last, choices)
    for row, several in enumerate(choices):
        for index, choice in enumerate(several):
            states = [last[row : row + 1]]
            if len(choice) > 1:
                states.append(run.peek([(row, choice[:-1])]))
            each = torch.from_numpy(logits(run, torch.cat(states))).log_softmax(-1)
            expected = sum(float(each[at, token]) for at, token in enumerate(choice))
            assert found[row][index] == pytest.approx(expected, abs=1e-3)


def test_greedy_is_the_likeliest_choice_token_by_token(subject: Subject, prompts: list[list[int]]) -> None:
    run = Run(subject, len(prompts), max(LENGTHS) + 8)
    last = run.read(prompts)
    for row, answer in enumerate(greedy(run, last, 4)):
        said: list[int] = []
        for token in answer:
            state = run.peek([(row, said)])[-1:] if said else last[row : row + 1]
            values = logits(run, state)[0]
            assert values[token] >= values.max() - 1e-4
            said.append(token)
