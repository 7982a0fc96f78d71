"""How a value becomes bits: the codecs of the KV cache and their NumPy specification.

A codec says how many bits one stored value takes and whether values share quantization parameters. Two kinds:

* plain: ``f16``, ``bf16`` (raw, as stored in hot blocks) and the scaled ones of 8 bits, ``e4m3``, ``e5m2`` (OCP FP8)
  and ``int8`` (two's complement, -127 to 127). Their static multipliers are kept outside the record, one per channel
  of a KV head for K and one per KV head for V: stored = saturate(x / scale), decoded = stored * scale;
* grouped: ``int4``, ``int2`` (KIVI, arXiv 2402.02750, section 3.2: asymmetric per group).
  ``min = min(x)``, ``scale = (max - min) / (2^bits - 1)``, both rounded to fp16, then
  ``code = round(clamp((x - min) / scale))`` with the *rounded* parameters, ``decoded = code * scale + min``.
  A group whose rounded scale is 0 (constant, or a range below fp16's smallest step) gets code 0 and decodes to
  its minimum: a constant group decodes to itself. ``int2c`` is written with a narrower range, the middle 80% of
  max - min, and read as int2: few values lie near the ends, and all others gain from the smaller step.

All rounding is to nearest, ties to even. f16 and the fp16 parameters saturate at +-65504, e4m3 at +-448, e5m2 at
+-57344, int8 at +-127: no finite input becomes infinite. NaN is not a value the cache promises to keep.

Everything here is the specification, written for reading; kernels are tested against it and must produce the same
bytes. Where the bytes lie is `layout`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F16_MAX = 65504.0
VALUES_PER_PARAM = 32
"""Channels of one token that share a V parameter word in a grouped codec (the last group may be shorter)."""

Floats = NDArray[np.floating[Any]]
Words = NDArray[np.int32]
Codes = NDArray[np.uint32]


@dataclass(frozen=True)
class Codec:
    """One way to store a value. Compare and hash by value; the instances below are the only ones."""

    name: str
    bits: int
    grouped: bool
    index: int
    """Number by which compiled kernels know the codec."""
    maximum: float = math.inf
    """Largest magnitude of a plain codec, before its scale is applied."""
    cut: int = 0
    """The codes of a group leave out 1/cut of its range at either end; 0 leaves out nothing."""

    @property
    def per_word(self) -> int:
        """Values in a 32-bit word, the first in the lowest bits."""
        return 32 // self.bits

    @property
    def levels(self) -> int:
        """Largest integer code of a grouped codec."""
        return (1 << self.bits) - 1

    @property
    def hot(self) -> bool:
        """Whether the codec may serve as model precision, which single tokens are appended to."""
        return self.bits == 16

    @property
    def scaled(self) -> bool:
        """Whether values are divided by static scales, kept outside the record, before they are stored."""
        return self.bits == 8

    @property
    def clip(self) -> float:
        """The part of a group's range that its codes span."""
        return 1 - 2 / self.cut if self.cut else 1.0

    @property
    def reader(self) -> Codec:
        """The codec that decodes the same words: kernels that only read know int2c as int2."""
        return int2 if self == int2c else self

    def __str__(self) -> str:
        return self.name


f16 = Codec("f16", 16, grouped=False, index=0, maximum=F16_MAX)
bf16 = Codec("bf16", 16, grouped=False, index=1)
e4m3 = Codec("e4m3", 8, grouped=False, index=2, maximum=448.0)
int4 = Codec("int4", 4, grouped=True, index=3)
int2 = Codec("int2", 2, grouped=True, index=4)
e5m2 = Codec("e5m2", 8, grouped=False, index=5, maximum=57344.0)
int8 = Codec("int8", 8, grouped=False, index=6, maximum=127.0)
int2c = Codec("int2c", 2, grouped=True, index=7, cut=10)

CODECS: dict[str, Codec] = {codec.name: codec for codec in (f16, bf16, e4m3, int4, int2, e5m2, int8, int2c)}


def pack(codes: NDArray[np.integer[Any]], bits: int) -> Words:
    """Pack ``[..., n]`` codes below ``2**bits`` into ``[..., n * bits / 32]`` int32 words, first code lowest.

    Raises ValueError when n does not fill whole words.
    """
    per_word = 32 // bits
    *outer, n = codes.shape
    if n % per_word:
        raise ValueError(f"{n} codes of {bits} bits do not fill 32-bit words; use a multiple of {per_word}")
    lanes = codes.astype(np.uint32).reshape(*outer, n // per_word, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    words: Codes = np.bitwise_or.reduce(lanes << shifts, axis=-1)
    return words.view(np.int32)


def unpack(words: Words, bits: int) -> Codes:
    """Inverse of `pack`: ``[..., w]`` int32 words to ``[..., w * 32 / bits]`` uint32 codes."""
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    lanes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    codes: Codes = lanes.reshape(*words.shape[:-1], words.shape[-1] * per_word)
    return codes


def encode_plain(codec: Codec, x: Floats, scale: Floats | float = 1.0) -> Codes:
    """Codes of a plain codec, same shape as x. ``scale`` (the multiplier of a scaled codec) broadcasts."""
    x = np.asarray(x, dtype=np.float32)
    if codec == f16:
        return np.clip(x, -F16_MAX, F16_MAX).astype(np.float16).view(np.uint16).astype(np.uint32)
    if codec == bf16:
        bits = x.view(np.uint32)
        return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ratio = (x / np.asarray(scale, dtype=np.float32)).astype(np.float32)
    if codec == e4m3:
        return _float8_codes(ratio, codec.maximum, mantissa=3, bias=7)
    if codec == e5m2:
        return _float8_codes(ratio, codec.maximum, mantissa=2, bias=15)
    if codec == int8:
        return np.rint(np.clip(ratio, -codec.maximum, codec.maximum)).astype(np.int8).view(np.uint8).astype(np.uint32)
    raise ValueError(f"codec {codec} stores groups, not single values; use encode_group")


def decode_plain(codec: Codec, codes: Codes, scale: Floats | float = 1.0) -> NDArray[np.float32]:
    """Inverse of `encode_plain`."""
    if codec == f16:
        return codes.astype(np.uint16).view(np.float16).astype(np.float32)
    if codec == bf16:
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    scale = np.asarray(scale, dtype=np.float32)
    if codec == e4m3:
        # e4m3 without its infinities is fp16 with 3 mantissa bits and an exponent bias smaller by 8.
        half = ((codes & np.uint32(0x80)) << np.uint32(8)) | ((codes & np.uint32(0x7F)) << np.uint32(7))
        return half.astype(np.uint16).view(np.float16).astype(np.float32) * np.float32(256.0) * scale
    if codec == e5m2:  # the upper byte of an fp16
        return (codes << np.uint32(8)).astype(np.uint16).view(np.float16).astype(np.float32) * scale
    if codec == int8:
        return codes.astype(np.uint8).view(np.int8).astype(np.float32) * scale
    raise ValueError(f"codec {codec} stores groups, not single values; use decode_group")


def _float8_codes(x: NDArray[np.float32], maximum: float, *, mantissa: int, bias: int) -> Codes:
    """Codes of a sign bit, 7 - mantissa bits of exponent with the given bias, and the mantissa."""
    magnitude = np.minimum(np.abs(x), np.float32(maximum))
    bits = magnitude.view(np.uint32)
    dropped = np.uint32(23 - mantissa)
    half = np.uint32((1 << (22 - mantissa)) - 1) + ((bits >> dropped) & np.uint32(1))  # a tie goes up from odd only
    normal = ((bits + half) >> dropped) - np.uint32((127 - bias) << mantissa)
    subnormal = np.rint(magnitude * np.float32(2.0 ** (bias - 1 + mantissa))).astype(np.uint32)
    codes = np.where(magnitude < np.float32(2.0 ** (1 - bias)), subnormal, normal)
    signed: Codes = codes | ((x.view(np.uint32) >> np.uint32(31)) << np.uint32(7))
    return signed


def encode_group(codec: Codec, x: Floats) -> tuple[Codes, Words]:
    """Encode groups that lie along the last axis: ``[..., n]`` to codes ``[..., n]`` and parameter words ``[...]``.

    A parameter word holds the fp16 scale in its low half and the fp16 minimum in its high half.
    """
    if not codec.grouped:
        raise ValueError(f"codec {codec} has no groups; use encode_plain")
    x = np.asarray(x, dtype=np.float32)
    low = x.min(axis=-1)
    span = x.max(axis=-1) - low
    if codec.cut:
        # A quotient: a compiler may fuse a product with the sum that takes it, and then rounds once, not twice.
        margin = span / np.float32(codec.cut)
        low, span = low + margin, span - 2 * margin
    scale = np.minimum(span / np.float32(codec.levels), np.float32(F16_MAX)).astype(np.float16)
    minimum = np.clip(low, -F16_MAX, F16_MAX).astype(np.float16)
    step = scale.astype(np.float32)[..., None]
    distance = x - minimum.astype(np.float32)[..., None]
    ratio = np.divide(distance, step, out=np.zeros_like(x), where=step > 0)
    codes = np.rint(np.clip(ratio, 0, codec.levels)).astype(np.uint32)
    params = scale.view(np.uint16).astype(np.uint32) | (minimum.view(np.uint16).astype(np.uint32) << np.uint32(16))
    return codes, params.view(np.int32)


def decode_group(codec: Codec, codes: Codes, params: Words) -> NDArray[np.float32]:
    """Inverse of `encode_group`."""
    scale, minimum = split_params(params)
    values: NDArray[np.float32] = codes.astype(np.float32) * scale[..., None] + minimum[..., None]
    return values


def split_params(params: Words) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Parameter words to (scale, minimum), both float32 of the same shape."""
    bits = params.view(np.uint32)
    scale = (bits & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
    minimum = (bits >> np.uint32(16)).astype(np.uint16).view(np.float16).astype(np.float32)
    return scale, minimum


def round_to(codec: Codec, x: Floats) -> NDArray[np.float32]:
    """x as it reads back from a plain codec with scale 1: the rounding to model precision."""
    return decode_plain(codec, encode_plain(codec, x))
