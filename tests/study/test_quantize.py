"""Quantized and read back: as the codecs' reference does it, and KIVI's reason for two axes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from kvattention import LayerSpec, RecordLayout
from kvattention.codec import f16, round_to
from kvattention.reference import as_stored
from lowkv.kvcache import FORMATS
from lowkv.study.configurations import Axis, Side, of_format
from lowkv.study.quantize import round_trip

HEADS = 2
QUANTIZED = [row for row in FORMATS.values() if not row.model_precision]


def values(tokens: int, size: int, seed: int = 0) -> NDArray[np.float32]:
    drawn = np.random.default_rng(seed).normal(size=(tokens, HEADS, size)).astype(np.float32)
    return round_to(f16, drawn)


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row.name)
@pytest.mark.parametrize(("group", "size"), [(32, 64), (64, 48), (128, 32)])
def test_what_formats_serve_is_the_reference_bit_for_bit(row: object, group: int, size: int) -> None:
    assert row in QUANTIZED
    chosen = of_format(row.name)  # type: ignore[attr-defined]
    k, v = values(256, size), values(256, size, seed=1)
    k_scales = np.random.default_rng(2).lognormal(size=(HEADS, size)).astype(np.float32)
    v_scales = np.random.default_rng(3).lognormal(size=HEADS).astype(np.float32)
    layouts = (RecordLayout(a, b, HEADS, size, group) for a, b in ((f16, f16), (chosen.k.kind, chosen.v.kind)))
    layer = LayerSpec(*layouts, k_scales=k_scales, v_scales=v_scales)
    wanted_k, wanted_v = as_stored(layer, k, v, range(256 // group))
    np.testing.assert_array_equal(round_trip(chosen.k, k, group, k_scales), wanted_k)
    np.testing.assert_array_equal(round_trip(chosen.v, v, group, v_scales[:, None]), wanted_v)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_the_axes_are_each_others_transpose(axis: Axis) -> None:
    """32 tokens of 32 channels: groups along one axis of x are groups along the other of its transpose."""
    x = values(32, 32)
    turned = np.ascontiguousarray(x.transpose(2, 1, 0))
    other: Axis = "token" if axis == "channel" else "channel"
    found = round_trip(Side("int2", other), turned, 32).transpose(2, 1, 0)
    np.testing.assert_array_equal(round_trip(Side("int2", axis), x, 32), found)
    assert not np.array_equal(found, round_trip(Side("int2", other), x, 32))


def error(axis: Axis, x: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(round_trip(Side("int2", axis), x, 32)[..., 1:] - x[..., 1:]))


def test_an_outlier_channel_ruins_its_neighbours_per_token_only() -> None:
    plain = values(256, 64)
    assert error("token", plain) == pytest.approx(error("channel", plain), rel=0.05)
    outlier = plain.copy()
    outlier[..., 0] *= 20
    assert error("channel", outlier) == error("channel", plain)
    assert error("token", outlier) > 2 * error("channel", outlier)
