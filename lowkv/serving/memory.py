"""Whether an engine fits on its device: the KV budget, the weights and the workspace against what is free.

Checked before anything is allocated, so that a budget that is too large is answered with numbers and not by an
allocator in the middle of loading. Knows no device: it is given the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.models.config import ModelConfig
    from lowkv.recipe import ServingConfig

TORCH_RESERVE = 256 * 2**20
"""Bytes for what Torch takes beside tensors: cuBLAS workspaces, compiled kernels, rounding up of allocations."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that an engine takes on a device."""

    kv_cache: int
    weights: int
    workspace: int

    @property
    def total(self) -> int:
        return self.kv_cache + self.weights + self.workspace


def check_fits(footprint: Footprint, free: int, where: str) -> None:
    """Raises `LowkvError` with both numbers when a footprint is larger than the `free` bytes of a device."""
    if footprint.total <= free:
        return
    room = free - footprint.weights - footprint.workspace
    raise LowkvError(
        f"the engine and its KV cache do not fit into the free memory of {where}",
        got=f"kv_cache.budget {footprint.kv_cache} + weights {footprint.weights} + workspace {footprint.workspace} "
        f"= {footprint.total} bytes",
        expected=f"at most {free} bytes, which are free",
        fix=f"lower kv_cache.budget to {room} bytes or less, or free the device's memory"
        if room > 0
        else "free the device's memory, or use a larger one: the engine does not fit without any KV cache",
    )


def torch_workspace(config: ModelConfig, serving: ServingConfig, *, quantized: bool = False) -> int:
    """Bytes that the Torch decoder takes at once in a full step, beside its weights; an upper estimate.

    `quantized` weights are decoded for every product: codes and two 16-bit forms of the largest matrix.
    """
    tokens, rows = serving.max_tokens_per_step, serving.max_sequences
    qkv = config.q_width + 2 * config.kv_width
    per_token = 3 * config.hidden + 3 * qkv + 5 * config.intermediate  # 16-bit values of one layer
    logits = 3 * config.vocab + config.hidden  # float32: logits, top-k's copy, log-sum-exp's
    decoded = 5 * config.hidden * 2 * config.intermediate if quantized else 0
    return 2 * tokens * per_token + 4 * rows * logits + decoded + TORCH_RESERVE
