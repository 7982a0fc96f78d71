"""The workload: one YAML file that says what is asked of a server, how hard, and when an answer counts as
good.

Everything that could flatter a format is fixed here once for all of them: lengths, concurrency levels, the
byte budget of the KV cache, warm-up, window and SLO. Unknown keys are refused, with the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lowkv.configfile import ConfigError, Key, byte_size, check_keys, integer, mapping, read_document


def _positive(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError((key,), "is out of range", got=value, expected="a number greater than 0")


def _share(key: str, value: object) -> None:
    _positive(key, value)
    if float(value) > 1:  # type: ignore[arg-type]
        raise ConfigError((key,), "is out of range", got=value, expected="a share, at most 1")


@dataclass(frozen=True)
class Lengths:
    """Token lengths, drawn evenly from `minimum` to `maximum` (both included); equal means fixed."""

    minimum: int
    maximum: int

    def __post_init__(self) -> None:
        integer("prompt_tokens", self.minimum, minimum=8)
        integer("prompt_tokens", self.maximum, minimum=8)
        if self.minimum > self.maximum:
            raise ConfigError(
                ("prompt_tokens",),
                "is an empty range",
                got=[self.minimum, self.maximum],
                expected="[shortest, longest]",
            )

    def __str__(self) -> str:
        return str(self.minimum) if self.minimum == self.maximum else f"{self.minimum}-{self.maximum}"


@dataclass(frozen=True)
class Warmup:
    """When a level counts as steady.

    All must hold: for `minimum_seconds` at least `occupancy` of the level's users had a request under way; every user
    has had a first token since it joined; and so has every request that was sent before that. A level that cannot
    reach that within `maximum_seconds` is measured as it is, and says so.
    """

    minimum_seconds: float = 5.0
    maximum_seconds: float = 60.0
    occupancy: float = 0.95

    def __post_init__(self) -> None:
        _positive("minimum_seconds", self.minimum_seconds)
        _positive("maximum_seconds", self.maximum_seconds)
        _share("occupancy", self.occupancy)
        if self.minimum_seconds > self.maximum_seconds:
            raise ConfigError(
                ("maximum_seconds",),
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
    saturation_window_seconds: float | None = None
    """Length of the last level's window, better no shorter than a request; None is `window_seconds`."""
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
            integer(key, getattr(self, key), minimum=1)
        integer("output_tokens", self.output_tokens, minimum=2)
        integer("knee_probes", self.knee_probes, minimum=0)
        integer("seed", self.seed, minimum=0)
        _positive("window_seconds", self.window_seconds)
        _positive("time_limit_seconds", self.time_limit_seconds)
        if self.saturation_window_seconds is not None:
            _positive("saturation_window_seconds", self.saturation_window_seconds)
        if self.kv_budget is not None:
            integer("kv_budget", self.kv_budget, minimum=2**16)
        if not self.levels:
            raise ConfigError(("levels",), "is empty", expected="for example [1, 2, 4, 8]")
        for level in self.levels:
            integer("levels", level, minimum=1)
        if list(self.levels) != sorted(set(self.levels)):
            raise ConfigError(
                ("levels",), "must rise", got=list(self.levels), expected="each number larger than the one before"
            )
        if self.levels[-1] > self.saturation:
            raise ConfigError(
                ("saturation",),
                "is not the largest level",
                got=self.saturation,
                expected=f"{self.levels[-1]} or more",
                fix="raise saturation, or take the larger levels out",
            )
        if self.processes > self.saturation:
            raise ConfigError(
                ("processes",), "exceeds the number of users", got=self.processes, expected=f"at most {self.saturation}"
            )

    def window_at(self, level: int) -> float:
        """Seconds of the window at a level; it may be prolonged to twice that."""
        if level == self.saturation and self.saturation_window_seconds is not None:
            return self.saturation_window_seconds
        return self.window_seconds

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

    Raises LowkvError for a file that cannot be read, ConfigError, with the line, for a value that cannot be.
    """
    path = Path(path)
    document = read_document(path, "workload")
    return _workload({"name": path.stem} | document.value, document.where)


def workload_from_mapping(plain: Mapping[str, Any]) -> Workload:
    """The workload in plain values (see `Workload.to_mapping`). Raises ConfigError for a value that cannot be."""
    return _workload(plain, lambda key: None)


def _workload(plain: Mapping[Any, Any], where: Callable[[Key], str | None]) -> Workload:
    try:
        check_keys((), plain, Workload, {"slo": "for example: `slo: {ttft_seconds: 2, tpot_seconds: 0.2}`"})
        return Workload(**{key: _converted(key, value) for key, value in plain.items()})
    except ConfigError as error:
        error.where = where(error.key)
        raise


def _converted(key: str, value: Any) -> Any:
    """`value` as `Workload` wants it, where YAML cannot write that."""
    match key, value:
        case "prompt_tokens", [shortest, longest]:
            return Lengths(shortest, longest)
        case "prompt_tokens", int():
            return Lengths(value, value)
        case "prompt_tokens", _:
            raise ConfigError(
                (key,), "has the wrong type", got=value, expected="a number of tokens, or [shortest, longest]"
            )
        case "levels", [*levels]:
            return tuple(levels)
        case "levels", _:
            raise ConfigError((key,), "has the wrong type", got=value, expected="a list of numbers")
        case "kv_budget", str():
            return byte_size(key, value)
        case (("slo" | "warmup"), _):
            section: Any = Slo if key == "slo" else Warmup
            values = mapping(key, value)
            try:
                check_keys((), values, section)
                return section(**values)
            except ConfigError as error:
                raise error.below(key) from None
    return value
