"""Whether an engine fits on its device, in numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowkv.errors import LowkvError
from lowkv.models.config import ModelConfig
from lowkv.recipe import ServingConfig
from lowkv.serving.memory import TORCH_RESERVE, Footprint, check_fits, torch_workspace


def test_what_fits_to_the_byte_is_accepted() -> None:
    check_fits(Footprint(60, 30, 10), 100, "GPU 0")


def test_what_does_not_is_refused_with_both_numbers_and_what_would() -> None:
    with pytest.raises(LowkvError) as caught:
        check_fits(Footprint(61, 30, 10), 100, "GPU 0: NVIDIA L4")
    assert str(caught.value) == (
        "the engine and its KV cache do not fit into the free memory of GPU 0: NVIDIA L4: got 'kv_cache.budget 61 + "
        "weights 30 + workspace 10 = 101 bytes', expected at most 100 bytes, which are free; lower kv_cache.budget to "
        "60 bytes or less, or free the device's memory"
    )
    with pytest.raises(LowkvError, match="without any KV cache"):
        check_fits(Footprint(1, 90, 10), 100, "GPU 0")


def test_the_workspace_grows_with_what_a_step_may_hold(tiny_checkpoint: Path) -> None:
    from lowkv.models.checkpoint import open_checkpoint

    config: ModelConfig = open_checkpoint(tiny_checkpoint).config
    small = ServingConfig(max_sequences=4, max_tokens_per_step=8)
    base = torch_workspace(config, small)
    assert base > TORCH_RESERVE
    tokens = torch_workspace(config, replace(small, max_tokens_per_step=16))
    assert tokens - base == 2 * 8 * (3 * 64 + 3 * (64 + 2 * 32) + 5 * 128)
    assert torch_workspace(config, small, quantized=True) - base == 5 * 64 * 2 * 128
    rows = torch_workspace(config, replace(small, max_sequences=8))
    assert rows - base == 4 * 4 * (3 * 257 + 64)
