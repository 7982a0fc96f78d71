"""How a long job tells whoever watches it where it stands; the command line draws it, tests count it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the course of a job: stages one after another, each in some unit."""

    def begin(self, stage: str, total: int | None = None) -> None:
        """A stage starts (and the one before it is over). `total` is its size, None when it is not known."""
        ...

    def advance(self, amount: int) -> None:
        """So much more of the stage's total is done."""
        ...


class NoProgress:
    """Nobody watches."""

    def begin(self, stage: str, total: int | None = None) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass
