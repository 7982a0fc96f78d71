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
    requires = {"flavour": "tensorrt_rtx", "tensorrt": "0.1", "sm": "80", "plugin": "1", "tensorrt_layout": "2"}
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


def test_tensorrt_has_what_is_called_without_a_gpu_to_call_it_on() -> None:
    """The stand-ins of test_executor.py answer to names; these are the real ones."""
    from kvattention.tensorrt.libraries import import_tensorrt, installed

    if "tensorrt_rtx" not in installed():
        pytest.skip("tensorrt_rtx is not installed")
    trt = import_tensorrt("tensorrt_rtx")
    context = ("set_device_memory", "set_optimization_profile_async", "set_input_shape", "set_tensor_address")
    called = {
        trt.IExecutionContext: (*context, "execute_async_v3", "is_stream_capturable"),
        trt.ICudaEngine: (
            *("create_execution_context", "create_runtime_config", "device_memory_size_v2", "get_tensor_shape"),
        ),
        trt.IRuntimeConfig: (
            *("set_execution_context_allocation_strategy", "dynamic_shapes_kernel_specialization_strategy"),
            *("cuda_graph_strategy", "create_runtime_cache", "set_runtime_cache"),
        ),
        trt.Runtime: ("deserialize_cuda_engine",),
        trt.ExecutionContextAllocationStrategy: ("USER_MANAGED",),
        trt.DynamicShapesKernelSpecializationStrategy: ("EAGER", "NONE"),
        trt.CudaGraphStrategy: ("DISABLED",),
    }
    missing = [f"{kind.__name__}.{name}" for kind, names in called.items() for name in names if not hasattr(kind, name)]
    assert not missing
