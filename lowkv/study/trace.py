"""One look at the exact model: its keys, values and some of its queries, which everything local is computed from.

Statistics say what keys and values look like, channel by channel and token by token (arXiv 2402.02750, section 3.2,
figure 2). Errors say what a configuration does to one layer whose inputs are exact, so that layers can be compared;
what becomes of all of them together is for perplexity to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowkv.study.simulation import Cache, SimulatedAttention, attend, history

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.models.config import ModelConfig
    from lowkv.models.decoder import Decoder

SPOTS = 8
"""Places of the text whose queries are kept."""
ROWS = 32
"""Queries of each."""
ALIGNMENT = 128
"""Spots begin at multiples of every group size, so that all their queries read one history."""
BINS = 96
"""Rows of a picture of tokens."""
SHOWN = 4
"""Layers shown channel by channel and token by token."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Trace:
    """What the exact model computed on a text; lists hold a tensor of each layer."""

    config: ModelConfig
    hidden: Tensor  # [T, hidden]
    spots: tuple[int, ...]
    k: list[Tensor] = field(default_factory=list)  # [T, Hkv, D], as the layer's model precision stores them
    v: list[Tensor] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)  # [spots, ROWS, Hq, D]
    out: list[Tensor] = field(default_factory=list)  # as q


def trace(decoder: Decoder, cache: Cache, ids: NDArray[np.int64], advance: Callable[[int], None]) -> Trace:
    """Runs the decoder over the text with that (exact) cache."""
    spots = spots_of(len(ids))
    kept: dict[str, list[Tensor]] = {"k": [], "v": [], "q": [], "out": []}
    inner = SimulatedAttention(decoder.config, cache, advance)
    half = torch.bfloat16 if cache.plan.hot == "bf16" else torch.float16

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = inner(layer, q, k, v)
        kept["k"].append(k.to(half))
        kept["v"].append(v.to(half))
        for name, rows in (("q", q), ("out", out)):
            kept[name].append(torch.stack([rows[spot : spot + ROWS] for spot in spots]))
        return out

    hidden = run(decoder, ids, attention)
    return Trace(decoder.config, hidden, spots, **kept)


def run(decoder: Decoder, ids: NDArray[np.int64], attention: Callable[..., Tensor]) -> Tensor:
    """Hidden states of a text in one call of the decoder, [T, hidden]."""
    with torch.inference_mode():
        return decoder.hidden(torch.from_numpy(ids), torch.arange(len(ids)), attention)


def spots_of(tokens: int) -> tuple[int, ...]:
    """Where the queries that are kept begin: spread over the text, the last near its end."""
    possible = np.arange(ALIGNMENT, tokens - ROWS + 1, ALIGNMENT)
    if not len(possible):
        raise ValueError(f"a text of {tokens} tokens is too short; expected at least {ALIGNMENT + ROWS}")
    chosen = np.linspace(0, len(possible) - 1, min(SPOTS, len(possible))).round().astype(int)
    return tuple(int(possible[index]) for index in chosen)


# -- errors ----------------------------------------------------------------------------------------------------


def errors(seen: Trace, cache: Cache) -> dict[str, list[float]]:
    """Relative errors |x' - x| / |x| of every layer: of cold keys, of cold values, and of the output of attention.

    Norms are over the tokens that are cold at the text's end, and over the queries of all spots.
    """
    found: dict[str, list[float]] = {"k": [], "v": [], "output": []}
    tokens = len(seen.k[0])
    with torch.inference_mode():
        for layer in range(seen.config.layers):
            rules = cache.rules(layer)
            cold = slice(rules.sink_tokens, rules.cold_end(tokens) * rules.group_size)
            keys, values = cache.keys(layer, seen.k[layer].float()), cache.values(layer, seen.v[layer].float())
            for name, stored in (("k", keys), ("v", values)):
                found[name].append(_relative(stored.cold[:, cold], stored.hot[:, cold][:, : stored.cold.shape[1]]))
            window, scale = seen.config.windows[layer], seen.config.softmax_scale
            out = [
                attend(seen.q[layer][spot], now_k, now_v, begin, window, scale)
                for spot, (begin, now_k, now_v) in enumerate(history(keys, values, rules, seen.spots))
            ]
            found["output"].append(_relative(cache.output(torch.stack(out)), seen.out[layer]))
    return found


def _relative(got: Tensor, exact: Tensor) -> float:
    if not got.numel():
        return 0.0
    return float((got - exact).norm() / exact.norm().clamp_min(1e-30))


# -- statistics ------------------------------------------------------------------------------------------------


def statistics(seen: Trace) -> dict[str, Any]:
    """Magnitudes of K (after RoPE) and V, in plain values.

    `k` and `v` hold a list of the layers:

        channel   mean, p99, max of |x| over the tokens, [Hkv D] each
        token     the same over the channels, in at most BINS bins of consecutive tokens: mean of means, max of maxima
        outlier   the largest channel over its head's median channel, by mean |x|; the largest of all heads
        outlier_max, token_outlier   likewise by max |x|, and of tokens over the median token

    and of at most SHOWN layers a `map` [bins, D]: mean |x| of the head where the outlier is.
    """
    found: dict[str, Any] = {"k": [_layer(k) for k in seen.k], "v": [_layer(v) for v in seen.v]}
    for layer in _shown([entry["outlier"] for entry in found["k"]]):
        for part, tensors in (("k", seen.k), ("v", seen.v)):
            entry = found[part][layer]
            head = tensors[layer][:, entry["head"]].float().abs().numpy()
            entry["map"] = _plain(np.stack([rows.mean(axis=0) for rows in _binned(head)]))
    return found


def _layer(x: Tensor) -> dict[str, Any]:
    magnitude: Floats = x.float().abs().numpy()  # [T, Hkv, D]
    mean, largest = magnitude.mean(axis=0), magnitude.max(axis=0)  # [Hkv, D]
    flat = magnitude.reshape(len(magnitude), -1)
    each = flat.max(axis=1)
    ratios = _over_median(mean)
    return {
        "channel": {
            "mean": _plain(mean.reshape(-1)),
            "p99": _plain(np.percentile(flat, 99, axis=0)),
            "max": _plain(largest.reshape(-1)),
        },
        "token": {
            "mean": _plain(np.array([rows.mean() for rows in _binned(flat)])),
            "p99": _plain(np.array([np.percentile(rows, 99) for rows in _binned(flat)])),
            "max": _plain(np.array([rows.max() for rows in _binned(flat)])),
        },
        "outlier": _rounded(float(ratios.max())),
        "outlier_max": _rounded(float(_over_median(largest).max())),
        "token_outlier": _rounded(float(_over_median(each[None])[0])),
        "head": int(ratios.argmax()),
    }


def _over_median(rows: Floats) -> Floats:
    """Largest over median of each row; 1 for a row of zeros."""
    median = np.median(rows, axis=1)
    ratios: Floats = np.divide(rows.max(axis=1), median, out=np.ones_like(median), where=median > 0)
    return ratios


def _binned(rows: Floats) -> list[Floats]:
    return np.array_split(rows, min(BINS, len(rows)))


def _shown(outliers: list[float]) -> list[int]:
    """The first, the middle and the last layer, and the one with the largest K outlier."""
    last = len(outliers) - 1
    return sorted({0, last // 2, last, int(np.argmax(outliers))})[:SHOWN]


def _plain(values: NDArray[Any]) -> Any:
    """Nested lists of numbers with four digits."""
    return [_plain(row) for row in values] if values.ndim > 1 else [_rounded(float(value)) for value in values]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
