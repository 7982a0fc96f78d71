from __future__ import annotations

from pathlib import Path

import pytest

from lowkv.errors import LowkvError
from lowkv.loadtest.prompts import Prompt, cut_prompts, write_prompts
from lowkv.loadtest.workload import Lengths

TEXT = " ".join(f"word{i}" for i in range(500))


class Pieces:
    """A tokenizer with a token per four characters of a word, and one in front."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [0] * add_special + [1 for word in text.split() for _ in range(0, len(word), 4)]

    def decode(self, ids: list[int]) -> str:
        return ""


def test_lengths_are_exact_and_prompts_differ() -> None:
    prompts = list(cut_prompts(TEXT, Pieces(), Lengths(40, 60), count=50, seed=1))
    assert all(len(Pieces().encode(p.text)) == p.tokens for p in prompts)
    assert all(40 <= p.tokens <= 60 for p in prompts)
    assert len({p.text[:6] for p in prompts}) == 50  # no shared prefix


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_prompts(tmp_path / name, TEXT, Pieces(), Lengths(30, 30), 5, seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert [p.index for p in Prompt.read(tmp_path / "a")] == [0, 1, 2, 3, 4]


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(LowkvError, match="too short"):
        list(cut_prompts("a few words", Pieces(), Lengths(30, 30), 1, seed=0))
