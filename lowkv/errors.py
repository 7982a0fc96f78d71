"""The one exception that lowkv raises for anything a user can put right.

It says what was got, what was expected and what to do. The command line prints it without a traceback and
exits with 2; the server turns it into an error response. A traceback of any other exception is a bug of
lowkv.
"""

from __future__ import annotations


class LowkvError(Exception):
    """An error that the user can fix.

    `str()` gives one readable message: `message: got GOT, expected EXPECTED; FIX`, less the parts that
    were not given. `got` is shown as Python writes it, so that a stray space or a number that is a string
    can be seen.
    """

    def __init__(
        self, message: str, *, got: object = None, expected: str | None = None, fix: str | None = None
    ) -> None:
        self.message = message
        self.got = got
        self.expected = expected
        self.fix = fix
        super().__init__(message)

    def __str__(self) -> str:
        parts = []
        if self.got is not None:
            parts.append(f"got {_shown(self.got)}")
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        text = self.message
        if parts:
            text += ": " + ", ".join(parts)
        if self.fix is not None:
            text += "; " + self.fix
        return text


def _shown(value: object, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
