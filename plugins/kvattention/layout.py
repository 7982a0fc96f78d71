"""Where the bytes lie: the record of one layer in one block, and what a layer tells a kernel.

This is the one place that documents the byte layout. A *record* holds K and V of G consecutive tokens
(G = group_size) of one sequence for one layer, as little-endian int32 words, in four parts without gaps:

    K codes   [Hkv, D, G/kw]        channel-major (K transposed); a word packs kw consecutive TOKENS of one channel
    K params  [Hkv, D]              grouped K codec only: one word per channel, over the G tokens of the block
    V codes   [Hkv, G, D/vw]        token-major; a word packs vw consecutive CHANNELS of one token
    V params  [Hkv, G, ceil(D/32)]  grouped V codec only: one word per 32 channels of a token (the last may be fewer)

with kw, vw = 32 / bits of the K and V codec, the first value in a word's lowest bits, and a parameter word
= fp16 scale (low half) | fp16 minimum (high half). With G in {32, 64, 128} and D a multiple of 16 each part is a
multiple of 16 words, so every part of every record is aligned to 64 bytes.

K lies channel-major because the score kernel walks channels with one lane per token (and KIVI's K groups are
channels); V lies token-major because the output kernel walks tokens with one lane per channel.

A *block* is the concatenation of its layers' records: hot blocks hold every layer in model precision (f16 or bf16
for both K and V), cold blocks every layer in its own format. Blocks live in an int32 arena, 64-byte aligned; block
offsets count 64-byte units (16 words), so that int32 reaches 128 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvattention.codec import (
    VALUES_PER_PARAM,
    Codec,
    Floats,
    Words,
    decode_group,
    decode_plain,
    encode_group,
    encode_plain,
    pack,
    unpack,
)

UNIT_WORDS = 16
"""Words in one unit of a block offset (64 bytes)."""

GROUP_SIZES = (32, 64, 128)
MAX_HEAD_DIM = 256

Uint16 = NDArray[np.uint16]


@dataclass(frozen=True)
class RecordLayout:
    """Sizes and offsets, in words, of one layer's record in a block (see the module's drawing).

    Raises ValueError for a group_size outside {32, 64, 128}, a head_dim that is not a multiple of 16 up to 256, or
    no heads.
    """

    k: Codec
    v: Codec
    kv_heads: int
    head_dim: int
    group_size: int

    def __post_init__(self) -> None:
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size {self.group_size} is not supported; use one of {GROUP_SIZES}")
        if self.head_dim % 16 or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim {self.head_dim} is not a multiple of 16 from 16 to {MAX_HEAD_DIM}")
        if self.kv_heads < 1:
            raise ValueError(f"kv_heads {self.kv_heads} must be at least 1")

    @cached_property
    def k_codes_shape(self) -> tuple[int, int, int]:
        return self.kv_heads, self.head_dim, self.group_size // self.k.per_word

    @cached_property
    def k_params_shape(self) -> tuple[int, int]:
        return self.kv_heads, self.head_dim if self.k.grouped else 0

    @cached_property
    def v_codes_shape(self) -> tuple[int, int, int]:
        return self.kv_heads, self.group_size, self.head_dim // self.v.per_word

    @cached_property
    def v_params_shape(self) -> tuple[int, int, int]:
        return self.kv_heads, self.group_size, -(-self.head_dim // VALUES_PER_PARAM) if self.v.grouped else 0

    @property
    def k_codes(self) -> int:
        """Word offset of the K codes: the record starts with them."""
        return 0

    @cached_property
    def k_params(self) -> int:
        return self.k_codes + int(np.prod(self.k_codes_shape))

    @cached_property
    def v_codes(self) -> int:
        return self.k_params + int(np.prod(self.k_params_shape))

    @cached_property
    def v_params(self) -> int:
        return self.v_codes + int(np.prod(self.v_codes_shape))

    @cached_property
    def words(self) -> int:
        return self.v_params + int(np.prod(self.v_params_shape))

    @property
    def bytes(self) -> int:
        return 4 * self.words

    @property
    def bits_per_value(self) -> float:
        """Bits a stored value really takes, parameters included."""
        return 32 * self.words / (2 * self.kv_heads * self.head_dim * self.group_size)

    def parts(self, record: Words) -> tuple[Words, Words, Words, Words]:
        """Views (K codes, K params, V codes, V params) of a record, shaped as in the drawing."""
        return (
            record[self.k_codes : self.k_params].reshape(self.k_codes_shape),
            record[self.k_params : self.v_codes].reshape(self.k_params_shape),
            record[self.v_codes : self.v_params].reshape(self.v_codes_shape),
            record[self.v_params : self.words].reshape(self.v_params_shape),
        )

    def token_views(self, record: Words) -> tuple[Uint16, Uint16]:
        """16-bit views (K ``[Hkv, D, G]``, V ``[Hkv, G, D]``) of a hot record, through which tokens are appended.

        Raises ValueError when a codec is not a 16-bit one.
        """
        if not (self.k.hot and self.v.hot):
            raise ValueError(f"tokens are appended to f16 or bf16 records only, not to {self.k}/{self.v}")
        k_codes, _, v_codes, _ = self.parts(record)
        return (
            k_codes.view(np.uint16).reshape(self.kv_heads, self.head_dim, self.group_size),
            v_codes.view(np.uint16).reshape(self.kv_heads, self.group_size, self.head_dim),
        )

    def encode(self, k: Floats, v: Floats, record: Words, k_scales: Floats, v_scales: Floats) -> None:
        """Encode k, v ``[Hkv, G, D]`` into a record. k_scales ``[Hkv, D]`` and v_scales ``[Hkv]``."""
        k_codes, k_params, v_codes, v_params = self.parts(record)
        channels = np.ascontiguousarray(np.swapaxes(k, 1, 2))  # [Hkv, D, G]
        if self.k.grouped:
            codes, k_params[...] = encode_group(self.k, channels)
        else:
            codes = encode_plain(self.k, channels, k_scales[:, :, None])
        k_codes[...] = pack(codes, self.k.bits)
        if self.v.grouped:
            codes = np.empty(v.shape, np.uint32)
            for index, group in enumerate(self._v_groups()):
                codes[..., group], v_params[..., index] = encode_group(self.v, v[..., group])
        else:
            codes = encode_plain(self.v, v, v_scales[:, None, None])
        v_codes[...] = pack(codes, self.v.bits)

    def decode(
        self, record: Words, k_scales: Floats, v_scales: Floats
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Inverse of `encode`: (k, v), each float32 ``[Hkv, G, D]``."""
        k_codes, k_params, v_codes, v_params = self.parts(record)
        codes = unpack(k_codes, self.k.bits)
        if self.k.grouped:
            channels = decode_group(self.k, codes, k_params)
        else:
            channels = decode_plain(self.k, codes, k_scales[:, :, None])
        codes = unpack(v_codes, self.v.bits)
        if self.v.grouped:
            v = np.empty(codes.shape, np.float32)
            for index, group in enumerate(self._v_groups()):
                v[..., group] = decode_group(self.v, codes[..., group], v_params[..., index])
        else:
            v = decode_plain(self.v, codes, v_scales[:, None, None])
        return np.ascontiguousarray(np.swapaxes(channels, 1, 2)), v

    def _v_groups(self) -> Iterator[slice]:
        for start in range(0, self.head_dim, VALUES_PER_PARAM):
            yield slice(start, min(start + VALUES_PER_PARAM, self.head_dim))


def _one() -> NDArray[np.float32]:
    return np.ones((), np.float32)


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """What one layer tells an implementation: its records, where they sit in a block, and how it attends.

    hot_offset and cold_offset count words from the start of a hot or cold block. A query at position i sees keys j
    with ``i - window < j <= i``; window None sees all. k_scales float32 ``[Hkv, D]`` and v_scales
    float32 ``[Hkv]`` are the multipliers of scaled codecs, 1 by default; given as one number, or K's as ``[Hkv]``, they
    are broadcast. Compared by identity.

    Raises ValueError for a hot record that is not f16/f16 or bf16/bf16, for records of different shapes, for a
    window below 1, or for scales that are not finite and positive.
    """

    hot: RecordLayout
    cold: RecordLayout
    hot_offset: int = 0
    cold_offset: int = 0
    window: int | None = None
    softmax_scale: float = 1.0
    k_scales: NDArray[np.float32] = field(default_factory=_one)
    v_scales: NDArray[np.float32] = field(default_factory=_one)

    def __post_init__(self) -> None:
        if self.hot.k != self.hot.v or not self.hot.k.hot:
            raise ValueError(f"hot record {self.hot.k}/{self.hot.v} must be f16/f16 or bf16/bf16")
        if _shape(self.hot) != _shape(self.cold):
            raise ValueError(f"hot record {_shape(self.hot)} and cold record {_shape(self.cold)} differ in shape")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window} must be at least 1 (None sees everything)")
        object.__setattr__(self, "k_scales", self._scales("k_scales", (self.kv_heads, self.head_dim)))
        object.__setattr__(self, "v_scales", self._scales("v_scales", (self.kv_heads,)))

    def _scales(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The field in full: its axes stand for the first ones of ``shape``."""
        scales = np.asarray(getattr(self, name), dtype=np.float32)
        if scales.shape != shape[: scales.ndim] or not np.all(np.isfinite(scales) & (scales > 0)):
            raise ValueError(f"{name} {scales} must be positive finite numbers, of shape {shape} or its first axes")
        missing = (1,) * (len(shape) - scales.ndim)
        return np.ascontiguousarray(np.broadcast_to(scales.reshape(scales.shape + missing), shape))

    @property
    def kv_heads(self) -> int:
        return self.hot.kv_heads

    @property
    def head_dim(self) -> int:
        return self.hot.head_dim

    @property
    def group_size(self) -> int:
        return self.hot.group_size

    def record(self, arena: Words, block: int, *, cold: bool) -> Words:
        """View of this layer's record in the block at offset ``block`` (64-byte units)."""
        layout, offset = (self.cold, self.cold_offset) if cold else (self.hot, self.hot_offset)
        start = int(block) * UNIT_WORDS + offset
        return arena[start : start + layout.words]


def _shape(layout: RecordLayout) -> tuple[int, int, int]:
    return layout.kv_heads, layout.head_dim, layout.group_size


def arena_words(words: int) -> Words:
    """A zeroed int32 arena of at least ``words`` words whose first byte is 64-byte aligned."""
    raw = np.zeros(words + UNIT_WORDS, np.int32)
    skip = (-raw.ctypes.data % 64) // 4
    return raw[skip : skip + words]
