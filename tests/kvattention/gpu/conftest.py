"""Where the kernels run: on the machine's GPU, else interpreted.

A process either compiles Triton's kernels or interprets them. Triton decides that for each function when it decorates
it, its own library included, so the variable must be set before anything imports Triton, and holds for the process.
Tests that compile do so in subprocesses without it.

What is compared, and how closely: `kvattention.gpu.goldens`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvattention.gpu import goldens
from kvattention.gpu.attention import GpuAttention

GPU = shutil.which("nvidia-smi") is not None

if not GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before these tests could ask for its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def gpu() -> bool:
    """Whether the kernels run on a GPU; else they are interpreted."""
    return GPU


@pytest.fixture(scope="session")
def new_attention() -> Callable[..., GpuAttention]:
    """new_attention(fp8_query=True, kernels=module): parts of 64 tokens, so that small shapes split."""
    from kvattention.gpu.torch_device import TorchDevice

    def new(fp8_query: bool = False, part_tokens: int = 64, kernels: object = None) -> GpuAttention:
        device = TorchDevice("cuda" if GPU else "cpu")
        if kernels is not None:
            device.kernels = kernels
        return GpuAttention(device, fp8_query=fp8_query, part_tokens=part_tokens)

    return new


@pytest.fixture(scope="session")
def stage() -> SimpleNamespace:
    """play, check and run_layer."""
    return SimpleNamespace(play=goldens.play, check=goldens.check, run_layer=goldens.run_layer)
