"""A quantized KV cache simulated in plain Torch: one call of the decoder over a whole text, read as decoding reads it.

At every moment a sequence's history is `exact | cold | exact`: the sink, what is sealed, the residual. Which blocks are
cold for the query at position p is its layer's `CacheGroup.cold_end(p)`, constant while p stays inside one block. So
attention walks over the text a block of queries at a time, over one array of keys and one of values in which blocks
turn from exact into what their codec gives back just before the first query that reads them so. That costs what causal
attention costs.

None of lowkv's kernels, arena or block tables take part: what is served can be checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lowkv.models.rotation import hadamard
from lowkv.study.quantize import round_trip

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from lowkv.calibration.scales import KVScales
    from lowkv.kvcache import CacheGroup, CachePlan
    from lowkv.models.config import ModelConfig
    from lowkv.study.configurations import Configuration

_F16_MAX = 65504.0


@dataclass(frozen=True, eq=False)
class Stored:
    """One layer's keys or values, [Hkv, T, D]: in the model's precision, and cold (whole blocks only)."""

    hot: Tensor
    cold: Tensor


@dataclass(frozen=True, eq=False)
class Cache:
    """A configuration on a model: how its layers' keys and values are stored."""

    configuration: Configuration
    plan: CachePlan
    scales: KVScales | None = None

    def rules(self, layer: int) -> CacheGroup:
        """Says which blocks of a layer are cold."""
        return self.plan.groups[self.plan.group_of[layer]]

    def keys(self, layer: int, k: Tensor) -> Stored:
        """K [T, Hkv, D] as the cache keeps it."""
        scales = None if self.scales is None else self.scales.layers[layer][0]
        return self._stored(k, "k", scales)

    def values(self, layer: int, v: Tensor) -> Stored:
        """V [T, Hkv, D] as the cache keeps it: in the rotated basis, if the configuration has one."""
        if self.configuration.rotate_values:
            v = v @ hadamard(v.shape[-1])
        scales = None if self.scales is None else self.scales.layers[layer][1][:, None]
        return self._stored(v, "v", scales)

    def output(self, out: Tensor) -> Tensor:
        """Attention over such values, turned back."""
        return out @ hadamard(out.shape[-1]) if self.configuration.rotate_values else out

    def _stored(self, x: Tensor, part: str, scales: NDArray[np.float32] | None) -> Stored:
        hot = rounded(x, self.plan.hot)
        group = self.plan.group_size
        whole = len(hot) // group * group if self.plan.seals else 0
        side = self.configuration.k if part == "k" else self.configuration.v
        cold = torch.from_numpy(round_trip(side, hot[:whole].numpy(), group, scales)) if whole else hot[:0]
        return Stored(hot.transpose(0, 1).contiguous(), cold.transpose(0, 1))


class SimulatedAttention:
    """An `Attention` for `Decoder`: one sequence from its beginning, all of it in one call."""

    def __init__(self, config: ModelConfig, cache: Cache, advance: Callable[[int], None] = lambda tokens: None) -> None:
        """`advance` is told of the tokens of every layer."""
        self._config = config
        self._cache = cache
        self._advance = advance

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        keys, values = self._cache.keys(layer, k), self._cache.values(layer, v)
        window, scale = self._config.windows[layer], self._config.softmax_scale
        step = self._cache.plan.group_size
        pieces = [
            attend(q[begin : begin + step], now_k, now_v, begin, window, scale)
            for begin, now_k, now_v in history(keys, values, self._cache.rules(layer), range(0, len(q), step))
        ]
        self._advance(len(q))
        return self._cache.output(torch.cat(pieces))


def history(
    keys: Stored, values: Stored, rules: CacheGroup, begins: Iterable[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(begin, K, V) as queries from each of these positions on read them, [Hkv, T, D]; positions grow.

    The arrays are the same ones every time, altered in between.
    """
    now_k, now_v, sealed = keys.hot.clone(), values.hot.clone(), rules.sink_tokens
    for begin in begins:
        cold = slice(sealed, rules.cold_end(begin) * rules.group_size)
        if cold.stop > cold.start:
            now_k[:, cold], now_v[:, cold] = keys.cold[:, cold], values.cold[:, cold]
            sealed = cold.stop
        yield begin, now_k, now_v


def attend(q: Tensor, keys: Tensor, values: Tensor, begin: int, window: int | None, scale: float) -> Tensor:
    """Causal attention of the queries from position `begin` on, within the window, in float32.

    Args:
        q: [n, Hq, D].
        keys: [Hkv, T, D], T at least begin + n.
        values: as keys.
        begin: position of the first query.
        window: a query at i sees keys j with i - window < j <= i; None sees all.
        scale: of the scores, before the softmax.

    Returns:
        [n, Hq, D].
    """
    count, heads, size = q.shape
    kv_heads, end = keys.shape[0], begin + count
    first = 0 if window is None else max(0, begin - window + 1)
    rows = q.mul(scale).transpose(0, 1).reshape(kv_heads, -1, size)  # [Hkv, gqa n, D]
    scores = torch.bmm(rows, keys[:, first:end].transpose(1, 2)).view(heads, count, end - first)
    at = torch.arange(begin, end)[:, None]
    if window is None:
        scores[:, :, begin:] += torch.full((count, count), -torch.inf).triu(1)
    else:
        column = torch.arange(first, end)[None, :]
        scores.masked_fill_((column > at) | (column <= at - window), -torch.inf)
    weights = scores.softmax(-1).view(kv_heads, -1, end - first)
    return torch.bmm(weights, values[:, first:end]).view(heads, count, size).transpose(0, 1)


def rounded(x: Tensor, hot: str) -> Tensor:
    """x in the plan's model precision (`fp16` saturates), as float32."""
    if hot == "bf16":
        return x.bfloat16().float()
    return x.clamp(-_F16_MAX, _F16_MAX).half().float()
