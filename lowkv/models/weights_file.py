"""Writing `weights.safetensors` tensor by tensor.

`safetensors.save_file` wants the whole model in memory at once; here the header is written from the shapes,
which are known before any weight is read, and the data follows as it is made. Data starts on a page, so that
a mapped file is aligned as well as allocated memory. The same tensors give the same bytes.

Format: 8 bytes little-endian header length | JSON header, padded with spaces | data without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NAMES = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.uint8": "U8",
}
_PAGE = 4096


def write_weights(
    path: Path,
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[tuple[str, Tensor]],
    written: Callable[[int], None],
) -> None:
    """Writes the tensors, which come in the layout's order.

    Args:
        path: of the new file.
        layout: name -> (shape, dtype), in file order.
        tensors: (name, contiguous tensor) for each name of the layout.
        written: told the number of bytes after each tensor.
    """
    import torch

    header, end = {}, 0
    for name, (shape, dtype) in layout.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[str(dtype)], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), (expected, (shape, dtype)) in zip(tensors, layout.items(), strict=True):
            if name != expected or tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"{name} {tuple(tensor.shape)} {tensor.dtype} came, {expected} {shape} {dtype} was due"
                )
            tensor.contiguous().view(torch.uint8).numpy().tofile(file)
            written(prod(shape) * dtype.itemsize)
