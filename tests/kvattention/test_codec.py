"""Values to bits and back: against Torch's own number formats, by hand, and by property."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvattention.codec import (
    CODECS,
    Codec,
    decode_group,
    decode_plain,
    encode_group,
    encode_plain,
    pack,
    round_to,
    split_params,
    unpack,
)

GROUPED = [codec for codec in CODECS.values() if codec.grouped]
PLAIN = [codec for codec in CODECS.values() if not codec.grouped]
SCALED = [codec for codec in CODECS.values() if codec.scaled]

TORCH_TYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
ERRORS = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17), "int8": (0.0, 0.5)}
"""Of scaled codecs: relative, or absolute and in scales where that is more."""


def _floats(width: int, limit: float) -> st.SearchStrategy[np.ndarray]:
    values = st.floats(-limit, limit, width=width, allow_nan=False)
    return arrays(np.float32, 32, elements=values)


def _sample() -> np.ndarray:
    """Every exponent and sign, mantissas at and beside the rounding borders of all formats."""
    rng = np.random.default_rng(0)
    exponents = np.repeat(np.arange(100, 142, dtype=np.uint32), 2048) << np.uint32(23)
    mantissas = rng.integers(0, 1 << 23, exponents.size, dtype=np.uint32)
    mantissas[::4] &= np.uint32(0xFFFF << 7)  # exact in few bits, or exactly half-way
    signs = rng.integers(0, 2, exponents.size, dtype=np.uint32) << np.uint32(31)
    return (exponents | mantissas | signs).view(np.float32)


def _in_torch(codec: Codec, x: np.ndarray) -> torch.Tensor:
    """x in Torch's type of the codec; its casts to integers truncate, those to floats may overflow."""
    within = torch.from_numpy(np.clip(x, -codec.maximum, codec.maximum))
    return (within.round() if codec.name == "int8" else within).to(TORCH_TYPES[codec.name])


@pytest.mark.parametrize("codec", PLAIN, ids=str)
def test_plain_codecs_round_as_torch_does(codec: Codec) -> None:
    x = _sample()
    expected = _in_torch(codec, x).float().numpy()
    np.testing.assert_array_equal(decode_plain(codec, encode_plain(codec, x)), expected)


@pytest.mark.parametrize("codec", PLAIN, ids=str)
def test_plain_codes_are_the_formats_own_bits(codec: Codec) -> None:
    x = _sample()
    view = torch.int8 if codec.bits == 8 else torch.int16
    bits = _in_torch(codec, x).view(view).numpy()
    np.testing.assert_array_equal(encode_plain(codec, x), bits.view(f"u{codec.bits // 8}"))


@pytest.mark.parametrize("codec", SCALED, ids=str)
def test_the_scale_is_the_dequantization_multiplier(codec: Codec) -> None:
    assert decode_plain(codec, encode_plain(codec, np.float32([3.0]), 0.5), 0.5) == 3.0
    assert decode_plain(codec, encode_plain(codec, np.float32([1e6]), 2.0), 2.0) == 2 * codec.maximum  # saturated


@pytest.mark.parametrize("codec", SCALED, ids=str)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(x=_floats(32, 2.0**100), scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_errors_of_scaled_codecs_are_bounded(codec: Codec, x: np.ndarray, scale: float) -> None:
    x.sort()
    decoded = decode_plain(codec, encode_plain(codec, x, scale), scale)
    within = np.clip(x, -codec.maximum * scale, codec.maximum * scale)
    relative, absolute = ERRORS[codec.name]
    assert (np.abs(decoded - within) <= np.maximum(relative * np.abs(within), absolute * scale) * (1 + 1e-5)).all()
    assert (np.diff(decoded) >= 0).all()


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_first_code_lies_lowest_in_its_word(bits: int) -> None:
    codes = np.zeros(64, np.uint32)
    codes[1] = 1
    words = pack(codes, bits)
    assert words[0] == 1 << bits
    assert not words[1:].any()
    random = np.random.default_rng(0).integers(0, 1 << bits, (3, 64)).astype(np.uint32)
    np.testing.assert_array_equal(unpack(pack(random, bits), bits), random)


def test_pack_refuses_a_partial_word() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        pack(np.zeros(8, np.uint32), 2)


def test_a_group_by_hand() -> None:
    codes, params = encode_group(CODECS["int2"], np.float32([-1.0, 0.0, 1.0, 2.0, 0.4, 0.6]))
    assert codes.tolist() == [0, 1, 2, 3, 1, 2]  # min -1, scale 1; 0.4 and 0.6 round to 0 and 1
    assert int(params.view(np.uint32)) == (0xBC00 << 16) | 0x3C00  # fp16 -1 above fp16 1


@pytest.mark.parametrize("codec", GROUPED, ids=str)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_group_error_is_bounded_by_half_a_step(codec: Codec, data: st.DataObject) -> None:
    x = np.sort(round_to(CODECS["f16"], data.draw(_floats(16, 65504.0))))
    codes, params = encode_group(codec, x)
    scale, minimum = split_params(params)
    decoded = decode_group(codec, codes, params)
    assert codes.max() <= codec.levels
    assert (np.diff(decoded) >= 0).all()
    margin = (x[-1] - x[0]) * (1 - codec.clip) / 2
    within = np.clip(x, x[0] + margin, x[-1] - margin)  # values outside take the nearest end
    # The fp16 scale may be off by half its last digit, which the top code multiplies by `levels`; the smallest value
    # is one in fp16 already, but not where the range is narrowed.
    slack = codec.levels * max(float(scale) * 2**-11, 2**-25)
    if codec.cut:
        slack += max(abs(float(minimum)) * 2**-11, 2**-25)
    else:
        assert minimum == x.min()
    assert np.abs(within - decoded).max() <= float(scale) / 2 + slack + 1e-6 * np.abs(x).max()


def test_a_narrowed_group_by_hand() -> None:
    """A range of 20 loses 2 at either end: codes stand for -8, -8 + 16 / 3, ... 8."""
    codes, params = encode_group(CODECS["int2c"], np.float32([-10.0, -9.0, -8.0, -5.0, 0.1, 5.4, 7.0, 10.0]))
    assert codes.tolist() == [0, 0, 0, 1, 2, 3, 3, 3]
    scale, minimum = split_params(params)
    assert (float(scale), float(minimum)) == (np.float16(16 / 3), -8.0)
    np.testing.assert_array_equal(
        decode_group(CODECS["int2c"], codes, params), decode_group(CODECS["int2"], codes, params)
    )
    assert CODECS["int2c"].reader == CODECS["int2"]


@pytest.mark.parametrize("codec", GROUPED, ids=str)
@pytest.mark.parametrize("value", [0.0, 1.5, -3.0, 65504.0, -65504.0, 2.0**-24])
def test_a_constant_group_decodes_to_itself(codec: Codec, value: float) -> None:
    x = np.full((2, 32), value, np.float32)
    np.testing.assert_array_equal(decode_group(codec, *encode_group(codec, x)), x)


@pytest.mark.parametrize("codec", GROUPED, ids=str)
def test_the_widest_group_stays_finite(codec: Codec) -> None:
    x = np.where(np.arange(32) % 2, 65504.0, -65504.0).astype(np.float32)
    decoded = decode_group(codec, *encode_group(codec, x))
    np.testing.assert_allclose(decoded, x * codec.clip, rtol=1e-3)


@pytest.mark.parametrize("codec", GROUPED, ids=str)
def test_an_outlier_channel_does_not_touch_the_others(codec: Codec) -> None:
    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    spread = x.copy()
    spread[3] *= 100
    ours, theirs = (decode_group(codec, *encode_group(codec, y)) for y in (x, spread))
    np.testing.assert_array_equal(np.delete(ours, 3, 0), np.delete(theirs, 3, 0))


def test_f16_saturates_instead_of_overflowing() -> None:
    x = np.float32([1e6, -1e6, 65519.0])
    assert round_to(CODECS["f16"], x).tolist() == [65504.0, -65504.0, 65504.0]


def test_wrong_kind_of_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="encode_group"):
        encode_plain(CODECS["int2"], np.zeros(32, np.float32))
    with pytest.raises(ValueError, match="encode_plain"):
        encode_group(CODECS["f16"], np.zeros(32, np.float32))
