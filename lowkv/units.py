"""Bytes, written and read with their unit.

GB and GiB are different things and are never mixed: a card "of 80 GB" holds 80e9 bytes, a budget of
"64MiB" is 64 * 1024**2 bytes.
"""

from __future__ import annotations

import re

from lowkv.errors import LowkvError

_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = {unit.lower(): size for unit, size in (_DECIMAL | _BINARY).items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")

ALLOWED = "a whole number of bytes, or a number with one of the units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"


def parse_bytes(value: int | str) -> int:
    """Bytes from `64MiB`, `1.5 GB` or a plain number of bytes.

    Raises LowkvError for anything else, a number without a unit in a string and ambiguous units (`64M`)
    included.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise LowkvError("a size cannot be negative", got=value, expected=ALLOWED)
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise LowkvError("not a size", got=value, expected=ALLOWED, fix="write it like 64MiB or 1.5GB")
    number, unit = match.groups()
    size = _UNITS.get(unit.lower())
    if size is None:
        raise LowkvError(
            f"unknown unit {unit!r}", got=value, expected=ALLOWED, fix=f"did you mean {unit[0].upper()}iB?"
        )
    return round(float(number) * size) if "." in number else int(number) * size


def format_bytes(size: float, *, decimal: bool = False) -> str:
    """`size` in the largest unit that leaves at least 1, to about three digits: `64 MiB`, `1.5 GiB`.

    Binary units by default; `decimal=True` for figures that are compared with a card's advertised memory.
    """
    units = _DECIMAL if decimal else {"B": 1} | _BINARY
    name, unit = next(((n, u) for n, u in reversed(units.items()) if abs(size) >= u), ("B", 1))
    value = size / unit
    digits = 0 if unit == 1 and value == int(value) else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return f"{text} {name}"
