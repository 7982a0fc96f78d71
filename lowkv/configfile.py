"""What all of lowkv's YAML files have in common: lines in errors, no unknown keys, no duplicate keys, no surprises.

A file becomes plain values plus the line of each (`read_document`). Frozen dataclasses check their own values with
`choice`, `integer` and the like, so that one made in Python is held to the same rules; whoever builds them from a file
adds the place (`Document.where`) to the `ConfigError` that comes out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError
from lowkv.units import parse_bytes

if TYPE_CHECKING:
    import yaml

Key = tuple[str, ...]


class ConfigError(LowkvError):
    """A value of a configuration file that cannot be.

    `key` is the path of the value (`("kv_cache", "group_size")`), `where` the place in the file once that is known.
    """

    def __init__(
        self,
        key: Key,
        problem: str,
        *,
        got: object = None,
        expected: str | None = None,
        fix: str | None = None,
        where: str | None = None,
    ) -> None:
        super().__init__(f"{'.'.join(key)} {problem}", got=got, expected=expected, fix=fix)
        self.key = key
        self.problem = problem
        self.where = where

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text} ({self.where})" if self.where else text

    def below(self, key: str) -> ConfigError:
        """The same error, seen from one level further out."""
        return ConfigError((key, *self.key), self.problem, got=self.got, expected=self.expected, fix=self.fix)


def choice(key: str, value: object, allowed: Iterable[str]) -> None:
    """Raises ConfigError unless `value` is one of the words `allowed`."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise ConfigError((key,), "is not known", got=value, expected=_one_of(words), fix=_closest(value, words))


def integer(key: str, value: object, *, minimum: int, maximum: int | None = None) -> None:
    """Raises ConfigError unless `value` is a whole number in the bounds, both included."""
    # bool is an int to Python; `group_size: yes` is not a number to anybody else.
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError((key,), "has the wrong type", got=value, expected="a whole number")
    if value < minimum or (maximum is not None and value > maximum):
        bounds = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        raise ConfigError((key,), "is out of range", got=value, expected=bounds)


def number(key: str, value: object, minimum: float, maximum: float) -> None:
    """Raises ConfigError unless `value` is None or a number in the bounds, both included."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError((key,), "has the wrong type", got=value, expected="a number")
    if not minimum <= value <= maximum:
        raise ConfigError((key,), "is out of range", got=value, expected=f"{minimum:g} to {maximum:g}")


def text(key: str, value: object) -> None:
    """Raises ConfigError unless `value` is a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError((key,), "has the wrong type", got=value, expected="a text that is not empty")


def byte_size(key: str, value: str) -> int:
    """Bytes from a text such as `64MiB`. Raises ConfigError for anything else."""
    try:
        return parse_bytes(value)
    except LowkvError as error:
        raise ConfigError((key,), "is not a size", got=value, expected=error.expected, fix=error.fix) from None


def check_keys(key: Key, plain: Mapping[Any, Any], section: Any, examples: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError unless the keys of `plain`, which stands at `key`, are fields of the dataclass `section`.

    Fields without a default must be there; `examples` says how to write them.
    """
    allowed = tuple(f.name for f in fields(section))
    for name in plain:
        if name not in allowed:
            raise ConfigError(
                (*key, str(name)),
                "is not a key that is known here",
                expected=_one_of(allowed),
                fix=_closest(name, allowed),
            )
    for f in fields(section):
        if f.name not in plain and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError((*key, f.name), "is missing", fix=(examples or {}).get(f.name))


def mapping(key: str, value: object) -> Mapping[Any, Any]:
    """`value`, which must be a mapping. Raises ConfigError otherwise."""
    if not isinstance(value, Mapping):
        raise ConfigError((key,), "has the wrong type", got=value, expected="a mapping: one key and value a line")
    return value


def _one_of(allowed: tuple[str, ...]) -> str:
    return allowed[0] if len(allowed) == 1 else "one of " + ", ".join(allowed)


def _closest(value: object, allowed: tuple[str, ...]) -> str | None:
    match = difflib.get_close_matches(str(value), allowed, n=1)
    return f"did you mean {match[0]}?" if match else None


@dataclass(frozen=True)
class Document:
    """A YAML file's plain values, and the line of each."""

    value: dict[Any, Any]
    lines: Mapping[Key, int]
    name: str
    """What errors call it: `recipe demo.yaml`."""

    def where(self, key: Key) -> str:
        """The place of the value at `key`, or of the nearest thing around it."""
        while key and key not in self.lines:
            key = key[:-1]
        return f"{self.name}, line {self.lines[key]}" if key else self.name


def read_document(path: Path, kind: str) -> Document:
    """The YAML mapping in a file of that kind (`recipe`, `workload`). Raises LowkvError with the place."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise LowkvError(
            f"cannot read {kind} {path}: {reason}", fix=f"give the path of a {kind}'s YAML file"
        ) from error
    return _parse(content, f"{kind} {path.name}")


def _parse(content: str, name: str) -> Document:
    import yaml

    lines: dict[Key, int] = {}

    def plain(loader: yaml.SafeLoader, node: yaml.Node, key: Key) -> Any:
        lines.setdefault(key, _line(node))
        if isinstance(node, yaml.SequenceNode):
            return [plain(loader, item, (*key, str(i))) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise LowkvError(f"a key must be a word or a number ({name}, line {line})")
            # "<<" (merge) has no value of its own; like any other unknown key it is refused by name.
            word = (
                key_node.value if key_node.tag.endswith(":merge") else plain(loader, key_node, (*key, key_node.value))
            )
            if word in values:
                raise ConfigError(
                    (*key, str(word)),
                    "is given twice",
                    fix="keep one of the two",
                    where=f"{name}, lines {lines[*key, str(word)]} and {line}",
                )
            values[word] = plain(loader, value_node, (*key, str(word)))
        return values

    try:
        for event in yaml.parse(content, yaml.SafeLoader):
            # An alias may refer to itself; configuration needs none.
            if isinstance(event, yaml.AliasEvent):
                raise LowkvError(f"aliases (*{event.anchor}) are not read ({name}, line {_line(event)})")
        loader = yaml.SafeLoader(content)
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise LowkvError(f"{name} is empty or not a mapping", fix="write one `key: value` a line")
        value = plain(loader, root, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}, line {mark.line + 1}" if mark else name
        raise LowkvError(f"cannot read this YAML: {error.problem} ({place})") from error
    except yaml.YAMLError as error:
        raise LowkvError(f"cannot read this YAML: {error} ({name})") from error
    return Document(value, lines, name)


def _line(node: yaml.Node | yaml.Event) -> int:
    """1-based. Everything that comes from a text has a mark."""
    assert node.start_mark is not None
    return node.start_mark.line + 1
