"""Which of several continuations of a prompt a model finds most likely, and what it would say itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lowkv.evaluation.feeding import ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.evaluation.feeding import Run


def log_likelihoods(
    run: Run, last: Tensor, choices: Sequence[Sequence[Sequence[int]]]
) -> list[npt.NDArray[np.float64]]:
    """Log-probability of every choice after its row's prompt: sum over its tokens of log p(token | all before).

    The tokens of a choice read the history as the prompt left it, and nothing of it stays in the cache.

    Args:
        run: has read the prompts.
        last: [W, hidden] state of each prompt's last token, as `Run.read` returns it.
        choices: for each row, its choices (token ids, at least one); every row has as many.
    """
    columns = [_one_each(run, last, [row[index] for row in choices]) for index in range(len(choices[0]))]
    return list(np.stack(columns, axis=1))


def greedy(run: Run, last: Tensor, count: int) -> list[list[int]]:
    """The `count` most likely tokens after each row's prompt, one after another; the cache stays as it is."""
    import torch

    with torch.inference_mode():
        found = [[int(token)] for token in run.decoder.logits(last).argmax(-1)]
        for _ in range(count - 1):
            hidden = run.peek(list(enumerate(found)))
            ends = torch.arange(1, len(found) + 1) * len(found[0]) - 1
            for row, token in zip(found, run.decoder.logits(hidden[ends]).argmax(-1), strict=True):
                row.append(int(token))
    return found


def _one_each(run: Run, last: Tensor, answers: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """[W] log-likelihood of one answer a row."""
    import torch

    longer = [(row, answer[:-1]) for row, answer in enumerate(answers) if len(answer) > 1]
    inner = run.peek(longer) if longer else last[:0]
    states, taken = [], 0
    for row, answer in enumerate(answers):  # the states before each of its tokens
        states += [last[row : row + 1], inner[taken : taken + len(answer) - 1]]
        taken += len(answer) - 1
    targets = torch.tensor([token for answer in answers for token in answer])
    hidden, parts = torch.cat(states), []
    with torch.inference_mode():
        for begin in range(0, len(targets), ROWS):
            rows = slice(begin, begin + ROWS)
            logits = run.decoder.logits(hidden[rows])
            parts.append(logits.gather(-1, targets[rows, None])[:, 0] - logits.logsumexp(-1))
    each = torch.cat(parts).double().numpy()
    starts = np.cumsum([0] + [len(answer) for answer in answers[:-1]])
    return np.asarray(np.add.reduceat(each, starts), np.float64)
