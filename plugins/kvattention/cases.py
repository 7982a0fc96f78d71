"""One table of cases that drives every implementation, and the driver that plays them.

A `Case` is plain data (to and from a dict, so that another process or machine can run it): the formats, shapes and
policy of a cache, and how many tokens each sequence appends in each step. `Playback` owns an arena and a
deliberately naive block allocator (one slot per block, shuffled, freed slots refilled with NaN patterns), follows
the cache's rules for hot and cold blocks, and yields steps; beside it, it keeps the exact keys and values and knows
which blocks are cold, which is all the golden needs. It is not the serving cache: it shares no code with it, so that
the two can disagree.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvattention.batch import RaggedBatch
from kvattention.codec import CODECS, F16_MAX, Codec, Words, round_to
from kvattention.layout import UNIT_WORDS, LayerSpec, RecordLayout, arena_words
from kvattention.reference import as_stored, attention

Float32 = NDArray[np.float32]

POISON = 0x7FFF7FFF
"""Two NaNs in f16 and bf16: what freed and never written memory holds."""

VALUES = ("normal", "outlier", "constant", "extreme")
SCALES = ("head", "channel")


@dataclass(frozen=True)
class Case:
    """A cache configuration and the appends to play on it."""

    name: str
    formats: tuple[tuple[str, str], ...]
    """(K codec, V codec) of each layer when cold."""
    steps: tuple[tuple[int, ...], ...]
    """New tokens of each sequence, step by step: ``steps[i][s]``; 0 leaves the sequence out of the step."""
    hot: str = "f16"
    kv_heads: int = 2
    gqa: int = 1
    head_dim: int = 64
    group_size: int = 32
    residual: int = 64
    policy: str = "window"
    sink_blocks: int = 0
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer; empty means none."""
    values: str = "normal"
    """normal; outlier: one K channel times 100; constant: groups of equal values; extreme: +-65504 among them."""
    scales: str = "head"
    """Whether K's scales differ from KV head to KV head only, or from channel to channel as well."""

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise ValueError(f"case {self.name}: values {self.values!r} must be one of {VALUES}")
        if self.scales not in SCALES:
            raise ValueError(f"case {self.name}: scales {self.scales!r} must be one of {SCALES}")
        if self.policy not in ("window", "flush"):
            raise ValueError(f"case {self.name}: policy {self.policy!r} must be 'window' or 'flush'")
        if self.policy == "flush" and (self.residual < 1 or self.residual % self.group_size):
            raise ValueError(f"case {self.name}: flush needs a residual that is a multiple of {self.group_size}")

    @property
    def sequences(self) -> int:
        return len(self.steps[0])

    @property
    def heads(self) -> int:
        return self.kv_heads * self.gqa

    @property
    def softmax_scale(self) -> float:
        """Such that scores stay of a size of which float32 keeps a thousandth."""
        return 1 / math.sqrt(self.head_dim) / (F16_MAX if self.values == "extreme" else 1)

    @property
    def sealed(self) -> bool:
        """Whether any layer's cold format differs from model precision; otherwise blocks stay hot."""
        return any(pair != (self.hot, self.hot) for pair in self.formats)

    def cold_end(self, tokens: int) -> int:
        """End of the cold blocks of a sequence of ``tokens`` tokens once the step is over."""
        if not self.sealed:
            return 0
        if self.policy == "flush":
            return tokens // self.residual * self.residual // self.group_size
        return max(0, tokens - self.residual) // self.group_size

    def layers(self) -> list[LayerSpec]:
        """The layers' specs, with unequal random scales that let the largest values saturate."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        k_shape = (self.kv_heads, self.head_dim) if self.scales == "channel" else (self.kv_heads,)
        specs = []
        hot_offset = cold_offset = 0
        for index, (k, v) in enumerate(self.formats):
            hot = RecordLayout(CODECS[self.hot], CODECS[self.hot], self.kv_heads, self.head_dim, self.group_size)
            cold = dataclasses.replace(hot, k=CODECS[k], v=CODECS[v])
            specs.append(
                LayerSpec(
                    hot=hot,
                    cold=cold,
                    hot_offset=hot_offset,
                    cold_offset=cold_offset,
                    window=self.windows[index] if self.windows else None,
                    softmax_scale=self.softmax_scale,
                    k_scales=_scales(rng, cold.k, (2, 9), k_shape),
                    v_scales=_scales(rng, cold.v, (9, 36), (self.kv_heads,)),
                )
            )
            hot_offset += hot.words
            cold_offset += cold.words
        return specs

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON keeps."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Case:
        """Inverse of `to_dict`, also after a trip through JSON (lists become tuples)."""
        return cls(**{name: _tuples(value) for name, value in data.items()})


def _scales(rng: np.random.Generator, codec: Codec, peaks: tuple[float, float], shape: tuple[int, ...]) -> Float32:
    """Scales with which the codec reaches up to a peak drawn from a range; ones where it takes none."""
    drawn = rng.uniform(*peaks, shape) / codec.maximum if codec.scaled else np.ones(shape)
    return drawn.astype(np.float32)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Step:
    """One step to run: for each layer its inputs, and what must come out of it."""

    batch: RaggedBatch
    q: list[Float32]  # per layer [T, Hq, D]
    k: list[Float32]  # per layer [T, Hkv, D]
    v: list[Float32]  # per layer [T, Hkv, D]
    golden: list[NDArray[np.float64]]  # per layer: attention over K/V after encode and decode
    exact: list[NDArray[np.float64]]  # per layer: attention over the exact K/V
    seal: NDArray[np.int32]
    """Pairs of (hot, cold) offsets to seal once every layer has run."""


class Playback:
    """Plays a case on its own arena. Iterate over the steps; run each one's layers, then seal, before the next."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.layers = case.layers()
        self._rng = np.random.default_rng(zlib.crc32(case.name.encode()) + 1)
        self.hot_words = sum(layer.hot.words for layer in self.layers)
        self.cold_words = sum(layer.cold.words for layer in self.layers)
        self._slot_words = max(self.hot_words, self.cold_words)
        longest = [sum(step[s] for step in case.steps) for s in range(case.sequences)]
        slots = sum(2 * (-(-tokens // case.group_size) + 1) for tokens in longest)
        self.arena: Words = arena_words(slots * self._slot_words)
        self.arena[:] = POISON
        self._free = list(self._rng.permutation(slots) * (self._slot_words // UNIT_WORDS))
        self._tables: list[dict[int, int]] = [{} for _ in range(case.sequences)]
        self._tokens = [0] * case.sequences
        shape = (0, case.kv_heads, case.head_dim)
        self._keys = [[np.zeros(shape, np.float32) for _ in self.layers] for _ in range(case.sequences)]
        self._values = [[np.zeros(shape, np.float32) for _ in self.layers] for _ in range(case.sequences)]

    def __iter__(self) -> Iterator[Step]:
        for lengths in self.case.steps:
            yield self._begin(lengths)
            self._end(lengths)

    def stored(self, sequence: int, layer: int) -> tuple[Float32, Float32]:
        """The exact (k, v) ``[N, Hkv, D]`` appended so far."""
        return self._keys[sequence][layer], self._values[sequence][layer]

    def _begin(self, lengths: tuple[int, ...]) -> Step:
        case, group = self.case, self.case.group_size
        active = [s for s, n in enumerate(lengths) if n]
        past = [self._tokens[s] for s in active]
        total = [self._tokens[s] + lengths[s] for s in active]
        cold_end = [max(0, case.cold_end(tokens)) for tokens in past]
        direct_end = [max(0, case.cold_end(tokens)) for tokens in total]
        begin = [case.sink_blocks] * len(active)
        for s, have, want in zip(active, past, total, strict=True):
            for block in range(-(-have // group), -(-want // group)):
                self._tables[s][block] = self._allocate()
        table = np.full((len(active), max(-(-want // group) for want in total) + 1), -1, np.int32)
        for row, s in enumerate(active):
            for block, offset in self._tables[s].items():
                table[row, block] = offset
        starts = np.concatenate([[0], np.cumsum([lengths[s] for s in active])])
        batch = RaggedBatch(*(np.array(a, np.int32) for a in (starts, past, table, begin, cold_end, direct_end)))
        batch.check(group, self.arena.size)
        step = Step(batch, [], [], [], [], [], self._seals(active, past, total, begin, cold_end, direct_end))
        for index in range(len(self.layers)):
            self._layer(step, index, active)
        return step

    def _layer(self, step: Step, index: int, active: list[int]) -> None:
        """Draw the layer's inputs and compute its goldens."""
        case, layer, batch = self.case, self.layers[index], step.batch
        # Queries that model precision holds exactly, as keys and values are once rounded: every kernel gets the same.
        q = round_to(layer.hot.k, self._rng.standard_normal((batch.tokens, case.heads, case.head_dim)))
        k, v = self._draw(batch.tokens), self._draw(batch.tokens)
        if case.values == "outlier":
            k[:, :, 3] *= 100
        golden, exact = np.empty(q.shape), np.empty(q.shape)
        for row, s in enumerate(active):
            new = slice(int(batch.query_start[row]), int(batch.query_start[row + 1]))
            if case.values == "constant":
                k[new], v[new] = k[new][:1], v[new][:, :, :1]
            past = int(batch.past[row])
            keys = np.concatenate([self._keys[s][index], k[new]])
            values = np.concatenate([self._values[s][index], v[new]])
            self._keys[s][index], self._values[s][index] = keys, values
            cold = range(int(batch.cold_begin[row]), int(batch.cold_end[row]))
            read = as_stored(layer, keys, values, [b for b in cold if (b + 1) * case.group_size <= past])
            options: dict[str, Any] = {"softmax_scale": layer.softmax_scale, "window": layer.window}
            golden[new] = attention(q[new], *read, **options)
            exact[new] = attention(q[new], keys, values, **options)
        step.q.append(q)
        step.k.append(k)
        step.v.append(v)
        step.golden.append(golden)
        step.exact.append(exact)

    def _draw(self, tokens: int) -> Float32:
        x = self._rng.standard_normal((tokens, self.case.kv_heads, self.case.head_dim)).astype(np.float32)
        if self.case.values == "extreme":
            x[self._rng.random(x.shape) < 0.05] = F16_MAX
            x[self._rng.random(x.shape) < 0.05] = -F16_MAX
        return x

    def _seals(self, active: list[int], *rows: list[int]) -> NDArray[np.int32]:
        """Give a cold slot to every block that was begun hot and is old enough after this step."""
        pairs = []
        self._retired: list[tuple[int, int, int]] = []
        for s, past, _, begin, cold_end, direct_end in zip(active, *rows, strict=True):
            for block in range(max(begin, cold_end), direct_end):
                if block * self.case.group_size < past:
                    hot, cold = self._tables[s][block], self._allocate()
                    pairs.append((hot, cold))
                    self._retired.append((s, block, cold))
        return np.array(pairs, np.int32).reshape(-1, 2)

    def _end(self, lengths: tuple[int, ...]) -> None:
        for s, block, cold in self._retired:
            self._release(self._tables[s][block])
            self._tables[s][block] = cold
        windows = self.case.windows
        for s, n in enumerate(lengths):
            self._tokens[s] += n
            if windows and all(windows):
                oldest = self._tokens[s] - max(w for w in windows if w) + 1
                for block in [b for b in self._tables[s] if (b + 1) * self.case.group_size <= oldest]:
                    self._release(self._tables[s].pop(block))

    def _allocate(self) -> int:
        return int(self._free.pop())

    def _release(self, offset: int) -> None:
        start = offset * UNIT_WORDS
        self.arena[start : start + self._slot_words] = POISON
        self._free.insert(0, offset)


def _cases() -> Iterator[Case]:
    formats = {
        "f16": ("f16", "f16"),
        "e4m3": ("e4m3", "e4m3"),
        "int4": ("int4", "int4"),
        "int2": ("int2", "int2"),
        "k4v2": ("int4", "int2"),
        "e5m2": ("e5m2", "e5m2"),
        "int8": ("int8", "int8"),
        "int2c": ("int2c", "int2"),
    }
    # Ragged prefill, then mixed prefill and decode, then decode: every format.
    mixture = ((5, 131, 70), (1, 1, 40), (33, 1, 1), (1, 0, 1))
    for name, pair in formats.items():
        yield Case(f"{name}-mixture", (pair,), mixture, gqa=3)
        yield Case(f"{name}-sinks", (pair,), mixture, gqa=4, sink_blocks=1, residual=32, head_dim=128)
        yield Case(f"{name}-window", (pair,), mixture, gqa=3, windows=(50,), residual=0)
    yield Case("bf16-mixture", (("bf16", "bf16"),), mixture, hot="bf16", gqa=3)
    yield Case("bf16-int4", (("int4", "int4"),), mixture, hot="bf16", gqa=1)
    yield Case("bf16-e4m3", (("e4m3", "e4m3"),), mixture, hot="bf16", gqa=8)
    # K scales that differ from channel to channel.
    for name in ("e4m3", "e5m2", "int8"):
        yield Case(f"{name}-channels", (formats[name],), mixture, gqa=3, residual=32, scales="channel")
        yield Case(f"{name}-channels-d80", (formats[name],), mixture, head_dim=80, residual=0, scales="channel")
    # Lengths around the residual (KIVI issue 40: a flush test of `== R` misses multi-token steps).
    for policy in ("window", "flush"):
        for first in (63, 64, 65, 128):
            for then in (1, 2, 66):
                name = f"int2-{policy}-{first}+{then}"
                steps = ((first,), (then,), (1,))
                yield Case(name, (("int2", "int2"),), steps, policy=policy, residual=64, gqa=2)
    for length in (31, 32, 33):
        yield Case(f"k4v2-border-{length}", (("int4", "int2"),), ((length,), (1,), (31,), (1,)), residual=0)
    for length in (5, 131):
        yield Case(f"int2-alone-{length}", (("int2", "int2"),), ((length,), (1,)), residual=0, gqa=3)
    yield Case("int2-together", (("int2", "int2"),), ((5, 131), (1, 1)), residual=0, gqa=3)
    # Shapes: GQA, head_dim, group_size.
    for gqa in (1, 2, 3, 4, 5, 6, 7, 8, 12):
        yield Case(f"int2-gqa{gqa}", (("int2", "int2"),), ((97, 40), (1, 1), (2, 1)), residual=32, gqa=gqa)
    for head_dim in (16, 80, 96, 128, 256):
        for name in ("e4m3", "int4", "int2", "k4v2"):
            shape_steps = ((70, 131), (1, 1), (3, 1))
            yield Case(f"{name}-d{head_dim}", (formats[name],), shape_steps, head_dim=head_dim, residual=0, gqa=2)
    for group_size in (64, 128):
        for name in formats:
            group_steps = ((300, 70), (1, 1), (2, 70), (1, 1))
            yield Case(
                f"{name}-g{group_size}",
                (formats[name],),
                group_steps,
                group_size=group_size,
                residual=group_size,
                gqa=3,
            )
    # Plans that mix formats and windows over one arena.
    plan = (("f16", "f16"), ("e4m3", "e4m3"), ("int4", "int2"), ("int2", "int2"))
    yield Case("plan-mixed", plan, mixture, gqa=3, sink_blocks=1, residual=32)
    yield Case("plan-windows", plan, mixture, gqa=2, windows=(None, 20, 64, 33), residual=32)
    every = (("e5m2", "int2c"), ("int8", "e4m3"), ("int2c", "int8"), ("e4m3", "e5m2"))
    yield Case("plan-channels", every, mixture, gqa=3, sink_blocks=1, residual=32, scales="channel")
    yield Case("plan-all-windows", plan, mixture, gqa=2, windows=(64, 20, 64, 33), residual=32)
    # Values that break naive quantizers.
    for values in VALUES[1:]:
        for name in formats:
            value_steps = ((70, 33), (1, 1), (40, 1), (1, 1))
            yield Case(f"{name}-{values}", (formats[name],), value_steps, residual=0, gqa=2, values=values)


CASES: dict[str, Case] = {case.name: case for case in _cases()}
