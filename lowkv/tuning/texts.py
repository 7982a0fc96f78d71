"""The text to choose by and the text to judge by; no token is in both."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lowkv.evaluation.quality import beginning, windows_of

if TYPE_CHECKING:
    from lowkv.models.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of text."""

    ids: NDArray[np.int64] = field(repr=False)  # [W, N]
    bos: bool
    """Each begins with the model's BOS token."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.ids, "<i8").tobytes()).hexdigest()

    def __str__(self) -> str:
        count, length = self.ids.shape
        return f"{count} window{'s' * (count > 1)} of {length:,} tokens"


@dataclass(frozen=True)
class Texts:
    """Windows of calibration text and of held-out text.

    `given` are documents by name, cut into windows that are dealt out by the seed. None is Wikipedia: calibration
    windows come from articles that `lowkv eval` does not begin with, in the seed's order, and held-out ones are those
    that it begins with.
    """

    calibration: int
    held_out: int
    window: int
    seed: int = 0
    given: Mapping[str, str] | None = None

    @property
    def source(self) -> str:
        from lowkv.wikipedia import SOURCE

        return SOURCE if self.given is None else ", ".join(self.given)

    def cut(self, tokenizer: Tokenizer) -> tuple[Windows, Windows]:
        """(calibration, held-out). Raises LowkvError when there is not so much text."""
        dice, bos = np.random.default_rng(self.seed), bool(beginning(tokenizer))
        if self.given is not None:
            count = self.calibration + self.held_out
            ids = windows_of(tokenizer, self.given.values(), count, self.window)
            first, rest = np.split(dice.permutation(ids), [self.calibration])
            return Windows(first, bos), Windows(rest, bos)
        calibration, held_out = _wikipedia()
        shuffled = [calibration[index] for index in dice.permutation(len(calibration))]
        found = [
            windows_of(tokenizer, texts, count, self.window)
            for texts, count in ((shuffled, self.calibration), (held_out, self.held_out))
        ]
        return Windows(found[0], bos), Windows(found[1], bos)


def _wikipedia() -> tuple[list[str], list[str]]:
    """Articles to calibrate on, and the others."""
    from lowkv.calibration.text import bundled_dataset
    from lowkv.wikipedia import wikipedia

    calibration = [text for text in bundled_dataset().texts if isinstance(text, str)]
    known = set(calibration)
    return calibration, [text for _, text in wikipedia() if text not in known]
