"""What a quantized checkpoint's config says, in one shape for every library that writes such configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from lowkv.models.quantized import Fp8Matrix, Int4Matrix, MatrixForm


class Tensors(Protocol):
    """A checkpoint's tensors as they are stored."""

    folder: Path

    def stored(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Name -> shape and safetensors dtype."""
        ...

    def raw(self, name: str) -> Tensor:
        """One of them, in its own dtype."""
        ...


class Layout(Protocol):
    """How one kind of quantized matrix lies in a file."""

    @property
    def kind(self) -> str:
        """int4 or fp8."""
        ...

    @property
    def words(self) -> str:
        """For people."""
        ...

    def shape(self, tensors: Tensors, linear: str) -> tuple[int, int] | None:
        """[out, in] of the matrix `linear` (`model.layers.0.mlp.up_proj`); None when it is not of this layout."""
        ...

    def parts(self, tensors: Tensors, linear: str) -> tuple[str, ...]:
        """Names of the tensors that it consists of. Raises LowkvError for one that is missing or does not fit."""
        ...

    def form(self, tensors: Tensors, linear: str) -> MatrixForm | str:
        """The form of `matrix`, or the reason why only its decoded values can be had."""
        ...

    def matrix(self, tensors: Tensors, linear: str) -> Int4Matrix | Fp8Matrix | Tensor:
        """[in, out]; a Tensor (float32) where `form` is a reason."""
        ...


@dataclass(frozen=True)
class KVScheme:
    """What the config says of keys and values."""

    codec: str
    """`kvattention`'s name of the codec that the scales were made for: e4m3 or int8."""
    words: str
    optional: bool
    """Whether files without scales are as the library means them: values are stored as they are, scale 1.0."""


@dataclass(frozen=True)
class Scheme:
    """What the config says of a checkpoint."""

    library: str
    """Who wrote it, with the version where the config tells."""
    layout: Callable[[str], Layout | None]
    """The layout of a linear, by its name; None when it is in floating point."""
    kv: KVScheme | None
    notes: tuple[str, ...] = ()
    """What is in the config and makes no difference here."""
    files: tuple[str, ...] = ()
    """Files beside config.json that the scheme was read from."""


def refuse(library: str, what: str, got: object = None, fix: str | None = None) -> LowkvError:
    """The error for a property of a quantized checkpoint that lowkv does not read."""
    return LowkvError(
        f"this {library} checkpoint has {what}, which lowkv does not read",
        got=got,
        expected="FP8 weights (per tensor or per output), INT4 weights in groups, FP8 or INT8 KV scales",
        fix=fix or "quantize the model again in one of these forms, or use the unquantized checkpoint",
    )


def contradiction(what: str, got: object, expected: object) -> LowkvError:
    """The error for a checkpoint that says two things of itself."""
    return LowkvError(
        f"this checkpoint contradicts itself: {what}",
        got=got,
        expected=str(expected),
        fix="export it again; which of the two was meant cannot be told from the files",
    )


def section(raw: Mapping[str, Any], key: str, library: str) -> Mapping[str, Any]:
    """A mapping below `key`, empty when absent. Raises LowkvError for anything else."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse(library, f"a {key} that is no mapping", value)
    return value
