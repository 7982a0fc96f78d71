"""The workload: one YAML file that says what is asked of a server, how hard, and when an answer counts as
good.

Everything that could flatter a format is fixed here once for all of them: lengths, concurrency levels, the
byte budget of the KV cache, warm-up, window and SLO. Unknown keys are refused, with the line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from lowkv.errors import LowkvError
from lowkv.units import parse_bytes


class WorkloadError(LowkvError):
    """A value of a workload that cannot be. `key` is its dotted path, `where` its place in the file once
    known.
    """

    def __init__(self, key: str, problem: str, *, where: str | None = None, **parts: Any) -> None:
        super().__init__(f"{key} {problem}", **parts)
        self.key = key
        self.where = where

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.where})" if self.where else super().__str__()


def _whole(key: str, value: object, minimum: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise WorkloadError(key, "is out of range", got=value, expected=f"a whole number, {minimum} or more")


def _positive(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise WorkloadError(key, "is out of range", got=value, expected="a number greater than 0")


def _share(key: str, value: object) -> None:
    _positive(key, value)
    if float(value) > 1:  # type: ignore[arg-type]
        raise WorkloadError(key, "is out of range", got=value, expected="a share, at most 1")


@dataclass(frozen=True)
class Lengths:
    """Token lengths, drawn evenly from `minimum` to `maximum` (both included); equal means fixed."""

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        _whole("prompt_tokens", self.minimum, 8)
        _whole("prompt_tokens", self.maximum, 8)
        if self.minimum > self.maximum:
            raise WorkloadError(
                "prompt_tokens",
                "is an empty range",
                got=[self.minimum, self.maximum],
                expected="[shortest, longest]",
            )

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum}-{self.maximum}"


@dataclass(frozen=True)
class Warmup:
    """When a level counts as steady.

    Both must hold: for `minimum_seconds` at least `occupancy` of the level's users had a request under way,
    and every user has had its first token since it joined. A level that cannot reach that within
    `maximum_seconds` is measured as it is, and says so.
    """

    minimum_seconds: float = 5.0
    maximum_seconds: float = 60.0
    occupancy: float = 0.95

    def __post_init__(self) -> None:
        _positive("minimum_seconds", self.minimum_seconds)
        _positive("maximum_seconds", self.maximum_seconds)
        _share("occupancy", self.occupancy)
        if self.minimum_seconds > self.maximum_seconds:
            raise WorkloadError(
                "maximum_seconds",
                "is less than minimum_seconds",
                got=self.maximum_seconds,
                expected=f"{self.minimum_seconds} or more",
            )


@dataclass(frozen=True)
class Slo:
    """What a user would still call good: limits on a request, and the share of requests that must keep
    them.
    """

    ttft_seconds: float
    tpot_seconds: float
    attainment: float = 0.95

    def __post_init__(self) -> None:
        _positive("ttft_seconds", self.ttft_seconds)
        _positive("tpot_seconds", self.tpot_seconds)
        _share("attainment", self.attainment)


@dataclass(frozen=True)
class Workload:
    """What is asked of every server, in the same way."""

    prompt_tokens: Lengths
    output_tokens: int
    """Forced: end-of-sequence is ignored, and a request that gets another number counts as an error."""
    slo: Slo
    levels: tuple[int, ...]
    """Concurrency levels climbed in order, until one misses the SLO."""
    saturation: int
    """The last level, measured on every server: more users than any format can keep resident. G1 and
    throughput are read here.
    """
    window_seconds: float
    time_limit_seconds: float
    """Most seconds of load on one server; when they run out, the search for the knee is cut short and says
    so.
    """
    kv_budget: int | None = None
    """Bytes of every server's KV cache (the negative control gets half); None leaves each engine its own."""
    knee_probes: int = 4
    """Most levels measured in search of the knee, besides `levels`, the predicted capacity and
    `saturation`.
    """
    minimum_requests: int = 5
    """A window is prolonged, up to twice its length, until it has decided so many requests."""
    warmup: Warmup = field(default_factory=Warmup)
    repeats: int = 1
    """Fresh servers per format; the order of formats is drawn anew for each round."""
    prompts: int = 512
    """Prompts made beforehand, each used once."""
    processes: int = 1
    """Locust processes that share the users."""
    seed: int = 7
    name: str = "workload"

    def __post_init__(self) -> None:
        for key in ("output_tokens", "saturation", "minimum_requests", "repeats", "prompts", "processes"):
            _whole(key, getattr(self, key))
        _whole("output_tokens", self.output_tokens, 2)
        _whole("knee_probes", self.knee_probes, 0)
        _whole("seed", self.seed, 0)
        _positive("window_seconds", self.window_seconds)
        _positive("time_limit_seconds", self.time_limit_seconds)
        if self.kv_budget is not None:
            _whole("kv_budget", self.kv_budget, 2**16)
        if not self.levels:
            raise WorkloadError("levels", "is empty", expected="for example [1, 2, 4, 8]")
        for level in self.levels:
            _whole("levels", level)
        if list(self.levels) != sorted(set(self.levels)):
            raise WorkloadError(
                "levels", "must rise", got=list(self.levels), expected="each number larger than the one before"
            )
        if self.levels[-1] > self.saturation:
            raise WorkloadError(
                "saturation",
                "is not the largest level",
                got=self.saturation,
                expected=f"{self.levels[-1]} or more",
                fix="raise saturation, or take the larger levels out",
            )
        if self.processes > self.saturation:
            raise WorkloadError(
                "processes", "exceeds the number of users", got=self.processes, expected=f"at most {self.saturation}"
            )

    @property
    def tokens(self) -> int:
        """Most tokens that one request stores: prompt and answer."""
        return self.prompt_tokens.maximum + self.output_tokens

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON; `workload_from_mapping` is the inverse."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["prompt_tokens"] = [self.prompt_tokens.minimum, self.prompt_tokens.maximum]
        plain["levels"] = list(self.levels)
        for key in ("slo", "warmup"):
            plain[key] = {f.name: getattr(plain[key], f.name) for f in fields(plain[key])}
        return plain


def load_workload(path: str | Path) -> Workload:
    """The workload in a YAML file, named by the file's stem unless it names itself.

    Raises LowkvError for a file that cannot be read, WorkloadError, with the line, for a value that cannot
    be.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise LowkvError(
            f"cannot read workload {path}: {reason}",
            fix="give the path of a workload's YAML file, for example loadtest/workloads/demo.yaml",
        ) from error
    plain, lines = _parsed(text, path.name)

    def where(key: str) -> str:
        while key and key not in lines:
            key = key.rpartition(".")[0]
        return f"{path.name}, line {lines[key]}" if key else path.name

    return _workload({"name": path.stem} | plain, where)


def workload_from_mapping(plain: Mapping[str, Any]) -> Workload:
    """The workload in plain values (see `Workload.to_mapping`). Raises WorkloadError for a value that cannot
    be.
    """
    return _workload(plain, lambda key: None)


def _workload(plain: Mapping[str, Any], where: Callable[[str], str | None]) -> Workload:
    try:
        _check_keys("", plain, Workload)
        values = dict(plain)
        values["prompt_tokens"] = _lengths(plain["prompt_tokens"])
        if not isinstance(plain["levels"], list | tuple):
            raise WorkloadError("levels", "has the wrong type", got=plain["levels"], expected="a list of numbers")
        values["levels"] = tuple(plain["levels"])
        if isinstance(plain.get("kv_budget"), str):
            values["kv_budget"] = _budget(plain["kv_budget"])
        for key, section in (("slo", Slo), ("warmup", Warmup)):
            if key in plain:
                values[key] = _section(key, plain[key], section)
        return Workload(**values)
    except WorkloadError as error:
        error.where = where(error.key)
        raise


def _section(key: str, plain: object, section: Any) -> Any:
    if not isinstance(plain, Mapping):
        raise WorkloadError(key, "has the wrong type", got=plain, expected="a mapping: one key and value a line")
    _check_keys(f"{key}.", plain, section)
    try:
        return section(**plain)
    except WorkloadError as error:
        raise _below(key, error) from None


def _below(key: str, error: WorkloadError) -> WorkloadError:
    problem = error.message.removeprefix(f"{error.key} ")
    return WorkloadError(f"{key}.{error.key}", problem, got=error.got, expected=error.expected, fix=error.fix)


def _lengths(value: object) -> Lengths:
    if isinstance(value, list | tuple) and len(value) == 2:
        return Lengths(*value)
    if isinstance(value, int):
        return Lengths(value, value)
    raise WorkloadError(
        "prompt_tokens", "has the wrong type", got=value, expected="a number of tokens, or [shortest, longest]"
    )


def _budget(value: str) -> int:
    try:
        return parse_bytes(value)
    except LowkvError as error:
        raise WorkloadError("kv_budget", "is not a size", got=value, expected=error.expected, fix=error.fix) from None


def _check_keys(prefix: str, plain: Mapping[str, Any], section: Any) -> None:
    allowed = [f.name for f in fields(section)]
    for name in plain:
        if name not in allowed:
            close = difflib.get_close_matches(str(name), allowed, n=1)
            raise WorkloadError(
                f"{prefix}{name}",
                "is not a key of a workload",
                expected="one of " + ", ".join(allowed),
                fix=f"did you mean {close[0]}?" if close else None,
            )
    for f in fields(section):
        if f.name not in plain and f.default is MISSING and f.default_factory is MISSING:
            raise WorkloadError(f"{prefix}{f.name}", "is missing")


def _parsed(text: str, name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """A YAML file's plain values, and the line of each by its dotted path."""
    import yaml

    lines: dict[str, int] = {}
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        plain = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}, line {mark.line + 1}" if mark else name
        raise LowkvError(f"not YAML: {getattr(error, 'problem', error)} ({place})") from error
    if not isinstance(root, yaml.MappingNode):
        raise LowkvError(f"workload {name} is empty or not a mapping", fix="write one `key: value` a line")

    def walk(node: yaml.MappingNode, prefix: str) -> None:
        for key_node, value_node in node.value:
            key, line = f"{prefix}{key_node.value}", key_node.start_mark.line + 1
            if key in lines:
                place = f"{name}, lines {lines[key]} and {line}"
                raise WorkloadError(key, "is given twice", fix="keep one of the two", where=place)
            lines[key] = line
            if isinstance(value_node, yaml.MappingNode):
                walk(value_node, f"{key}.")

    walk(root, "")
    return plain, lines
