"""The cache plan: every layer's KV format, and what that costs in bytes.

A plan is pure arithmetic over (model geometry, KV settings): it allocates nothing and needs no weights, so
`lowkv plan` can price Llama-3-70B from its config.json on a laptop.

Layers with the same attention window form a `CacheGroup`. A group has blocks of its own, which hold its layers'
records only, so that blocks out of a window are freed for the layers that have it. Gemma 3 has two groups: most
layers see 512 tokens, every sixth layer sees all.

Which tokens of a sequence are cold is decided here and nowhere else (`CacheGroup.cold_end`). A sequence of `t`
stored tokens, block by block (G = group_size, S = sink blocks):

    block      0 .. S-1 | S ............ cold_end-1 | cold_end ......... ceil(t/G)-1
    kind       hot      | cold                      | hot (the residual and the unfilled block)

`window` keeps the newest R tokens hot at every moment, so cold_end = floor((t - R) / G). `flush` is the
paper's rule for K (arXiv 2402.02750, section 3.3): hot tokens gather until R of them are sealed at once, so
cold_end = floor(t / R) * R / G. Neither is ever less than S. A group of layers in model precision never seals.

Layers with a sliding window W never read tokens older than W again; their group's blocks are dropped once the whole
block is out of the window (`dead_end`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvattention import LayerSpec, RecordLayout
from lowkv.errors import LowkvError
from lowkv.kvcache.formats import FORMATS, KVFormat, kv_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from lowkv.recipe import KVCacheConfig

MODEL_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}


class ModelGeometry(Protocol):
    """What the plan must know of a model (`lowkv.models.ModelConfig` has it)."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def softmax_scale(self) -> float: ...


@dataclass(frozen=True)
class LayerPlan:
    """One layer's format; `reason` says which setting chose it (default, skip_layers, override)."""

    format: str
    window: int | None = None
    reason: str = "default"


Counts = tuple[int, ...]
"""Blocks of every kind: hot and cold ones of the first group, hot and cold ones of the second, and so on."""


def added(*counts: Sequence[int]) -> Counts:
    """The sums, kind by kind."""
    return tuple(map(sum, zip(*counts, strict=True)))


@dataclass(frozen=True)
class CacheGroup:
    """Layers with the same window: the bytes of their blocks, and the rules which block is what."""

    index: int  # in `CachePlan.groups`
    layers: tuple[int, ...]
    window: int | None
    seals: bool  # False when every layer stores model precision: then no block ever becomes cold
    hot_block_bytes: int
    cold_block_bytes: int
    group_size: int
    residual_length: int
    residual: str
    sink_tokens: int

    @cached_property
    def hot(self) -> int:
        """Its hot blocks' index in `Counts`."""
        return 2 * self.index

    @cached_property
    def cold(self) -> int:
        """Its cold blocks' index in `Counts`."""
        return 2 * self.index + 1

    @cached_property
    def sink_blocks(self) -> int:
        return self.sink_tokens // self.group_size

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens touch."""
        return -(-tokens // self.group_size)

    def cold_end(self, tokens: int) -> int:
        """Block index before which (from `sink_blocks`) blocks are cold once `tokens` tokens are stored."""
        if not self.seals:
            return self.sink_blocks
        if self.residual == "window" or self.residual_length == 0:
            sealed = (tokens - self.residual_length) // self.group_size
        else:
            sealed = tokens // self.residual_length * self.residual_length // self.group_size
        return max(self.sink_blocks, sealed)

    def dead_end(self, tokens: int) -> int:
        """Block index before which no later query can look.

        The next query stands at position `tokens` and sees keys j > tokens - window.
        """
        if self.window is None:
            return 0
        return max(0, (tokens - self.window + 1) // self.group_size)

    def alive(self, tokens: int) -> range:
        """The blocks that a sequence of `tokens` stored tokens owns between steps."""
        return range(self.dead_end(tokens), self.blocks(tokens))

    def resident(self, tokens: int) -> tuple[int, int]:
        """(hot, cold) blocks that a sequence of `tokens` stored tokens owns between steps."""
        end, dead = self.blocks(tokens), self.dead_end(tokens)
        cold_begin = max(self.sink_blocks, dead)
        cold_end = min(max(self.cold_end(tokens), cold_begin), end)
        cold = max(0, cold_end - cold_begin)
        return end - dead - cold, cold

    def bytes_at(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens` stored tokens in this group."""
        hot, cold = self.resident(tokens)
        return hot * self.hot_block_bytes + cold * self.cold_block_bytes


@dataclass(frozen=True)
class CachePlan:
    """Every layer's KV format and the rules that all layers share."""

    layers: tuple[LayerPlan, ...]
    kv_heads: int
    head_dim: int
    softmax_scale: float
    hot: str  # "fp16" | "bf16": the format of hot blocks and of skipped layers
    default: str
    group_size: int
    residual_length: int
    residual: str  # "window" | "flush"
    sink_tokens: int

    # -- construction ------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, model: ModelGeometry, kv: KVCacheConfig) -> CachePlan:
        """Resolves a recipe's `kv_cache` section against a model. Raises `LowkvError` on what cannot be."""
        default = kv_format(kv.format)
        hot = default.name if default.model_precision else MODEL_DTYPES[kv.model_dtype]
        layers = [LayerPlan(default.name, window) for window in model.windows]
        for index, reason in _skipped(kv.skip_layers, model.windows):
            layers[index] = LayerPlan(hot, model.windows[index], reason)
        for index, name in kv.overrides.items():
            _check_layer(index, model.layers, f"kv_cache.overrides: {index}")
            chosen = kv_format(name)
            if chosen.model_precision and chosen.name != hot:
                raise LowkvError(
                    f"kv_cache.overrides: layer {index} asks for {name}, but hot blocks are {hot}",
                    got=name,
                    expected=f"{hot} or a quantized format",
                    fix=f"write {hot}, or set kv_cache.model_dtype",
                )
            layers[index] = LayerPlan(name, model.windows[index], "override")
        if model.head_dim % 16:
            raise LowkvError(
                "head_dim must be a multiple of 16",
                got=model.head_dim,
                expected="16, 32, ..., 64, 80, 96, 128, 256",
                fix="this model cannot be served with a packed KV cache",
            )
        sealed = any(not FORMATS[layer.format].model_precision for layer in layers)
        residual = default.residual_length if kv.residual_length is None else kv.residual_length
        sink = default.sink_tokens if kv.sink_tokens is None else kv.sink_tokens
        return cls(
            layers=tuple(layers),
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            softmax_scale=model.softmax_scale,
            hot=hot,
            default=default.name,
            group_size=kv.group_size,
            residual_length=_whole_blocks(residual, kv.group_size) if sealed else 0,
            residual=kv.residual,
            sink_tokens=_whole_blocks(sink, kv.group_size) if sealed else 0,
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for engine.json; `from_mapping` is its inverse."""
        return {
            "default": self.default,
            "hot": self.hot,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "softmax_scale": self.softmax_scale,
            "group_size": self.group_size,
            "residual_length": self.residual_length,
            "residual": self.residual,
            "sink_tokens": self.sink_tokens,
            "layers": [
                {"format": layer.format, "window": layer.window, "reason": layer.reason} for layer in self.layers
            ],
        }

    @classmethod
    def from_mapping(cls, data: dict[str, Any]) -> CachePlan:
        """Inverse of `to_mapping`. Raises `LowkvError` on an unknown format, TypeError/KeyError on damage."""
        rest = {key: value for key, value in data.items() if key != "layers"}
        layers = tuple(LayerPlan(**layer) for layer in data["layers"])
        for layer in layers:
            kv_format(layer.format)
        return cls(layers=layers, **rest)

    # -- sizes -------------------------------------------------------------------------------------------

    def _layout(self, row: KVFormat) -> RecordLayout:
        return RecordLayout(row.k, row.v, self.kv_heads, self.head_dim, self.group_size)

    @cached_property
    def hot_record(self) -> RecordLayout:
        """Layout of one layer's record inside a hot block (the same for every layer)."""
        return self._layout(FORMATS[self.hot])

    @cached_property
    def cold_records(self) -> tuple[RecordLayout, ...]:
        """Layout of each layer's record inside a cold block."""
        return tuple(self._layout(FORMATS[layer.format]) for layer in self.layers)

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The layers by window, in the order of each group's first layer."""
        members: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            members.setdefault(layer.window, []).append(index)
        return tuple(
            self._group(index, window, tuple(layers)) for index, (window, layers) in enumerate(members.items())
        )

    def _group(self, index: int, window: int | None, layers: tuple[int, ...]) -> CacheGroup:
        seals = any(not FORMATS[self.layers[layer].format].model_precision for layer in layers)
        return CacheGroup(
            index=index,
            layers=layers,
            window=window,
            seals=seals,
            hot_block_bytes=len(layers) * self.hot_record.bytes,
            cold_block_bytes=sum(self.cold_records[layer].bytes for layer in layers),
            group_size=self.group_size,
            residual_length=self.residual_length if seals else 0,
            residual=self.residual,
            sink_tokens=self.sink_tokens if seals else 0,
        )

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Every layer's index into `groups`."""
        found = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return tuple(found[layer] for layer in range(len(self.layers)))

    @cached_property
    def block_bytes(self) -> Counts:
        """Bytes of a block of every kind."""
        return tuple(size for group in self.groups for size in (group.hot_block_bytes, group.cold_block_bytes))

    @property
    def no_blocks(self) -> Counts:
        return (0,) * (2 * len(self.groups))

    @property
    def hot_block_bytes(self) -> int:
        """Bytes of `group_size` tokens in model precision, all layers."""
        return sum(group.hot_block_bytes for group in self.groups)

    @property
    def cold_block_bytes(self) -> int:
        """Bytes of `group_size` sealed tokens, all layers, group parameters included."""
        return sum(group.cold_block_bytes for group in self.groups)

    @property
    def seals(self) -> bool:
        """False when every layer stores model precision: then no block ever becomes cold."""
        return any(group.seals for group in self.groups)

    @property
    def scale_bytes(self) -> int:
        """Bytes of static scales (float32: K's per channel, V's per KV head); per engine, not per sequence."""
        return sum(
            4 * self.kv_heads * (self.head_dim + 1) for layer in self.layers if FORMATS[layer.format].needs_scales
        )

    # -- costs -------------------------------------------------------------------------------------------

    @property
    def values_per_token(self) -> int:
        """K and V values of one token over all layers: 2 x layers x kv_heads x head_dim."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more sealed token costs, for as long as it is in every window."""
        return self.cold_block_bytes / self.group_size

    def resident(self, tokens: int) -> Counts:
        """Blocks of every kind that a sequence of `tokens` stored tokens owns between steps."""
        return tuple(count for group in self.groups for count in group.resident(tokens))

    def bytes_at(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens` stored tokens, whole blocks, residual and sink included."""
        return sum(group.bytes_at(tokens) for group in self.groups)

    def bytes_saved_by_windows(self, tokens: int) -> int:
        """Bytes that such a sequence would own on top if blocks out of a window were kept."""
        return sum(replace(group, window=None).bytes_at(tokens) for group in self.groups) - self.bytes_at(tokens)

    def effective_bits(self, tokens: int | None = None) -> float:
        """Bits per K or V value at `tokens` stored tokens; without `tokens`, of sealed blocks alone."""
        if tokens is None:
            return 8 * self.bytes_per_token / self.values_per_token
        return 8 * self.bytes_at(tokens) / (self.values_per_token * tokens)

    def compression(self, tokens: int) -> float:
        """Bytes of the same sequence in 16 bit over bytes in this plan (both in whole blocks, both with windows)."""
        dense = sum(sum(group.resident(tokens)) * group.hot_block_bytes for group in self.groups)
        return dense / self.bytes_at(tokens)

    def summary(self) -> str:
        """One line: the formats with their layer counts, e.g. `kivi2 x28 + fp16 x2`."""
        names = [layer.format for layer in self.layers]
        return " + ".join(f"{name} x{names.count(name)}" for name in dict.fromkeys(names))

    # -- for the kernels ---------------------------------------------------------------------------------

    def layer_specs(
        self, scales: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]] | None = None
    ) -> list[LayerSpec]:
        """One `LayerSpec` per layer; offsets count inside the block of the layer's group.

        `scales`: per layer (K scales, V scales), float32, K's [kv_heads, head_dim] or [kv_heads], V's [kv_heads].
        """
        ones = np.ones(self.kv_heads, np.float32)
        hot_ends, cold_ends = [0] * len(self.groups), [0] * len(self.groups)
        specs = []
        for index, (layer, record, group) in enumerate(zip(self.layers, self.cold_records, self.group_of, strict=True)):
            k_scales, v_scales = scales[index] if scales is not None else (ones, ones)
            specs.append(
                LayerSpec(
                    hot=self.hot_record,
                    cold=record,
                    hot_offset=hot_ends[group],
                    cold_offset=cold_ends[group],
                    window=layer.window,
                    softmax_scale=self.softmax_scale,
                    k_scales=k_scales,
                    v_scales=v_scales,
                )
            )
            hot_ends[group] += self.hot_record.words
            cold_ends[group] += record.words
        return specs


def _whole_blocks(tokens: int, group_size: int) -> int:
    """Rounds a format's default up to whole blocks; what a recipe says itself is checked there."""
    return -(-tokens // group_size) * group_size


def _check_layer(index: int, layers: int, where: str) -> None:
    if not 0 <= index < layers:
        raise LowkvError(
            f"{where}: no such layer",
            got=index,
            expected=f"0 to {layers - 1}",
            fix="name a layer the model has",
        )


def _skipped(skip_layers: Sequence[int | str], windows: Sequence[int | None]) -> list[tuple[int, str]]:
    """(layer, reason) for every layer that `skip_layers` names: see `KVCacheConfig.skip_layers`."""
    found: list[tuple[int, str]] = []
    for item in skip_layers:
        if isinstance(item, int):
            chosen = [item]
        elif item == "sliding_window":
            chosen = [index for index, window in enumerate(windows) if window is not None]
            if not chosen:
                raise LowkvError(
                    "kv_cache.skip_layers: sliding_window matches no layer of this model",
                    got=item,
                    expected="a model with sliding-window layers",
                    fix="remove it, or name layers by index",
                )
        elif item.startswith(("first:", "last:")):
            end, _, count = item.partition(":")
            _check_layer(int(count) - 1, len(windows), f"kv_cache.skip_layers: {item}")
            every = range(len(windows))
            chosen = list(every[: int(count)] if end == "first" else every[-int(count) :])
        else:
            first, _, last = item.partition("-")
            chosen = list(range(int(first), int(last) + 1))
        for index in chosen:
            _check_layer(index, len(windows), f"kv_cache.skip_layers: {item}")
            found.append((index, f"skip_layers: {item}"))
    return found
