"""What was measured already, so that a measurement that was stopped goes on and an unchanged one is only read.

One line of JSON for every finished part, in one file beside the results, written as it comes. A key names everything
that a part's outcome depends on (engine, measure, settings, version), so any number of measurements share the file:
FP16 KV over the same weights is measured once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lowkv
from lowkv.errors import LowkvError

FILE = "records.jsonl"


def key_of(**inputs: Any) -> str:
    """What stands for these inputs (plain values), with the version of lowkv, in hexadecimal."""
    text = json.dumps({"lowkv": lowkv.__version__} | inputs, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Records:
    """Outcomes by key and part: in memory, and in a file if there is one."""

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        """Reads what the file holds, unless `fresh`: what is added then counts from the next time on.

        Raises LowkvError when it is not such a file.
        """
        self._path = path
        self._found: dict[tuple[str, int], Any] = {}
        if path is not None and path.is_file() and not fresh:
            self._read(path)

    def get(self, key: str, part: int) -> Any:
        """The outcome, or None when there is none."""
        return self._found.get((key, part))

    def add(self, key: str, part: int, outcome: Any, about: Mapping[str, Any]) -> None:
        """Keeps an outcome (plain values, not None); `about` is for a person who reads the file."""
        line = json.dumps({"key": key, "part": part, **about, "outcome": outcome})
        # Through JSON, so that an outcome that was kept and a new one are the same thing.
        self._found[key, part] = json.loads(line)["outcome"]
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def _read(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        if lines.pop():  # what was being written when the process was killed
            path.write_text(text[: text.rindex("\n") + 1] if "\n" in text else "", encoding="utf-8")
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                self._found[entry["key"], entry["part"]] = entry["outcome"]
            except (ValueError, KeyError, TypeError) as error:
                raise LowkvError(
                    f"{path} does not hold records of measurements (line {number})",
                    got=line,
                    fix="delete it, or give another folder with --out",
                ) from error
