"""Prompts of an exact length in tokens, each different from its first token on.

No two prompts share a prefix (each opens with its own number and starts at its own place in the text), so
that a server that reused prefixes would have nothing to reuse. Lengths are exact because capacity is counted
in tokens: a text is cut, counted again as the server will count it, and mended until it fits.

Light on purpose: the Locust processes import it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lowkv.errors import LowkvError
from lowkv.loadtest.records import JsonLine
from lowkv.loadtest.workload import Lengths


class Encoder(Protocol):
    """What prompts need of a tokenizer (`lowkv.models.Tokenizer` has it)."""

    def encode(self, text: str, add_special: bool = ...) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Prompt(JsonLine):
    """A text and its length in tokens, special tokens that the server adds included."""

    index: int
    text: str
    tokens: int


def write_prompts(path: Path, text: str, tokenizer: Encoder, lengths: Lengths, count: int, seed: int) -> None:
    """Writes `count` prompts cut from `text`; the same arguments write the same file.

    Raises LowkvError when the text is too short to cut them from.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(prompt.to_json() + "\n" for prompt in cut_prompts(text, tokenizer, lengths, count, seed)),
        encoding="utf-8",
    )


def cut_prompts(text: str, tokenizer: Encoder, lengths: Lengths, count: int, seed: int) -> Iterator[Prompt]:
    """`count` prompts with lengths drawn from `lengths`; see the module's docstring."""
    words = text.split()
    # A word is at least one token, so as many words as tokens are always enough.
    spare = len(words) - lengths.maximum
    if spare < 1:
        raise LowkvError(
            f"the text is too short for prompts of {lengths.maximum} tokens",
            got=f"{len(words)} words",
            expected=f"more than {lengths.maximum} words",
            fix="use a longer text, or shorter prompts",
        )
    draw = random.Random(seed)  # noqa: S311 - repeatable, not secret

    def length(candidate: str) -> int:
        return len(tokenizer.encode(candidate, add_special=True))

    for index in range(count):
        target = draw.randint(lengths.minimum, lengths.maximum)
        start = draw.randrange(spare)
        opening = f"{draw.randrange(10**6):06d}. Continue this text: "
        yield Prompt(index, _fit(opening, words[start : start + target], target, length), target)


def _fit(opening: str, words: list[str], target: int, length: Callable[[str], int]) -> str:
    """`opening` and as many of `words` as make `target` tokens, filled up with short words where a cut does
    not fall right.
    """
    low, high = 0, len(words)
    while low < high:  # the most words that are not too many; tokens grow with words
        middle = (low + high + 1) // 2
        if length(opening + " ".join(words[:middle])) <= target:
            low = middle
        else:
            high = middle - 1
    text = opening + " ".join(words[:low])
    while (missing := target - length(text)) > 0:
        longer = text + " a" * missing
        if length(longer) > target:
            longer = text + " a"
        if length(longer) <= length(text) or length(longer) > target:
            break
        text = longer
    if length(text) != target:
        raise LowkvError(
            f"cannot make a prompt of {target} tokens with this tokenizer",
            got=f"{length(text)} tokens",
            fix="use another length, or another text",
        )
    return text
