"""What `gpu_check.py` writes: sections with a time of their own, saved after every row, as JSON and as Markdown."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Section:
    """One part of the check. Not everything must fit into its time, but what must and does not makes it fail."""

    name: str
    seconds: float
    render: Callable[[Section], list[str]]
    save: Callable[[], None]
    began: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    took: float | None = None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.began)

    def row(self, **values: Any) -> Row:
        self.rows.append(values)
        self.save()
        return values

    def note(self, text: str) -> None:
        """Something that a reader must know: what was left out, and why."""
        print(f"  {text}", flush=True)
        self.notes.append(text)
        self.save()

    def fail(self, text: str) -> None:
        """A check that did not pass."""
        print(f"  FAILED: {text}", flush=True)
        self.failures.append(text)
        self.save()

    @property
    def status(self) -> str:
        return "running" if self.took is None else "failed" if self.failures else "passed"


class Report:
    """The whole check: one JSON file and one page."""

    def __init__(self, folder: Path, machine: dict[str, Any], seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.json, self.page = folder / "gpu_check.json", folder / "gpu_check.md"
        self.machine = machine
        self.sections: list[Section] = []
        self._end = time.monotonic() + seconds
        self.save()

    @property
    def left(self) -> float:
        """Seconds of the whole."""
        return self._end - time.monotonic()

    @property
    def passed(self) -> bool:
        return all(section.status == "passed" for section in self.sections)

    @contextmanager
    def section(self, name: str, share: float, render: Callable[[Section], list[str]]) -> Iterator[Section]:
        """A section that may take `share` of what is left; whatever it raises is its failure, not the script's end."""
        section = Section(name, max(0.0, share * self.left), render, self.save)
        print(f"{name} ({section.seconds:.0f} s at most)", flush=True)
        self.sections.append(section)
        try:
            yield section
        except Exception as error:
            section.fail(f"{type(error).__name__}: {error}")
            section.note(traceback.format_exc(limit=-4))
        section.took = time.monotonic() - section.began
        self.save()
        print(f"{name}: {section.status} after {section.took:.0f} s", flush=True)

    def save(self) -> None:
        sections = {
            section.name: {
                "status": section.status,
                "seconds": section.took,
                "failures": section.failures,
                "notes": section.notes,
                "rows": section.rows,
            }
            for section in self.sections
        }
        _write(self.json, json.dumps({"machine": self.machine, "sections": sections}, indent=1) + "\n")
        facts = [f"- {name}: {value}" for name, value in self.machine.items()]
        parts = ["# GPU check", "", *facts]
        for section in self.sections:
            took = "" if section.took is None else f" ({section.took:.0f} s)"
            parts += ["", f"## {section.name}: {section.status}{took}", "", *section.render(section)]
            parts += [f"- FAILED: {text}" for text in section.failures]
            parts += [f"- {text.strip().splitlines()[-1]}" for text in section.notes]
        _write(self.page, "\n".join(parts) + "\n")


def table(columns: list[str], rows: list[list[Any]]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def _write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
