"""Reading GGUF files: metadata, tensor table, and tensors as plain floats.

The `gguf` package dequantizes; the header is read here, because that package takes seconds over a vocabulary
that a plan does not even need. Files are mapped, so only what is asked for is read.

Layout (llama.cpp's docs/gguf.md): magic, version, counts | key-value pairs | tensor table | padding | data.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """In Torch's order: the file has the fastest-running dimension first."""
    kind: int
    """ggml's number for the storage type (Q4_1, F16, ...)."""
    offset: int
    """From the start of the data."""


class GgufFile:
    """A GGUF file of version 2 or 3, little-endian.

    Raises:
        LowkvError: the file is missing, not GGUF, of another version, or shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise LowkvError(f"cannot read {path}", got=str(error), expected="a GGUF file") from error
        cursor = _Cursor(self._data)
        try:
            metadata, tensors = self._read_header(cursor)
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise self._damaged("its header is cut short or garbled") from error
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(tensors)
        alignment = int(metadata.get("general.alignment", 32))
        self._start = -(-cursor.position // alignment) * alignment

    def _read_header(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._data[:4] != b"GGUF":
            raise LowkvError(f"{self.path} is not a GGUF file", got=bytes(self._data[:4]), expected="b'GGUF' first")
        cursor.position = 4
        version, tensor_count, pair_count = cursor.unpack("IQQ")
        if version not in _VERSIONS:
            raise LowkvError(f"{self.path} has a GGUF version that is not known", got=version, expected="2 or 3")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            metadata[key] = cursor.value(*cursor.unpack("I"))
        tensors: dict[str, GgufTensor] = {}
        for _ in range(tensor_count):
            name = cursor.string()
            (dimensions,) = cursor.unpack("I")
            shape = cursor.unpack(f"{dimensions}Q")
            kind, offset = cursor.unpack("IQ")
            tensors[name] = GgufTensor(tuple(reversed(shape)), kind, offset)
        return metadata, tensors

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantized, in Torch's shape.

        Raises:
            LowkvError: no such tensor, a storage type that `gguf` cannot dequantize, or a file cut short.
        """
        import gguf
        import numpy as np

        tensor = self.tensors.get(name)
        if tensor is None:
            raise LowkvError(f"{self.path} has no tensor {name}", fix="use a complete checkpoint")
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise LowkvError(
                f"tensor {name} of {self.path} has an unknown storage type",
                got=tensor.kind,
                fix="update the gguf package",
            ) from error
        size = prod(tensor.shape) // block * block_bytes
        begin = self._start + tensor.offset
        if begin + size > len(self._data):
            raise self._damaged(f"tensor {name} ends at byte {begin + size}, the file at {len(self._data)}")
        rows = (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        raw = np.frombuffer(self._data, np.uint8, size, begin).reshape(rows)
        try:
            floats = gguf.dequantize(raw, kind).reshape(tensor.shape)
        except NotImplementedError as error:
            raise LowkvError(
                f"tensor {name} of {self.path} cannot be dequantized",
                got=kind.name,
                expected="F32, F16, BF16, Q4_0 to Q8_0, Q2_K to Q6_K or an IQ type",
            ) from error
        # F32 comes back as a view of the mapped file, which Torch would warn of.
        return np.require(floats, np.float32, ["C_CONTIGUOUS", "WRITEABLE"])

    def _damaged(self, what: str) -> LowkvError:
        return LowkvError(f"{self.path} is damaged: {what}", fix="download it again")


class _Cursor:
    """A position in the file, and how to read the next thing there."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self._data, self.position)
        self.position += struct.calcsize("<" + form)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        if self.position + length > len(self._data):
            raise IndexError(length)
        text = self._data[self.position : self.position + length].decode("utf-8")
        self.position += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.unpack("IQ")
            if count > len(self._data):
                raise IndexError(count)
            if element in _SCALARS:
                return list(self.unpack(f"{count}{_SCALARS[element]}"))
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise IndexError(kind)
        return self.unpack(_SCALARS[kind])[0]
