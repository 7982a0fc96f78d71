"""`passkey`: does the model find a number that is hidden far back in a long text?

A text of a chosen length is filled with plain sentences in random order; at a chosen depth (0 is the start, 1 the end)
stands, once, "The secret code of the vault is 27611."; the text ends with "The secret code of the vault is". Of all
texts of a length and depth,

    found   share whose most likely next tokens spell the number (greedy, exact match)
    ranked  share where the number is likelier than each of three others, as a whole: sum over its tokens of
            log p(token | all before)
    log p   that sum for the number itself, in nats, mean over texts: it falls before anything is lost

with Wilson intervals for the shares and a bootstrap over texts for the mean. `found` is the harder of the two: one
wrong digit loses it. The text is read decode-style (`lowkv.evaluation.feeding`), so that the number stands in quantized
history; depths that fall into a format's sink or residual do not. Filler, numbers and order come from a fixed seed and
depend on nothing but the item.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lowkv.errors import LowkvError
from lowkv.evaluation.choices import greedy, log_likelihoods
from lowkv.evaluation.feeding import BATCH, Run
from lowkv.evaluation.intervals import CONFIDENCE, Interval, of_items, share
from lowkv.evaluation.measure import Advance, Figures, Measure

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine import EngineDir
    from lowkv.evaluation.subjects import Subject
    from lowkv.kvcache import CachePlan
    from lowkv.models.tokenizer import Tokenizer

LENGTHS = (512, 1024)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
REPEATS = 2
DIGITS = 5
DISTRACTORS = 3
ANSWER_TOKENS = 8  # five digits and a space, one token each at worst
SHORTEST = 64  # the needle, the question, and something between them
NEEDLE = "\n\nThe secret code of the vault is {key}.\n\n"
QUESTION = "\n\nThe secret code of the vault is"
FILLER = (
    "The grass is green and the sky is blue.",
    "The sun is warm, and a light wind comes from the sea.",
    "Somewhere a dog barks, and then it is quiet again.",
    "A train goes by on the far side of the river.",
    "Nobody is in a hurry on a day like this.",
    "The baker opens his shop before the sun is up.",
    "Children walk to school along the old wall.",
    "In the harbour the boats are waiting for the tide.",
    "An old man reads his paper in the shade of a tree.",
    "Here we go, there and back again.",
)


@dataclass(frozen=True)
class Item:
    """One text to be made."""

    length: int  # tokens, about
    depth: float
    repeat: int

    def text(self, tokenizer: Tokenizer) -> tuple[str, str, list[str]]:
        """(text up to the answer, the number, other numbers)."""
        rng = random.Random(f"{self.length} {self.depth} {self.repeat}")  # noqa: S311
        key, *others = (str(number) for number in rng.sample(range(10 ** (DIGITS - 1), 10**DIGITS), 1 + DISTRACTORS))
        needle = NEEDLE.format(key=key)
        sizes = {sentence: len(tokenizer.encode(f" {sentence}", add_special=False)) for sentence in FILLER}
        left = self.length - len(tokenizer.encode(needle + QUESTION))
        sentences: list[str] = []
        while left > 0:
            sentence = rng.choice(FILLER)
            sentences.append(sentence)
            left -= sizes[sentence]
        at = round(self.depth * len(sentences))
        return " ".join(sentences[:at]) + needle + " ".join(sentences[at:]) + QUESTION, key, others


@dataclass(frozen=True)
class PasskeyMeasure(Measure):
    """`repeats` texts of every length (tokens, about) and depth (0 to 1)."""

    name: ClassVar[str] = "passkey"

    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    repeats: int = REPEATS

    def __post_init__(self) -> None:
        for length in self.lengths:
            if length < SHORTEST:
                raise LowkvError("a passkey text is too short", got=length, expected=f"at least {SHORTEST} tokens")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise LowkvError("a passkey depth is out of range", got=depth, expected="0 (start) to 1 (end)")
        if not self.lengths or not self.depths or self.repeats < 1:
            raise LowkvError("passkey has nothing to ask", expected="at least one length, one depth and one repeat")

    @property
    def settings(self) -> dict[str, Any]:
        return {"lengths": list(self.lengths), "depths": list(self.depths), "repeats": self.repeats}

    @property
    def items(self) -> list[Item]:
        return [Item(n, depth, again) for n in self.lengths for again in range(self.repeats) for depth in self.depths]

    @property
    def parts(self) -> int:
        return -(-len(self.items) // BATCH)

    def prepare(self, engine: EngineDir) -> list[PasskeyPart]:
        """Raises LowkvError for a length beyond the model's positions."""
        tokenizer, items = engine.tokenizer(), self.items
        texts = [item.text(tokenizer) for item in items]
        prompts = [tuple(tokenizer.encode(text)) for text, _, _ in texts]
        longest = max(map(len, prompts)) + ANSWER_TOKENS
        if longest > engine.model_config.max_positions:
            raise LowkvError(
                "a passkey text is longer than the model's positions",
                got=f"{longest} tokens",
                expected=f"at most {engine.model_config.max_positions}",
                fix="give shorter ones with --lengths",
            )
        return [
            PasskeyPart(
                tokenizer, prompts[at : at + BATCH], [(key, *others) for _, key, others in texts[at : at + BATCH]]
            )
            for at in range(0, len(items), BATCH)
        ]

    def figures(self, plan: CachePlan, outcomes: Sequence[Any], baseline: Sequence[Any]) -> Figures:
        answers = [answer for outcome in outcomes for answer in outcome]
        cells: dict[tuple[int, float], list[bool]] = {}
        for item, answer in zip(self.items, answers, strict=True):
            cells.setdefault((item.length, item.depth), []).append(answer["found"])
        return {
            "passkey": asdict(share(sum(answer["found"] for answer in answers), len(answers))),
            "passkey_ranked": asdict(share(sum(answer["ranked"] for answer in answers), len(answers))),
            "passkey_logprob": asdict(of_items(np.array([answer["logprob"] for answer in answers]), np.mean)),
            "passkey_cells": [
                {"length": length, "depth": depth, "found": sum(found), "of": len(found)}
                for (length, depth), found in cells.items()
            ],
        }

    def tables(self, results: dict[str, Figures], baseline: str) -> list[Table]:
        from rich.table import Table

        table = Table(title="passkey: found by length x depth", caption=f"[{CONFIDENCE:.0%} interval, Wilson]")
        for column in ("engine", "found", "ranked first", "log p", "length", *(f"{depth:g}" for depth in self.depths)):
            table.add_column(column)
        for name, found in results.items():
            cells = {
                (cell["length"], cell["depth"]): f"{cell['found']}/{cell['of']}" for cell in found["passkey_cells"]
            }
            keys = ("passkey", "passkey_ranked", "passkey_logprob")
            whole = [name, *(str(Interval.from_mapping(found[key])) for key in keys)]
            for length in self.lengths:
                table.add_row(*whole, str(length), *(cells[length, depth] for depth in self.depths))
                whole = ["", "", "", ""]
        return [table]


@dataclass(frozen=True)
class PasskeyPart:
    """Some texts: token ids up to the answer, and (the number, other numbers) of each."""

    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]
    keys: Sequence[tuple[str, ...]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts))

    def run(self, subjects: Sequence[Subject], advance: Advance) -> list[Any]:
        """For each text: was the number found, was it ranked first, and what the model said."""
        return [self._ask(subject, advance) for subject in subjects]

    def _ask(self, subject: Subject, advance: Advance) -> list[dict[str, Any]]:
        run = Run(subject, len(self.prompts), max(map(len, self.prompts)) + ANSWER_TOKENS)
        last = run.read(self.prompts, advance)
        choices = [[self.tokenizer.encode(f" {key}", add_special=False) for key in keys] for keys in self.keys]
        ranks = log_likelihoods(run, last, choices)
        said = [self.tokenizer.decode(tokens) for tokens in greedy(run, last, ANSWER_TOKENS)]
        return [
            {
                "found": _first_number(answer) == keys[0],
                "ranked": bool(values[0] > values[1:].max()),
                "logprob": float(values[0]),
                "said": answer,
            }
            for keys, values, answer in zip(self.keys, ranks, said, strict=True)
        ]


def _first_number(answer: str) -> str:
    """The digits that an answer begins with."""
    found = re.match(r"\s*([0-9]+)", answer)
    return found[1] if found else ""
