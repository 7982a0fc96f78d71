"""From an engine directory of target `tensorrt` to an executor: what is checked, loaded and allocated, in this order.

the GPU is there, and the engine was built for it, with this TensorRT and this plugin
the KV budget and the plan fit into what is free            before anything is loaded
the plugin is registered, the plan deserialized
with the workspace that TensorRT asks for, all of it fits   before the arena is allocated
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError
from lowkv.gpus import Gpu, visible_gpus
from lowkv.serving.memory import Footprint, check_fits
from lowkv.serving.tensorrt.executor import Session, TensorRTExecutor, buffer_words

if TYPE_CHECKING:
    from pathlib import Path

    from lowkv.engine.directory import EngineDir
    from lowkv.engine.tensorrt.backend import Backend


def open_by_tensorrt(engine: EngineDir, budget: int, device_id: int) -> TensorRTExecutor:
    """The executor of a TensorRT engine on one GPU. Raises `LowkvError` for whatever of the above does not hold."""
    from kvattention.gpu.attention import GpuAttention
    from kvattention.gpu.driver import DriverDevice
    from kvattention.tensorrt import register
    from lowkv.engine.tensorrt.profiles import engine_profiles
    from lowkv.engine.tensorrt.target import KERNELS, PLAN, TensorRTTarget
    from lowkv.kvcache import KVCache

    gpu = find_gpu(visible_gpus(), device_id)
    backend = TensorRTTarget().check_runtime(engine.manifest, gpu.sm)
    device = DriverDevice(engine.path / KERNELS, ordinal=device_id)
    free = device.free_memory()
    check_fits(Footprint(budget, (engine.path / PLAN).stat().st_size, 0), free, str(gpu))
    register(backend.trt, engine.path / KERNELS)
    session = _open_session(backend, engine.path / PLAN, gpu)
    profiles = engine_profiles(engine.recipe, engine.model_config, engine.cache_plan)
    workspace = session.activation_bytes + 4 * sum(buffer_words(profiles, session.candidates))
    check_fits(Footprint(budget, free - device.free_memory(), workspace), free, str(gpu))
    attention = GpuAttention(device, fp8_query=engine.recipe.kv_cache.fp8_query)
    cache = KVCache(engine.cache_plan, budget, attention, engine.scales)
    return TensorRTExecutor(session, cache, device, engine.model_config.heads, profiles)


def find_gpu(gpus: tuple[Gpu, ...], device_id: int) -> Gpu:
    """The GPU of that number. Raises `LowkvError` when there is none."""
    if device_id >= len(gpus):
        raise LowkvError(
            "this engine needs an NVIDIA GPU",
            got=f"GPU {device_id} of {len(gpus)}",
            expected=f"a device id below {len(gpus)}" if gpus else "at least one GPU, and its driver",
            fix="serve it where there is one, or build the recipe with target: cpu",
        )
    return gpus[device_id]


def _open_session(backend: Backend, plan: Path, gpu: Gpu) -> Session:
    trt, messages = backend.trt, backend.messages
    messages.clear()
    runtime = trt.Runtime(messages)
    with plan.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        engine = runtime.deserialize_cuda_engine(mapped)
    if engine is None:
        raise LowkvError(
            f"TensorRT could not load {plan}: {'; '.join(messages.errors) or 'it does not say why'}",
            fix="build the engine again with `lowkv build --force`",
        )
    rtx = backend.flavour == "tensorrt_rtx"
    return Session(
        name=f"{backend} on {gpu}",
        new_context=_rtx_contexts(trt, engine) if rtx else _contexts(trt, engine),
        capturable=(lambda context, stream: bool(context.is_stream_capturable(stream))) if rtx else lambda *_: True,
        activation_bytes=engine.device_memory_size_v2,
        candidates=engine.get_tensor_shape("values")[1],
        errors=lambda: "; ".join(messages.errors),
    )


def _contexts(trt: Any, engine: Any) -> Any:
    """A function that makes contexts without memory of their own."""
    return lambda repeated: engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)


def _rtx_contexts(trt: Any, engine: Any) -> Any:
    """The same for TensorRT for RTX, which compiles kernels for shapes while it runs.

    A step that is repeated is worth waiting for them once, and its graph would keep the slower ones for good; steps of
    ever new shapes are not worth compiling for. What has been compiled is shared by all contexts.
    """
    strategies = trt.DynamicShapesKernelSpecializationStrategy
    configs = {}
    cache = None
    for repeated, strategy in ((True, strategies.EAGER), (False, strategies.NONE)):
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.dynamic_shapes_kernel_specialization_strategy = strategy
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # the executor captures, and knows when
        cache = cache or config.create_runtime_cache()
        config.set_runtime_cache(cache)
        configs[repeated] = config
    return lambda repeated: engine.create_execution_context(configs[repeated])
