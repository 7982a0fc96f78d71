"""Values in a rotated basis: the same model, with V vectors that round better.

Attention is linear in V. Multiply every V head by an orthogonal matrix H, and what attention gives is multiplied by H
as well; multiply the output projection's columns by H, and it is undone. Both products are made once, in the weights:

    v' = H v            v_proj (and its bias), each KV head's rows
    o_proj' = o_proj H  each query head's columns

With a normalized Hadamard matrix every channel of v' is a sum of all of v's: no channel stands out any more, and a
token's range over 32 channels, which is what its codes of 2 bits are stretched over, becomes narrower. Keys cannot be
treated so: rotary embedding lies between their weights and the cache. The idea is QuaRot's (arXiv 2404.00456).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lowkv.errors import LowkvError
from lowkv.kvcache.formats import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.calibration.scales import KVScales
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.config import ModelConfig

_ROTATED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:(v_proj)\.(?:weight|bias)|(o_proj)\.weight)")


def rotated_layers(plan: CachePlan) -> tuple[int, ...]:
    """Layers whose format stores V in the rotated basis. Raises `LowkvError` for a head_dim that has none."""
    layers = tuple(index for index, layer in enumerate(plan.layers) if FORMATS[layer.format].rotate_values)
    if layers and plan.head_dim & (plan.head_dim - 1):
        raise LowkvError(
            f"layer {layers[0]}: {plan.layers[layers[0]].format} rotates values, and this model's heads are not "
            "a power of two wide",
            got=f"head_dim {plan.head_dim}",
            expected="64, 128 or 256",
            fix="use a format without rotation: " + ", ".join(n for n, f in FORMATS.items() if not f.rotate_values),
        )
    return layers


def with_rotated_values(checkpoint: Checkpoint, plan: CachePlan) -> Checkpoint:
    """The checkpoint as the plan's layers need it: itself when none rotates values."""
    layers = rotated_layers(plan)
    return RotatedCheckpoint(checkpoint, frozenset(layers)) if layers else checkpoint


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix, normalized: [size, size] float32, symmetric and its own inverse.

    Raises ValueError for a size that is not a power of two.
    """
    import torch

    if size < 1 or size & (size - 1):
        raise ValueError(f"there is no such Hadamard matrix of size {size}; expected a power of two")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix.div(size**0.5)


@dataclass(frozen=True)
class RotatedCheckpoint:
    """A `Checkpoint` that reads another's tensors, those of V and of the output projection rotated in some layers."""

    inner: Checkpoint
    layers: frozenset[int]

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    @property
    def files(self) -> tuple[Path, ...]:
        return self.inner.files

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.inner.shapes()

    def kv_scales(self) -> KVScales | None:
        return self.inner.kv_scales()

    def write_tokenizer(self, folder: Path) -> tuple[str, ...]:
        return self.inner.write_tokenizer(folder)

    def tensor(self, name: str) -> Tensor:
        tensor = self.inner.tensor(name)
        match = _ROTATED.fullmatch(name)
        if match is None or int(match[1]) not in self.layers:
            return tensor
        size, shape = self.config.head_dim, tensor.shape
        if match[3]:  # o_proj [hidden, Hq D]: columns
            return (tensor.float().reshape(shape[0], -1, size) @ self._rotation).reshape(shape)
        heads = tensor.float().reshape(-1, size, shape[1] if len(shape) == 2 else 1)  # a bias is one column
        return (self._rotation @ heads).reshape(shape)

    @cached_property
    def _rotation(self) -> Tensor:
        return hadamard(self.config.head_dim)
