"""How long jobs look on a terminal, and in a log.

On a terminal: one moving line, on standard error, so that standard output stays what the verb prints. Anywhere else:
a plain line whenever a new stage begins, so that a log says where a job stands and nothing more.
"""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

    from rich.progress import TaskID

_NUMBER = re.compile(r"[0-9.]+")


class StageProgress:
    """Stages one after another, each with a bar where its size is known: an `engine.progress.Progress`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        self._console = Console(stderr=True, highlight=False)
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task: TaskID | None = None
        self._kind = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def begin(self, stage: str, total: int | None = None) -> None:
        """A stage starts, and the one before it is over."""
        kind = _NUMBER.sub("", stage)  # "loading: 12 s" follows "loading: 11 s": no new line of a log
        if self._live.disable and kind != self._kind:
            print(stage, file=sys.stderr, flush=True)
        self._kind = kind
        if self._task is not None:
            self._live.remove_task(self._task)
        self._task = self._live.add_task(stage, total=total)

    def advance(self, amount: int) -> None:
        """So much more of the stage's total is done."""
        if self._task is not None:
            self._live.advance(self._task, amount)
