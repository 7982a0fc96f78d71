"""Many plans of one model fed the same text in one pass.

As `lowkv.evaluation.quality.score`, and tested against it: decode-style, on the serving kernels, the divergence exact
over the whole vocabulary. But every plan here has the same weights, so that all of their tokens go through each matrix
together, and only attention goes plan by plan, each to its own KV cache. With a window or two of text the weights are
what a step waits for: read once for ten plans instead of ten times, a search takes a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from lowkv.evaluation.feeding import cache_for
from lowkv.evaluation.subjects import Subject
from lowkv.serving.executor import step_positions

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.kvcache import CachePlan
    from lowkv.models.decoder import Decoder

ROWS = 512  # logits rows in memory at a time


class SideBySide:
    """KV caches of several plans, of one group size, that one pass of their model fills together."""

    def __init__(self, decoder: Decoder, plans: Sequence[CachePlan], rows: int, longest: int) -> None:
        """Each plan gets `rows` sequences of up to `longest` tokens."""
        from kvattention import select

        kernels = select("cpu")
        self.step = plans[0].group_size
        self._decoder = decoder
        self._caches = [cache_for(Subject("", decoder, plan), kernels, rows, longest, self.step) for plan in plans]
        self._sequences = [[cache.add() for _ in range(rows)] for cache in self._caches]

    def feed(self, tokens: npt.NDArray[np.int64]) -> Tensor:
        """Feeds the next tokens of every row, [rows, n], within one aligned step; returns [plans, rows * n, hidden]."""
        width = tokens.shape[1]
        steps = [
            cache.prepare([(sequence, width) for sequence in sequences])
            for cache, sequences in zip(self._caches, self._sequences, strict=True)
        ]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)
            for index, (cache, step) in enumerate(zip(self._caches, steps, strict=True)):
                own = slice(index * tokens.size, (index + 1) * tokens.size)
                q_own, k_own, v_own = (tensor[own].float().numpy() for tensor in (q, k, v))
                out[own] = torch.from_numpy(cache.attend(layer, q_own, k_own, v_own, step))
            return out

        ids = torch.from_numpy(np.tile(tokens.ravel(), len(steps)))
        positions = torch.from_numpy(np.concatenate([step_positions(step) for step in steps]))
        with torch.inference_mode():
            hidden = self._decoder.hidden(ids, positions, attention)
        for cache, step in zip(self._caches, steps, strict=True):
            cache.commit(step)
        return hidden.view(len(steps), tokens.size, -1)


def compare(
    decoder: Decoder,
    baseline: CachePlan,
    plans: Sequence[CachePlan],
    windows: npt.NDArray[np.int64],
    advance: Callable[[int], None],
) -> npt.NDArray[np.float64]:
    """What each plan gives at every predicted position of the windows, against the baseline: [plans, 3, W, N - 1].

    The three are the KL divergence in nats, the negative log-likelihood of the text less the baseline's, and whether
    the most likely token is the baseline's.

    Args:
        decoder: computes for all plans.
        baseline: what they are compared with.
        plans: at least one, of the baseline's group size.
        windows: [W, N] token ids.
        advance: told of tokens as they are done, the baseline's and every plan's counted.
    """
    count, length = windows.shape
    run = SideBySide(decoder, [baseline, *plans], count, length)
    found = np.zeros((len(plans), 3, count, length - 1))
    for begin in range(0, length, run.step):
        tokens = np.ascontiguousarray(windows[:, begin : begin + run.step])
        targets = windows[:, begin + 1 : begin + 1 + run.step]  # one short at the very end
        states = run.feed(tokens).view(1 + len(plans), *tokens.shape, -1)[:, :, : targets.shape[1]].flatten(1, 2)
        if targets.size:
            columns = _compared(decoder, states, torch.from_numpy(targets.flatten()))
            found[..., begin : begin + targets.shape[1]] = columns.reshape(len(plans), 3, *targets.shape)
        advance(tokens.size * (1 + len(plans)))
    return found


def _compared(decoder: Decoder, states: Tensor, targets: Tensor) -> npt.NDArray[np.float64]:
    """[plans, 3, T] from the states [1 + plans, T, hidden], the baseline's first, and the tokens [T] that came next."""
    parts = []
    size = max(1, ROWS // len(states))
    with torch.inference_mode():
        for begin in range(0, len(targets), size):
            chunk, wanted = states[:, begin : begin + size], targets[begin : begin + size]
            logits = decoder.logits(chunk.flatten(0, 1)).view(*chunk.shape[:2], -1)  # [1 + plans, t, vocab]
            log = logits.log_softmax(-1)
            nll = -log.gather(-1, wanted[None, :, None].expand(len(log), -1, 1))[..., 0]
            best = log.argmax(-1)
            base = log[0]
            kl = [(base.exp() * (base - one)).sum(-1) for one in log[1:]]
            parts.append(torch.stack((torch.stack(kl), nll[1:] - nll[0], (best[1:] == best[0]).float()), 1))
    found: npt.NDArray[Any] = torch.cat(parts, -1).double().numpy()
    return found
