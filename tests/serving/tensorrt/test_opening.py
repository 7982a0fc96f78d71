"""What is refused before a TensorRT engine is loaded. (Loading it needs a GPU.)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lowkv.engine.directory import EngineDir
from lowkv.errors import LowkvError
from lowkv.gpus import Gpu
from lowkv.recipe import WeightsConfig
from lowkv.serving.executor import open_executor

L4 = Gpu(0, "NVIDIA L4", 89, 24 * 10**9)


@pytest.fixture
def engine(build_tiny: Callable[..., Path]) -> EngineDir:
    """As far as opening looks before it loads: the manifest of an engine for SM80."""
    opened = EngineDir.open(build_tiny(target="cuda", weights=WeightsConfig(dtype="float16")))
    requires = {"flavour": "tensorrt_rtx", "tensorrt": "0.1", "sm": "80", "plugin": "1", "tensorrt_layout": "1"}
    opened.manifest = replace(opened.manifest, target="tensorrt", requires=requires)
    return opened


def test_no_gpu(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowkv.serving.tensorrt.opening.visible_gpus", tuple)
    with pytest.raises(LowkvError, match=r"needs an NVIDIA GPU: got 'GPU 0 of 0', expected at least one GPU"):
        open_executor(engine)


def test_not_that_many_gpus(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowkv.serving.tensorrt.opening.visible_gpus", lambda: (L4,))
    with pytest.raises(LowkvError, match=r"got 'GPU 3 of 1', expected a device id below 1"):
        open_executor(engine, device_id=3)


def test_another_gpu_generation(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowkv.serving.tensorrt.opening.visible_gpus", lambda: (L4,))
    with pytest.raises(LowkvError, match=r"another GPU generation: got 'SM89', expected SM80"):
        open_executor(engine)
