"""From hidden states to figures: log-likelihoods and divergences by blocks of positions, and their intervals.

Formulas are those of `lowkv.evaluation.quality`; what is compared here is one text under many configurations, the exact
model's hidden states being kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowkv.evaluation.intervals import Interval, block_sizes, block_sums, exponential, of_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.models.decoder import Decoder

ROWS = 128  # rows of logits in memory at a time

Outcome = Mapping[str, Any]
"""Sums over blocks of BOOTSTRAP_BLOCK positions: lists `nll`, `kl` and `agree`."""


def compared(decoder: Decoder, exact: Tensor, hidden: Tensor, ids: NDArray[np.int64]) -> dict[str, list[float]]:
    """The outcome of hidden states [T, hidden] against the exact model's; the last token predicts nothing."""
    targets = torch.from_numpy(ids[1:])
    parts = []
    with torch.inference_mode():
        for begin in range(0, len(targets), ROWS):
            wanted = targets[begin : begin + ROWS, None]
            rows = slice(begin, begin + len(wanted))
            base, log_p = (decoder.logits(states[rows]).log_softmax(-1) for states in (exact, hidden))
            nll = -log_p.gather(-1, wanted)[:, 0]
            kl = (base.exp() * (base - log_p)).sum(-1)
            agree = (base.argmax(-1) == log_p.argmax(-1)).float()
            parts.append(torch.stack((nll, kl, agree)))
    columns = torch.cat(parts, -1).double().numpy()
    sums = block_sums(columns)
    return {name: row.tolist() for name, row in zip(("nll", "kl", "agree"), sums, strict=True)}


def figures(outcome: Outcome, base: Outcome, tokens: int) -> dict[str, dict[str, float]]:
    """Perplexity, its ratio to the baseline's, KL in nats and top-1 agreement: each value, low and high."""
    sizes, nll = block_sizes(tokens - 1), np.array(outcome["nll"])
    found = {
        "perplexity": exponential(of_blocks(nll, sizes)),
        "ratio": ratio(outcome, base, tokens),
        "kl": of_blocks(np.array(outcome["kl"]), sizes),
        "top1": of_blocks(np.array(outcome["agree"]), sizes),
    }
    return {name: asdict(interval) for name, interval in found.items()}


def ratio(outcome: Outcome, base: Outcome, tokens: int) -> Interval:
    """One perplexity over another on the same text; the interval is of the pairs."""
    return exponential(of_blocks(np.array(outcome["nll"]) - np.array(base["nll"]), block_sizes(tokens - 1)))
