"""How a load test says where it stands: what is going on now, and what has been found out.

On a terminal the former is one line that changes, on standard error; anywhere else only the latter is printed.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol, Self


class Watch(Protocol):
    """Takes the course of a load test."""

    def status(self, text: str) -> None:
        """What is going on now; replaces what was going on before. Called several times a second."""
        ...

    def note(self, text: str) -> None:
        """Something that stays: a stage begun, a level measured."""
        ...


class Unwatched:
    """Nobody watches."""

    def status(self, text: str) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class TerminalWatch:
    """A line that changes, and notes above it, each with the minutes and seconds since the start."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("") if sys.stderr.isatty() else None
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._started

    def status(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{self._clock()} {text}")

    def note(self, text: str) -> None:
        self._console.print(f"{self._clock()} {text}", markup=False, soft_wrap=True)

    def _clock(self) -> str:
        minutes, seconds = divmod(int(self.seconds), 60)
        return f"{minutes:2d}:{seconds:02d}"
