"""Bytes with units: GB and GiB stay apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowkv.errors import LowkvError
from lowkv.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (123, 123),
        ("64MiB", 64 * 2**20),
        ("64 MB", 64 * 10**6),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("80gb", 80 * 10**9),
        ("2TiB", 2 * 2**40),
        ("512 KiB", 2**19),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["64", "64M", "64G", "-1GB", "GB", "", "1e9B", "1,5GB", -5, True, None, 1.5])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(LowkvError, match="expected a whole number of bytes, or"):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "decimal", "text"),
    [
        (0, False, "0 B"),
        (1023, False, "1023 B"),
        (2**20, False, "1 MiB"),
        (1536 * 2**20, False, "1.5 GiB"),
        (80 * 10**9, True, "80 GB"),
        (80 * 10**9, False, "74.5 GiB"),
        (16_060_522_496, True, "16.1 GB"),
    ],
)
def test_sizes_are_written(size: int, decimal: bool, text: str) -> None:
    assert format_bytes(size, decimal=decimal) == text


@given(st.integers(0, 2**50), st.booleans())
def test_what_is_written_is_read_back_to_its_digits(size: int, decimal: bool) -> None:
    assert parse_bytes(format_bytes(size, decimal=decimal)) == pytest.approx(size, rel=0.01)
