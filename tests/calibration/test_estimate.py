"""Estimators against the definitions: the largest, the quantile, and a search over scales on the values themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvattention import CODECS
from kvattention.codec import decode_plain, encode_plain
from lowkv.calibration.estimate import k_scales, v_scales
from lowkv.calibration.probe import BINS, Magnitudes, _binned

SCALED = sorted(name for name, codec in CODECS.items() if codec.scaled)


def magnitudes(x: NDArray[np.float32], columns: int | None = None) -> Magnitudes:
    """Of [T, H, D]."""
    tensor = torch.from_numpy(np.abs(x))
    counts = _binned(tensor, columns or x.shape[2]).numpy().astype(np.int64)
    return Magnitudes(np.abs(x).max(axis=0), counts)


@pytest.fixture(scope="module")
def values() -> NDArray[np.float32]:
    """[T, Hkv, D] with heavy tails, another size in every head and channel."""
    generator = np.random.default_rng(0)
    x = generator.standard_t(5, (4000, 2, 16)) * generator.lognormal(size=(2, 16)) * np.array([1.0, 5.0])[:, None]
    return x.astype(np.float32)


def error(x: NDArray[Any], codec: Any, scale: float) -> float:
    return float(((decode_plain(codec, encode_plain(codec, x / scale)) * scale - x) ** 2).mean())


@pytest.mark.parametrize("name", SCALED)
def test_the_largest_magnitude_becomes_the_codecs_largest_value(values: NDArray[np.float32], name: str) -> None:
    codec, seen = CODECS[name], magnitudes(values)
    for granularity, axes in (("tensor", (0, 1, 2)), ("head", (0, 2)), ("channel", (0,))):
        top = np.abs(values).max(axis=axes, keepdims=True)[0]
        scales = k_scales(seen, codec, granularity, "amax")
        assert scales.dtype == np.float32
        np.testing.assert_array_equal(scales, np.broadcast_to(top / np.float64(codec.maximum), (2, 16)).astype("f4"))
        codes = decode_plain(codec, encode_plain(codec, values, scales), scales)
        assert np.abs(codes).max() == pytest.approx(np.abs(values).max(), rel=1e-6)  # nothing saturates
    per_head = v_scales(magnitudes(values, 1), codec, "channel", "amax")
    assert per_head.shape == (2,)
    np.testing.assert_array_equal(per_head, v_scales(magnitudes(values, 1), codec, "head", "amax"))


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_the_percentile_is_the_quantile(values: NDArray[np.float32], granularity: str) -> None:
    codec = CODECS["e4m3"]
    scales = k_scales(magnitudes(values), codec, granularity, "percentile") * codec.maximum
    for head in range(2):
        x = np.abs(values if granularity == "tensor" else values[:, head])
        assert scales[head, 0] == pytest.approx(np.quantile(x, 0.9999), rel=0.03)
        assert scales[head, 0] < x.max()
    np.testing.assert_array_equal(scales, np.repeat(scales[:, :1], 16, axis=1))


@pytest.mark.parametrize("name", SCALED)
def test_mse_loses_hardly_more_than_the_best_of_all_scales(values: NDArray[np.float32], name: str) -> None:
    codec = CODECS[name]
    scales = k_scales(magnitudes(values), codec, "head", "mse")
    for head in range(2):
        x = values[:, head].astype(np.float64).ravel()
        tried = np.abs(x).max() / codec.maximum * np.exp2(np.linspace(-3, 1, 97))
        best = min(error(x, codec, scale) for scale in tried)
        assert error(x, codec, float(scales[head, 0])) <= best * 1.03
    amax = np.abs(values).max(axis=(0, 2)) / codec.maximum
    if name == "int8":
        assert np.all(scales[:, 0] < 0.9 * amax)  # a few values saturate, all others gain


def test_mse_for_int8_beats_the_largest_magnitude(values: NDArray[np.float32]) -> None:
    codec, seen = CODECS["int8"], magnitudes(values)
    for granularity, gain in (("tensor", 0.9), ("head", 0.9), ("channel", 0.995)):
        errors = []
        for estimator in ("amax", "mse"):
            scales = k_scales(seen, codec, granularity, estimator)
            errors.append(((decode_plain(codec, encode_plain(codec, values, scales), scales) - values) ** 2).mean())
        assert errors[1] < gain * errors[0], granularity


@pytest.mark.parametrize("estimator", ["amax", "percentile", "mse"])
def test_channels_of_zeros_take_their_heads_scale(values: NDArray[np.float32], estimator: str) -> None:
    codec = CODECS["e4m3"]
    x = values.copy()
    x[:, 0, [2, 5]] = 0
    x[:, 1] = 0
    scales = k_scales(magnitudes(x), codec, "channel", estimator)
    head = k_scales(magnitudes(x), codec, "head", estimator)
    tensor = k_scales(magnitudes(x), codec, "tensor", estimator)
    np.testing.assert_array_equal(scales[0, [2, 5]], head[0, [2, 5]])
    np.testing.assert_array_equal(scales[1], tensor[1])
    np.testing.assert_array_equal(head[1], tensor[1])
    assert np.all(scales[0, [0, 1, 3, 4]] != head[0, 0])
    assert v_scales(magnitudes(x, 1), codec, "head", estimator)[1] == tensor[0, 0]


@pytest.mark.parametrize("estimator", ["amax", "percentile", "mse"])
@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
@pytest.mark.parametrize("size", [0.0, 2.0**-140, 2.0**-30, 2.0**30])
def test_scales_are_positive_whatever_was_seen(estimator: str, granularity: str, size: float) -> None:
    x = np.full((10, 2, 16), size, np.float32)
    scales = k_scales(magnitudes(x), CODECS["e4m3"], granularity, estimator)
    assert np.all(np.isfinite(scales) & (scales > 0))
    if size < 2.0**-100:
        assert np.all(scales == 1.0)


def test_a_histogram_is_asked_for_where_one_is_needed() -> None:
    seen = Magnitudes(np.ones((2, 16), np.float32), None)
    assert np.all(k_scales(seen, CODECS["e4m3"], "head", "amax") == np.float32(1 / 448))
    with pytest.raises(AssertionError, match="mse needs histograms"):
        k_scales(seen, CODECS["e4m3"], "head", "mse")
    assert BINS % 32 == 0
