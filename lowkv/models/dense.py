"""Plain attention over exact keys and values: what the paged, quantized cache is checked against.

Each sequence's K and V are Torch tensors of the model's own precision that grow as it goes on. Nothing is
packed, shared or bounded: it is the reference for tests and evaluation, not a way to serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.models.config import ModelConfig


class DenseAttention:
    """An `Attention` for `Decoder`, holding the history of any number of sequences.

    Call `begin_step` before each decoder call to say which sequence each token belongs to.
    """

    def __init__(self, config: ModelConfig, sequences: int = 1) -> None:
        self._config = config
        self._keys: list[list[Tensor | None]] = [[None] * sequences for _ in range(config.layers)]
        self._values: list[list[Tensor | None]] = [[None] * sequences for _ in range(config.layers)]
        self._step: list[tuple[int, int]] = []

    def begin_step(self, step: Sequence[tuple[int, int]]) -> None:
        """`step` lists (sequence, tokens) in the order in which the tokens lie in the row."""
        self._step = list(step)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends k and v [T, Hkv, D] and attends, causal and within the layer's window: q [T, Hq, D] -> [T, Hq,
        D].
        """
        outputs, start = [], 0
        for sequence, count in self._step:
            end = start + count
            keys = self._append(self._keys[layer], sequence, k[start:end])
            values = self._append(self._values[layer], sequence, v[start:end])
            outputs.append(self._attend(layer, q[start:end], keys, values))
            start = end
        return torch.cat(outputs)

    @staticmethod
    def _append(store: list[Tensor | None], sequence: int, new: Tensor) -> Tensor:
        old = store[sequence]
        store[sequence] = grown = new if old is None else torch.cat((old, new))
        return grown

    def _attend(self, layer: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        total, window = keys.shape[0], self._config.windows[layer]
        rows = torch.arange(total - q.shape[0], total)[:, None]
        columns = torch.arange(total)[None, :]
        seen = columns <= rows  # [n, total]
        if window is not None:
            seen &= columns > rows - window
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            scale=self._config.softmax_scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
