"""What the Locust processes are told, through small files in the run's folder.

`client.json` says what to ask of which server, once. `control.json` says how many users there should be right
now; the sweep rewrites it between levels, and Locust's own load shape follows it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lowkv.loadtest.records import read_json, write_atomically

READY = "locust-ready"
"""An empty file that says that Locust follows `control.json` from now on."""


@dataclass(frozen=True)
class ClientPlan:
    """The requests: `output_tokens` of `model` at `url` (scheme, host, port) to the prompts in the file `prompts`."""

    url: str
    model: str
    prompts: str
    output_tokens: int
    processes: int = 1
    timeout_seconds: float = 600.0
    """Silence on the socket after which a request is given up as an error."""

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/generate_stream"

    def write(self, folder: Path) -> None:
        write_atomically(folder / "client.json", json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> ClientPlan:
        return cls(**read_json(folder / "client.json"))


@dataclass(frozen=True)
class Control:
    """How many users there should be; `stop` ends the test at once, and what is under way counts as
    incomplete.
    """

    users: int
    stop: bool = False

    def write(self, folder: Path) -> None:
        write_atomically(folder / "control.json", json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Control:
        return cls(**read_json(folder / "control.json"))
