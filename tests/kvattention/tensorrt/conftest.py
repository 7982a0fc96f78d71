"""The TensorRT that is installed, and the module that makes small engines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvattention.tensorrt import register
from kvattention.tensorrt.libraries import import_tensorrt


@pytest.fixture(scope="session")
def trt() -> ModuleType:
    """tensorrt_rtx, which builds engines without a GPU, with the plugin registered for building."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx is not installed")
    module = import_tensorrt("tensorrt_rtx")
    register(module, None)
    return module


@pytest.fixture(scope="session")
def small_engine() -> ModuleType:
    pytest.importorskip("onnx")
    path = Path(__file__).parent / "small_engine.py"
    spec = importlib.util.spec_from_file_location("small_engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["small_engine"] = module
    spec.loader.exec_module(module)
    return module
