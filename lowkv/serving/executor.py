"""Runs one step's tokens through the model: the seam between the serving engine and what computes.

`open_executor` is the one place where an executor is chosen, by the engine's target, and it says so in the log:

    cpu         `TorchExecutor`, attention by kvattention's CPU kernels
    cuda        `TorchExecutor` on a GPU, attention by the GPU kernels; q, k and v never leave the device
    tensorrt    `TensorRTExecutor`: the built engine, whose attention is a plugin with the same GPU kernels

All return only what sampling sees: the largest logits and the log-sum-exp.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lowkv.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from lowkv.engine.directory import EngineDir
    from lowkv.kvcache import KVCache, Step

CANDIDATES = 256

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidates:
    """What sampling sees of S sequences (design section 5)."""

    values: NDArray[np.float32]  # [S, N] largest logits, N = 256 or the vocabulary if smaller
    ids: NDArray[np.int32]  # [S, N] their token ids
    lse: NDArray[np.float32]  # [S] log-sum-exp over the whole vocabulary

    @classmethod
    def none(cls) -> Candidates:
        """Of no sequence: a step that only fed prompts whose end is still to come."""
        values = np.empty((0, 0), np.float32)
        return cls(values, values.astype(np.int32), np.empty(0, np.float32))


class Executor(Protocol):
    """A model over a KV cache."""

    cache: KVCache

    @property
    def description(self) -> str:
        """Which executor this is and where it computes, for the log."""

    def execute(self, tokens: NDArray[np.int64], step: Step, rows: NDArray[np.int64]) -> Candidates:
        """Feeds `tokens` [T] of `step` and returns the candidates after the tokens at `rows` [S]."""


def open_executor(
    engine: EngineDir, *, budget: int | None = None, threads: int | None = None, device_id: int = 0
) -> Executor:
    """The executor of a verified engine, its weights loaded and its KV cache allocated.

    Args:
        engine: the engine; its target decides.
        budget: bytes of KV cache; None is the recipe's.
        threads: CPU threads; None is the recipe's, or every core.
        device_id: the GPU, for engines that need one.

    Raises:
        LowkvError: there is no such GPU, the engine was built for another one or another TensorRT, or the budget does
            not fit into what is free.
    """
    budget = budget or engine.recipe.kv_cache.budget
    executor = _OPENERS[engine.manifest.target](engine, budget, threads or engine.recipe.serving.threads, device_id)
    log.info(
        "executor: %s; attention: %s; KV cache: %s in %s",
        executor.description,
        executor.cache.attention.name,
        executor.cache.plan.summary(),
        format_bytes(executor.cache.arena.bytes_total),
    )
    return executor


def step_positions(step: Step) -> NDArray[np.int64]:
    """Position of every token of a step in its own sequence, [T]."""
    batch = step.batches[0]  # the same tokens in every group
    starts = batch.query_start[:-1]
    shift = np.repeat((batch.past - starts).astype(np.int64), batch.lengths)
    return np.arange(batch.tokens, dtype=np.int64) + shift


def _on_cpu(engine: EngineDir, budget: int, threads: int | None, device_id: int) -> Executor:
    from lowkv.serving.torch_executor import open_on_cpu

    return open_on_cpu(engine, budget, threads)


def _on_cuda(engine: EngineDir, budget: int, threads: int | None, device_id: int) -> Executor:
    from lowkv.serving.torch_executor import open_on_cuda

    return open_on_cuda(engine, budget, device_id)


def _by_tensorrt(engine: EngineDir, budget: int, threads: int | None, device_id: int) -> Executor:
    from lowkv.serving.tensorrt.opening import open_by_tensorrt

    return open_by_tensorrt(engine, budget, device_id)


_OPENERS: dict[str, Callable[[EngineDir, int, int | None, int], Executor]] = {
    "cpu": _on_cpu,
    "cuda": _on_cuda,
    "tensorrt": _by_tensorrt,
}
