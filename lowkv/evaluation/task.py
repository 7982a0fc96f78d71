"""`task`: school arithmetic (GSM8K), scored so that small models can be compared.

A prompt holds a few solved questions, then one whose worked solution stops right before the result of its last
calculation. The result stands against three other numbers of the same question and solution; the model's choice is
the likeliest as a whole, sum over its tokens of log p(token | all before). (Free answers of a small model are nearly
all wrong, and a share near zero shows no damage.)

    accuracy    share of questions where the result is chosen, with Wilson's interval
    difference  accuracy less the baseline's on the same questions, with the interval of Bonett and Price for pairs
    log p       of the result among the four, log(p / sum of p), in nats: mean of the differences to the baseline, with
                a bootstrap over questions. It moves before choices do

The prompt is read decode-style (`lowkv.evaluation.feeding`). Much of what the last step needs stands in the newest
tokens, which most formats keep in half precision: expect less from this measure than from `passkey`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lowkv.errors import LowkvError
from lowkv.evaluation.choices import log_likelihoods
from lowkv.evaluation.feeding import BATCH, Run
from lowkv.evaluation.intervals import CONFIDENCE, Interval, of_items, paired_difference, share
from lowkv.evaluation.measure import Advance, Figures, Measure
from lowkv.evaluation.questions import SOURCE, Question, gsm8k

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine import EngineDir
    from lowkv.evaluation.subjects import Subject
    from lowkv.kvcache import CachePlan
    from lowkv.models.tokenizer import Tokenizer

QUESTIONS = 32
SHOTS = 3
DISTRACTORS = 3
ANSWER_TOKENS = 8  # six digits and a space, one token each at worst


@dataclass(frozen=True)
class TaskMeasure(Measure):
    """`questions` questions, each after `shots` solved ones."""

    name: ClassVar[str] = "task"

    questions: int = QUESTIONS
    shots: int = SHOTS

    @property
    def settings(self) -> dict[str, Any]:
        return {"questions": self.questions, "shots": self.shots, "source": SOURCE}

    @property
    def parts(self) -> int:
        return -(-self.questions // BATCH)

    def prepare(self, engine: EngineDir) -> list[TaskPart]:
        """Raises LowkvError for too few questions, or prompts beyond the model's positions."""
        found = [question for question in gsm8k() if len(question.others) >= DISTRACTORS]
        solved, asked = found[: self.shots], found[self.shots : self.shots + self.questions]
        if len(asked) < self.questions:
            raise LowkvError("there are not so many questions", got=self.questions, expected=f"at most {len(asked)}")
        tokenizer = engine.tokenizer()
        head = "".join(f"Question: {question.text}\nAnswer: {question.solution}\n\n" for question in solved)
        items = [_item(tokenizer, head, question) for question in asked]
        longest = max(len(prompt) for prompt, _ in items) + ANSWER_TOKENS
        if longest > engine.model_config.max_positions:
            raise LowkvError(
                "a question with its solved examples is longer than the model's positions",
                got=f"{longest} tokens",
                expected=f"at most {engine.model_config.max_positions}",
            )
        return [TaskPart(tuple(items[at : at + BATCH])) for at in range(0, len(items), BATCH)]

    def figures(self, plan: CachePlan, outcomes: Sequence[Any], baseline: Sequence[Any]) -> Figures:
        mine, base = ([answer for outcome in chosen for answer in outcome] for chosen in (outcomes, baseline))
        pairs = [(one["right"], other["right"]) for one, other in zip(mine, base, strict=True)]
        gained, lost = (sum(pair == wanted for pair in pairs) for wanted in ((True, False), (False, True)))
        moved = np.array([one["logprob"] - other["logprob"] for one, other in zip(mine, base, strict=True)])
        return {
            "task": asdict(share(sum(answer["right"] for answer in mine), len(mine))),
            "task_difference": asdict(paired_difference(gained, lost, len(mine))),
            "task_logprob_difference": asdict(of_items(moved, np.mean)),
        }

    def tables(self, results: dict[str, Figures], baseline: str) -> list[Table]:
        from rich.table import Table

        table = Table(
            title="task: GSM8K, the last step's result among four",
            caption=f"{self.questions} questions, {self.shots} solved ones before each; [{CONFIDENCE:.0%} interval]",
        )
        for column in ("engine", "right", f"less {baseline}", f"log p less {baseline}"):
            table.add_column(column)
        for name, found in results.items():
            keys = ("task", "task_difference", "task_logprob_difference")
            table.add_row(name, *(str(Interval.from_mapping(found[key])) for key in keys))
        return [table]


@dataclass(frozen=True)
class TaskPart:
    """Some questions: (token ids up to the result, its choices, the right one first) of each."""

    items: tuple[tuple[list[int], list[list[int]]], ...]

    @property
    def tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.items)

    def run(self, subjects: Sequence[Subject], advance: Advance) -> list[Any]:
        """For each question: was the result chosen, and its log-probability among the choices."""
        return [self._ask(subject, advance) for subject in subjects]

    def _ask(self, subject: Subject, advance: Advance) -> list[dict[str, Any]]:
        prompts = [prompt for prompt, _ in self.items]
        run = Run(subject, len(prompts), max(map(len, prompts)) + ANSWER_TOKENS)
        last = run.read(prompts, advance)
        ranks = log_likelihoods(run, last, [choices for _, choices in self.items])
        return [
            {"right": bool(rank[0] > rank[1:].max()), "logprob": float(rank[0] - np.logaddexp.reduce(rank))}
            for rank in ranks
        ]


def _item(tokenizer: Tokenizer, head: str, question: Question) -> tuple[list[int], list[list[int]]]:
    rng = random.Random(question.text)  # noqa: S311
    choices = [question.result, *rng.sample(question.others, DISTRACTORS)]
    # A space before a number belongs to the number: that is how tokenizers see it.
    begun = question.begun.rstrip(" ")
    gap = " " if begun != question.begun else ""
    prompt = tokenizer.encode(f"{head}Question: {question.text}\nAnswer: {begun}")
    return prompt, [tokenizer.encode(gap + choice, add_special=False) for choice in choices]
