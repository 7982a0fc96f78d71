"""The Torch executor: which one is opened, what it copies, and that the GPU's path gives what the CPU's gives."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lowkv.engine.directory import EngineDir
from lowkv.errors import LowkvError
from lowkv.recipe import WeightsConfig
from lowkv.serving.executor import open_executor
from lowkv.serving.torch_executor import CopiedMemory, SameMemory

Build = Callable[..., Path]
HALF = WeightsConfig(dtype="float16")


def test_the_choice_is_logged_once(build_tiny: Build, caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineDir.open(build_tiny())
    with caplog.at_level(logging.INFO, "lowkv"):
        executor = open_executor(engine, budget=2**20, threads=1)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"executor: Torch {torch.__version__} in float32 on cpu; attention: cpu; KV cache: kivi2 x2")
    assert said.endswith(" KiB")
    assert executor.cache.arena.budget == 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_an_engine_for_cuda_is_refused_without_a_gpu(build_tiny: Build) -> None:
    engine = EngineDir.open(build_tiny(target="cuda", weights=HALF))
    with pytest.raises(LowkvError, match=r"needs an NVIDIA GPU.*got 'GPU 0 of 0 \(PyTorch .*target: cpu"):
        open_executor(engine)


def test_copies_through_a_buffer_are_the_arrays_and_candidates() -> None:
    link = CopiedMemory(torch.device("cpu"))
    generator = np.random.default_rng(0)
    for sizes in ((1, 1, 1), (3000, 3000, 7), (5, 5, 2)):
        arrays = [generator.integers(0, 1000, size) for size in sizes]
        uploaded = link.upload(*arrays)
        for array, tensor in zip(arrays, uploaded, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        link.upload(np.zeros(4000, np.int64))  # the buffer is used again; what was uploaded is not it
        for array, tensor in zip(arrays, uploaded, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_candidates_come_in_one_copy_and_are_ones_own() -> None:
    link = CopiedMemory(torch.device("cpu"))
    values, ids = torch.randn(9, 257)[:, :256], torch.arange(9 * 256, dtype=torch.int32).view(9, 256)
    lse = torch.randn(9)
    found, plain = link.download(values.contiguous(), ids, lse), SameMemory().download(values, ids, lse)
    assert link.copies == 1
    link.download(torch.zeros(9, 256), torch.zeros(9, 256, dtype=torch.int32), torch.zeros(9))
    for name in ("values", "ids", "lse"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name))
        assert getattr(found, name).dtype == getattr(plain, name).dtype


def test_interpreted_gpu_kernels_choose_the_cpus_tokens() -> None:
    """And with an FP16 cache others are chosen, so that this says something of the cache.

    Log-probabilities differ by FP16's rounding, which may also tip a value from one 2-bit code to the next.
    """
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("interpreted.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"]["gpu"] == found["tokens"]["cpu"]
    assert found["tokens"]["fp16"] != found["tokens"]["cpu"]
    assert found["gpu"] < 0.15 * found["format"]
