"""Statistics of keys and values against what the decoder really passes to attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lowkv.calibration.probe import BINS, LOWEST, PER_OCTAVE, LayerStatistics, Magnitudes, collect
from lowkv.models.checkpoint import decoder_weights, open_checkpoint
from lowkv.models.decoder import Decoder
from lowkv.models.dense import DenseAttention

LENGTH = 1000  # positions served


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint: Path) -> Decoder:
    checkpoint = open_checkpoint(tiny_checkpoint)
    return Decoder(checkpoint.config, dict(decoder_weights(checkpoint, torch.float32, torch.float32)))


@pytest.fixture(scope="module")
def windows() -> list[NDArray[np.int64]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, count) for count in (64, 64, 20)]


@pytest.fixture(scope="module")
def seen(decoder: Decoder, windows: list[NDArray[np.int64]]) -> tuple[LayerStatistics, ...]:
    return collect(decoder, windows, length=LENGTH, skip=2)


def keys_and_values(decoder: Decoder, window: NDArray[np.int64], start: int) -> list[list[NDArray[np.float32]]]:
    """K and V of each layer, [T, Hkv, D]."""
    dense, found = DenseAttention(decoder.config), []
    dense.begin_step([(0, len(window))])

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found.append([k.numpy(), v.numpy()])
        return dense(layer, q, k, v)

    with torch.inference_mode():
        decoder.hidden(torch.from_numpy(window), torch.arange(start, start + len(window)), attention)
    return found


@pytest.fixture(scope="module")
def expected(decoder: Decoder, windows: list[NDArray[np.int64]]) -> list[list[NDArray[np.float32]]]:
    """Magnitudes of all tokens that count: windows start at 0, 468 and 936, and those of 468 and 936 after 2 tokens."""
    runs = [keys_and_values(decoder, window, start) for window, start in zip(windows, (0, 468, 936), strict=True)]
    skips = (0, 2, 2)
    return [
        [
            np.abs(np.concatenate([run[layer][part][skip:] for run, skip in zip(runs, skips, strict=True)]))
            for part in (0, 1)
        ]
        for layer in range(decoder.config.layers)
    ]


def test_maxima_are_those_of_the_decoders_keys_and_values(
    seen: tuple[LayerStatistics, ...], expected: list[list[NDArray[np.float32]]]
) -> None:
    for layer, (k, v) in zip(seen, expected, strict=True):
        np.testing.assert_array_equal(layer.k.amax, k.max(axis=0))
        np.testing.assert_array_equal(layer.v.amax, v.max(axis=0))
        assert layer.k.largest == k.max()


def test_every_value_is_counted_in_the_bin_of_its_magnitude(
    seen: tuple[LayerStatistics, ...], expected: list[list[NDArray[np.float32]]]
) -> None:
    edges = 2.0 ** (np.arange(BINS + 1) / PER_OCTAVE + LOWEST)
    for layer, (k, v) in zip(seen, expected, strict=True):
        assert layer.k.counts is not None
        assert layer.v.counts is not None
        assert layer.k.counts.shape == (2, 16, BINS)
        assert layer.v.counts.shape == (2, 1, BINS)
        for head in range(2):
            for channel in (0, 7, 15):
                counts = np.histogram(k[:, head, channel].astype(np.float64), edges)[0]
                # A value on an edge may be counted on either side of it.
                assert np.abs(counts.cumsum() - layer.k.counts[head, channel].cumsum()).max() <= 1
                assert counts.sum() == layer.k.counts[head, channel].sum() == 62 + 62 + 20
            counts = np.histogram(v[:, head].astype(np.float64), edges)[0]
            assert np.abs(counts.cumsum() - layer.v.counts[head, 0].cumsum()).max() <= 1


def test_windows_are_sequences_of_their_own_and_the_same_every_time(
    decoder: Decoder, windows: list[NDArray[np.int64]], seen: tuple[LayerStatistics, ...]
) -> None:
    done: list[int] = []
    again = collect(decoder, windows, length=LENGTH, skip=2, advance=done.append)
    assert done == [64, 64, 20]
    for first, second in zip(seen, again, strict=True):
        np.testing.assert_array_equal(first.k.amax, second.k.amax)
        np.testing.assert_array_equal(first.k.counts, second.k.counts)
    bare = collect(decoder, windows, length=LENGTH, skip=2, histograms=False)
    assert bare[0].k.counts is None
    np.testing.assert_array_equal(bare[1].v.amax, seen[1].v.amax)


def test_keys_are_seen_at_positions_over_the_whole_range(decoder: Decoder) -> None:
    """One token's key in the first layer is the same everywhere, but for its rotation."""
    windows = [np.full(64, 65)] * 3
    near, far = (collect(decoder, windows, length=length)[0].k.amax for length in (64, LENGTH))
    assert np.all(far >= near)
    slow = [6, 14]  # the last but one of 8 pairs turns 0.001 radians a position
    assert np.all((far[:, slow] > 1.2 * near[:, slow]).any(axis=1))


def test_zeros_and_extremes_fall_into_the_outermost_bins(decoder: Decoder) -> None:
    from lowkv.calibration.probe import _binned

    x = torch.tensor([0.0, 2.0**-40, 2.0**-24, 1.0, 2.0**16, 2.0**40])[:, None, None]
    counts = _binned(x, 1)[0, 0]
    assert counts[[0, -LOWEST * PER_OCTAVE, BINS - 1]].tolist() == [3, 1, 2]
    assert counts.sum() == 6


def test_an_outlier_channel_stands_out() -> None:
    amax = np.ones((2, 8), np.float32)
    assert Magnitudes(amax, None).outlier == 1
    amax[1, 3] = 20
    assert Magnitudes(amax, None).outlier == 20
    assert Magnitudes(np.zeros((1, 8), np.float32), None).outlier == 1
