"""The record's drawing, checked word by word where a kernel would go wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvattention import CODECS, GROUP_SIZES, LayerSpec, RecordLayout, arena_words

PAIRS = [*((name, name) for name in CODECS), ("int4", "int2"), ("int2c", "int2")]
LARGEST_ERROR = {"f16": 2e-3, "bf16": 0.02, "e4m3": 0.3, "e5m2": 0.6, "int8": 0.03, "int4": 0.35} | dict.fromkeys(
    ("int2", "int2c"), 1.5
)
"""Of a few thousand normal values."""
SHAPES = list(itertools.product((1, 3), (16, 64, 80, 96, 128, 256), GROUP_SIZES))


def _layout(k: str, v: str, kv_heads: int = 2, head_dim: int = 64, group_size: int = 32) -> RecordLayout:
    return RecordLayout(CODECS[k], CODECS[v], kv_heads, head_dim, group_size)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_part_is_a_multiple_of_64_bytes(pair: tuple[str, str]) -> None:
    for shape in SHAPES:
        layout = _layout(*pair, *shape)
        for offset in (layout.k_codes, layout.k_params, layout.v_codes, layout.v_params, layout.words):
            assert offset % 16 == 0


def test_sizes_by_hand() -> None:
    # 2 heads x 64 channels x 32 tokens: 4096 values each of K and V.
    assert _layout("f16", "f16").bytes == 2 * 4096 * 2
    for name in ("e4m3", "e5m2", "int8"):
        assert _layout(name, name).bytes == 2 * 4096
    kivi2 = _layout("int2", "int2")
    assert kivi2.bytes == 2 * (4096 // 4 + 4096 // 32 * 4)  # codes, and 4 bytes for every 32 values
    assert kivi2.bits_per_value == 3.0
    assert _layout("int4", "int2").bits_per_value == 4.0
    # head_dim 80 has three V groups a token, the last of 16 channels.
    assert _layout("int2", "int2", head_dim=80).v_params_shape == (2, 32, 3)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("shape", [(3, 80, 32), (2, 64, 128), (1, 16, 64)], ids=str)
def test_encode_then_decode(pair: tuple[str, str], shape: tuple[int, int, int]) -> None:
    layout = _layout(*pair, *shape)
    heads, channels, group = shape
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, heads, group, channels)).astype(np.float32)
    scales = [rng.uniform(0.04, 0.06, shape).astype(np.float32) for shape in ((heads, channels), heads)]
    record = np.full(layout.words, 0x7FFF7FFF, np.int32)
    layout.encode(k, v, record, *scales)
    again_k, again_v = layout.decode(record, *scales)
    for codec, x, again in ((layout.k, k, again_k), (layout.v, v, again_v)):
        error = np.abs(x - again).max()
        assert 0 < error < LARGEST_ERROR[codec.name]


def test_words_lie_where_the_drawing_says() -> None:
    layout = _layout("int2", "int2")
    k = np.zeros((2, 32, 64), np.float32)
    v = np.zeros((2, 32, 64), np.float32)
    k[1, 17, 5] = 3.0  # head 1, token 17, channel 5: second word of its channel, code 1 of the word
    v[1, 17, 37] = 3.0  # token 17, channel 37: word 2 of the token (channels 32-47), code 5; second group
    record = np.zeros(layout.words, np.int32)
    layout.encode(k, v, record, np.ones((2, 64), np.float32), np.ones(2, np.float32))
    k_codes, k_params, v_codes, v_params = layout.parts(record)
    assert np.argwhere(k_codes).tolist() == [[1, 5, 1]]
    assert k_codes[1, 5, 1] == 3 << 2
    assert np.argwhere(k_params).tolist() == [[1, 5]]
    assert k_params[1, 5] == 0x3C00  # scale 1, minimum 0
    assert np.argwhere(v_codes).tolist() == [[1, 17, 2]]
    assert v_codes[1, 17, 2] == 3 << 10
    assert np.argwhere(v_params).tolist() == [[1, 17, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"group_size": 48}, "group_size 48"), ({"head_dim": 72}, "head_dim 72"), ({"kv_heads": 0}, "kv_heads 0")],
    ids=str,
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _layout("int2", "int2", **change)


def test_impossible_layers_are_refused() -> None:
    hot, cold = _layout("f16", "f16"), _layout("int2", "int2")
    with pytest.raises(ValueError, match="hot record int2/int2"):
        LayerSpec(hot=cold, cold=cold)
    with pytest.raises(ValueError, match="differ in shape"):
        LayerSpec(hot=hot, cold=_layout("int2", "int2", head_dim=80))
    with pytest.raises(ValueError, match="window 0"):
        LayerSpec(hot=hot, cold=cold, window=0)
    for bad in ([1.0], [0.0, 1.0], [np.nan, 1.0], np.ones((2, 1)), np.ones((2, 64, 1)), np.zeros(())):
        with pytest.raises(ValueError, match="k_scales"):
            LayerSpec(hot=hot, cold=cold, k_scales=np.float32(bad))
    with pytest.raises(ValueError, match="v_scales"):
        LayerSpec(hot=hot, cold=cold, v_scales=np.ones((2, 64), np.float32))
    with pytest.raises(ValueError, match="f16 or bf16 records only"):
        cold.token_views(np.zeros(cold.words, np.int32))


def test_scales_given_in_brief_are_broadcast() -> None:
    hot = _layout("f16", "f16")
    per_channel = np.arange(1, 129, dtype=np.float32).reshape(2, 64)
    for given, k_scales in (
        (np.float32(3), np.full((2, 64), 3)),
        (np.float32([1, 2]), np.repeat([[1], [2]], 64, axis=1)),
        (per_channel, per_channel),
    ):
        layer = LayerSpec(hot=hot, cold=hot, k_scales=given)
        np.testing.assert_array_equal(layer.k_scales, k_scales)
        assert layer.k_scales.dtype == np.float32
        assert layer.k_scales.flags.c_contiguous
        np.testing.assert_array_equal(layer.v_scales, [1, 1])
    assert LayerSpec(hot=hot, cold=hot, v_scales=np.float32(3)).v_scales.tolist() == [3, 3]


def test_arena_is_aligned() -> None:
    arena = arena_words(160)
    assert arena.shape == (160,)
    assert arena.ctypes.data % 64 == 0
