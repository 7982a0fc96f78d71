"""Runs one step's tokens through the model: the seam between the engine and what computes.

`TorchExecutor` calls the Torch decoder eagerly, its attention through the KV cache's kernels. A TensorRT
executor has the same `execute`. Both return only what sampling sees: the largest logits and the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from lowkv.kvcache import KVCache, Step
    from lowkv.models.decoder import Decoder

CANDIDATES = 256


@dataclass(frozen=True)
class Candidates:
    """What sampling sees of S sequences (design section 5)."""

    values: NDArray[np.float32]  # [S, N] largest logits, N = 256 or the vocabulary if smaller
    ids: NDArray[np.int32]  # [S, N] their token ids
    lse: NDArray[np.float32]  # [S] log-sum-exp over the whole vocabulary


class Executor(Protocol):
    """A model over a KV cache."""

    cache: KVCache

    def execute(self, tokens: NDArray[np.int64], step: Step, rows: NDArray[np.int64]) -> Candidates:
        """Feeds `tokens` [T] of `step` and returns the candidates after the tokens at `rows` [S]."""


class TorchExecutor:
    """The Torch decoder, executed eagerly on the CPU."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder = decoder
        self.cache = cache

    def execute(self, tokens: NDArray[np.int64], step: Step, rows: NDArray[np.int64]) -> Candidates:
        """Feeds `tokens` [T] of `step` and returns the candidates after the tokens at `rows` [S]."""
        import torch

        from lowkv.models.decoder import candidates

        if not len(rows):
            self.hidden(tokens, step)
            none = np.empty((0, 0), np.float32)
            return Candidates(none, none.astype(np.int32), np.empty(0, np.float32))
        with torch.inference_mode():
            values, ids, lse = candidates(self.logits(tokens, step, rows), CANDIDATES)
        return Candidates(values.numpy(), ids.numpy(), lse.numpy())

    def logits(self, tokens: NDArray[np.int64], step: Step, rows: NDArray[np.int64]) -> Tensor:
        """All logits after the tokens at `rows`: [S, vocab] float32."""
        import torch

        with torch.inference_mode():
            return self.decoder.logits(self.hidden(tokens, step)[torch.from_numpy(rows)])

    def hidden(self, tokens: NDArray[np.int64], step: Step) -> Tensor:
        """The residual stream of all T tokens after the last layer, [T, hidden]; the KV cache is written."""
        import torch

        dtype = self.decoder.dtype

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = self.cache.attend(layer, q.float().numpy(), k.float().numpy(), v.float().numpy(), step)
            return torch.from_numpy(out).to(dtype)

        with torch.inference_mode():
            positions = torch.from_numpy(_positions(step))
            return self.decoder.hidden(torch.from_numpy(tokens), positions, attention)


def _positions(step: Step) -> NDArray[np.int64]:
    """Position of every token of a step in its own sequence, [T]."""
    starts = step.batch.query_start[:-1]
    shift = np.repeat((step.batch.past - starts).astype(np.int64), step.batch.lengths)
    return np.arange(step.batch.tokens, dtype=np.int64) + shift
