"""Feeding tokens as decoding feeds them, many at a time: what every teacher-forced measure stands on.

Everything runs on the kernels and block rules that serve: a plan's KV cache is filled token by token, and every query
reads the history as that cache stores it at that moment (older tokens quantized, the residual and the sink not). A
prompt prefilled in one step would see itself in full precision and show nothing.

Feeding one token at a time would take hours, and is not needed. Which blocks are cold for the query at position p
is `cold_end(p)` of the layer's group, constant while p stays inside one block of G positions:

    position   aG ................. aG+G-1 | (a+1)G
    cold_end   c                         c | c or more

so one step of the G tokens of a whole block (or an aligned part of it), all reading the cache as it stood at aG,
computes what G single steps compute. tests/evaluation holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from kvattention import Attention
    from lowkv.evaluation.subjects import Subject
    from lowkv.kvcache import KVCache, Step

Work = Sequence[tuple[int, Sequence[int]]]
"""(row, the next tokens of that row's sequence)."""

ROWS = 128  # logits rows in memory at a time
BATCH = 8  # sequences advanced in one step


def cache_for(subject: Subject, kernels: Attention, count: int, final: int, chunk: int) -> KVCache:
    """A KV cache that holds `count` sequences of up to `final` tokens, fed in steps of at most `chunk` tokens."""
    from lowkv.kvcache import KVCache, SlabGeometry, reservation

    plan = subject.plan
    geometry = SlabGeometry.for_plan(plan)
    slabs = geometry.slabs_for(tuple(count * each for each in reservation(plan, final, chunk)))
    return KVCache(plan, slabs * geometry.bytes, kernels, subject.scales)


class Run:
    """A subject's KV cache with some sequences (rows), advancing in aligned steps."""

    def __init__(self, subject: Subject, rows: int, longest: int, *, step: int = 0, attention: str = "cpu") -> None:
        """`longest`: tokens of a row at most; `step`: tokens fed at a time, 0 is the plan's block."""
        from kvattention import select
        from lowkv.serving.torch_executor import TorchExecutor

        self.step = step or subject.plan.group_size
        self.decoder = subject.decoder
        cache = cache_for(subject, select(attention), rows, longest, self.step)
        self._executor = TorchExecutor(subject.decoder, cache)
        self._sequences = [cache.add() for _ in range(rows)]

    def feed(self, work: Work) -> Tensor:
        """Feeds tokens that stay within one aligned step; returns hidden states [T, hidden], in the work's order."""
        hidden, step = self._forward(work)
        self._executor.cache.commit(step)
        return hidden

    def peek(self, work: Work) -> Tensor:
        """As `feed`, but the cache stays as it is: all the tokens read the history as it stands now.

        So several continuations of one long prompt cost one reading of the prompt.
        """
        hidden, step = self._forward(work)
        self._executor.cache.abandon(step)
        return hidden

    def read(self, prompts: Sequence[Sequence[int]], advance: Callable[[int], None] | None = None) -> Tensor:
        """Feeds a prompt to every row, from the start; returns the hidden state of each one's last token, [W, hidden].

        `advance` is told of tokens as they are done.
        """
        import torch

        last: list[Tensor | None] = [None] * len(prompts)
        for begin in range(0, max(map(len, prompts)), self.step):
            work = [
                (row, prompt[begin : begin + self.step]) for row, prompt in enumerate(prompts) if begin < len(prompt)
            ]
            hidden = self.feed(work)
            ends = np.cumsum([len(tokens) for _, tokens in work])
            for (row, _), end in zip(work, ends, strict=True):
                last[row] = hidden[end - 1]
            if advance is not None:
                advance(int(ends[-1]))
        return torch.stack([state for state in last if state is not None])

    def _forward(self, work: Work) -> tuple[Tensor, Step]:
        step = self._executor.cache.prepare([(self._sequences[row], len(tokens)) for row, tokens in work])
        tokens = np.concatenate([np.asarray(tokens, np.int64) for _, tokens in work])
        return self._executor.hidden(tokens, step), step
