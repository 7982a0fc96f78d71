"""Enqueueing, with a launcher that records: the launches must be those of `GpuAttention`, for every case.

`GpuAttention` is tested for what it computes; here it runs on a device whose memory is only addresses.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvattention import cases
from kvattention.cases import CASES, Playback, Step
from kvattention.gpu.attention import Arena, GpuAttention
from kvattention.gpu.compile import Cubin, write_cubins, write_index
from kvattention.gpu.driver import ContextLaunchers, DeviceArray, DriverDevice
from kvattention.gpu.launches import Launch, layer_scales
from kvattention.gpu.schedule import make_schedule
from kvattention.gpu.variants import Variant, layer_variants, needed
from kvattention.layout import LayerSpec
from kvattention.tensorrt import INPUTS, PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, PluginFields, register
from kvattention.tensorrt.fields import fields_to_collection

STREAM = 0x5EED


class RecordingDevice:
    """Memory that is only addresses, and the launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.prepared: list[Variant] = []
        self.streams: set[int] = set()
        self._next = 1 << 32

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        self._next += 1 << 24
        return DeviceArray(self._next, tuple(shape), dtype)

    def upload(self, array: np.ndarray[Any, Any]) -> DeviceArray:
        return self.empty(array.shape, str(array.dtype))

    def allocate(self, words: int) -> Arena:
        return Arena(self.empty((words,), "int32"), self.empty((1,), "int64"))

    def launch(self, launch: Launch, stream: int | None = None) -> None:
        self.launches.append(launch)
        if stream is not None:
            self.streams.add(stream)

    def prepare(self, variants: Iterable[Variant]) -> None:
        self.prepared.extend(variants)


def creator(trt: Any, launcher: Any) -> Any:
    register(trt, None, launcher)
    return trt.get_plugin_registry().get_creator(PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE)


def make(trt: Any, layer: LayerSpec, heads: int, fp8_query: bool, launcher: Any) -> Any:
    collection, arrays = fields_to_collection(trt, PluginFields.from_layer(0, layer, heads, fp8_query))
    plugin = creator(trt, launcher).create_plugin("layer", collection, trt.TensorRTPhase.RUNTIME)
    del arrays
    return plugin


def direct(layer: LayerSpec, step: Step, heads: int, fp8_query: bool) -> tuple[list[Launch], dict[str, DeviceArray]]:
    """`GpuAttention`'s launches, and the arrays that it passed, by the plugin's names."""
    device = RecordingDevice()
    dtype = {"f16": "float16", "bf16": "bfloat16"}[layer.hot.k.name]
    tokens, kv = step.batch.tokens, (step.batch.tokens, layer.kv_heads, layer.head_dim)
    arrays = {"q": device.empty((tokens, heads, layer.head_dim), dtype)}
    arrays |= {"k": device.empty(kv, dtype), "v": device.empty(kv, dtype)}
    arena = device.allocate(1)
    out = GpuAttention(device, fp8_query=fp8_query).paged_attention(
        arrays["q"], arrays["k"], arrays["v"], arena, step.batch, layer
    )
    for launch, items in zip(device.launches, ("appends", "narrow", "wide", "merges"), strict=True):
        given = dict(zip([name for name, _ in launch.variant.arguments], launch.arguments, strict=True))
        arrays[items] = given.pop("items")
        arrays |= {name: array for name, array in given.items() if isinstance(array, DeviceArray)}
    assert arrays["out"] is out
    return device.launches, arrays


def describe(trt: Any, array: DeviceArray) -> Any:
    desc = trt.PluginTensorDesc()
    desc.dims = list(array.shape)
    return desc


def enqueue(trt: Any, plugin: Any, arrays: dict[str, DeviceArray]) -> None:
    descs = [describe(trt, arrays[name]) for name in INPUTS]
    outputs = [describe(trt, arrays["out"])]
    plugin.on_shape_change(descs, outputs)
    addresses = [arrays[name].address for name in INPUTS]
    plugin.enqueue(descs, outputs, addresses, [arrays["out"].address], arrays["workspace"].address, STREAM)


def seen(launches: Iterable[Launch]) -> list[Any]:
    """Launches with addresses for pointers, and floats as a kernel gets them."""
    return [
        (
            launch.variant,
            launch.grid,
            [
                np.float32(value) if kind == "fp32" else operator.index(value)
                for (_, kind), value in zip(launch.variant.arguments, launch.arguments, strict=True)
            ],
        )
        for launch in launches
    ]


@pytest.fixture
def no_goldens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases' inputs without what should come out: nothing is computed here."""
    monkeypatch.setattr(cases, "attention", lambda q, *_, **__: q)
    monkeypatch.setattr(cases, "as_stored", lambda layer, k, v, cold: (k, v))


@pytest.mark.usefixtures("no_goldens")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_launches_are_those_of_gpu_attention(trt: ModuleType, case: Any):
    playback = Playback(case)
    for step in playback:
        for layer in playback.layers:
            for fp8_query in (False, True) if layer.cold.k.name == layer.cold.v.name == "e4m3" else (False,):
                wanted, arrays = direct(layer, step, case.heads, fp8_query)
                recorder = RecordingDevice()
                plugin = make(trt, layer, case.heads, fp8_query, recorder).attach_to_context(None)
                enqueue(trt, plugin, arrays)
                assert seen(recorder.launches) == seen(wanted)
                assert recorder.streams == {STREAM}
                assert recorder.prepared == [launch.variant for launch in wanted]
                dynamic = [trt.DynamicPluginTensorDesc() for _ in INPUTS]
                for desc, name in zip(dynamic, INPUTS, strict=True):
                    desc.max = list(arrays[name].shape)
                assert plugin.get_workspace_size(dynamic, []) == arrays["workspace"].nbytes


def first_step(name: str) -> tuple[Any, LayerSpec, Step]:
    case = CASES[name]
    playback = Playback(case)
    return case, playback.layers[0], next(iter(playback))


def test_without_kernels_it_says_what_to_do(trt: ModuleType):
    case, layer, step = first_step("int2-gqa3")
    _, arrays = direct(layer, step, case.heads, False)
    plugin = make(trt, layer, case.heads, False, None).attach_to_context(None)
    with pytest.raises(RuntimeError, match=r"layer 0 has no kernels to run: .* call kvattention.tensorrt.register"):
        enqueue(trt, plugin, arrays)


def test_shapes_that_the_kernels_would_misread_are_refused(trt: ModuleType):
    case, layer, step = first_step("int2-gqa3")
    _, arrays = direct(layer, step, case.heads, False)
    arrays["v"] = DeviceArray(arrays["v"].address, (step.batch.tokens, layer.kv_heads + 1, layer.head_dim), "float16")
    with pytest.raises(ValueError, match="layer 0: v is"):
        enqueue(trt, make(trt, layer, case.heads, False, RecordingDevice()), arrays)


def test_an_engine_keeps_the_kernels_it_was_loaded_with(trt: ModuleType):
    case, layer, step = first_step("int2-gqa3")
    _, arrays = direct(layer, step, case.heads, False)
    first, second = RecordingDevice(), RecordingDevice()
    plugin = make(trt, layer, case.heads, False, first)
    make(trt, layer, case.heads, False, second)
    enqueue(trt, plugin.clone().attach_to_context(None), arrays)
    assert len(first.launches) == 4
    assert not second.launches


class CountingDriver:
    """Answers every call of CUDA with a number."""

    def __init__(self) -> None:
        self.enums: Any = pytest.importorskip("cuda.bindings.driver")
        self.calls: list[str] = []

    def __call__(self, function: str, *arguments: Any) -> Any:
        self.calls.append(function)
        if function == "cuDeviceGetAttribute":
            return {75: 8, 76: 9}[int(arguments[0])]
        return 1

    def query(self, function: str, *arguments: Any) -> bool:
        raise AssertionError(f"{function} waits or asks")


def test_enqueueing_only_launches(trt: ModuleType, tmp_path: Path):
    """Once attached to a context: no allocation, nothing that waits, so that a CUDA graph can capture it."""
    case, layer, step = first_step("plan-mixed")
    _, arrays = direct(layer, step, case.heads, False)
    variants = layer_variants(layer, case.heads)
    image = b"\x7fELF"
    cubins = [Cubin(v.name, 89, v.kernel, v.arguments, ("*i8", "*i8"), 4, 0, 1, 0, "3.9.0", image) for v in variants]
    write_index(tmp_path, cubins, 89)
    driver = CountingDriver()
    plugin = make(trt, layer, case.heads, False, RecordingDevice())
    plugin._open_launcher = ContextLaunchers(tmp_path, driver)
    attached = plugin.attach_to_context(None)
    assert driver.calls.count("cuModuleLoadData") == 4
    driver.calls.clear()
    enqueue(trt, attached, arrays)
    assert driver.calls == ["cuLaunchKernel"] * 4
    plugin.attach_to_context(None)
    assert "cuModuleLoadData" not in driver.calls  # another context of the same device shares them


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int2-gqa3", "k4v2-sinks", "e4m3-mixture"])
def test_an_engine_computes_what_gpu_attention_does(
    trt: ModuleType, small_engine: ModuleType, tmp_path: Path, name: str
):
    """A first step through TensorRT, and through `GpuAttention` on the same kernels: the same bits, twice."""
    case, layer, step = first_step(name)
    with DriverDevice() as bare:
        sm = bare.sm
    if not hasattr(trt.ComputeCapability, f"SM{sm}"):
        pytest.skip(f"{trt.__name__} does not build for SM{sm}")
    write_cubins(tmp_path, needed([layer], case.heads), sm)
    register(trt, tmp_path)
    parsed = small_engine.Parsed(trt, small_engine.attention_model([PluginFields.from_layer(0, layer, case.heads)]))
    plan = parsed.build(sm)
    assert plan is not None, parsed.said
    with DriverDevice(tmp_path) as device:
        arrays = {
            key: device.upload(x[0].astype(np.float16)) for key, x in zip("qkv", (step.q, step.k, step.v), strict=True)
        }
        arena = device.allocate(Playback(case).arena.size)
        out = GpuAttention(device).paged_attention(*arrays.values(), arena, step.batch, layer)
        expected, stored = device.download(out), device.download(arena.words)
        schedule = make_schedule(step.batch, case.heads, layer.kv_heads, layer.group_size)
        arrays |= {key: device.upload(getattr(schedule, key)) for key in INPUTS[5:]}
        arrays |= {"arena": arena.pointer, "scales": device.upload(layer_scales([layer])[0])}
        device.upload(np.zeros(arena.words.shape, np.int32), into=arena.words)
        engine = trt.Runtime(parsed.logger).deserialize_cuda_engine(plan)
        context = engine.create_execution_context()
        for key, array in arrays.items():
            assert context.set_input_shape(key, array.shape), parsed.said
            assert context.set_tensor_address(key, array.address)
        again = device.empty(out.shape, "float16")
        assert context.set_tensor_address("attended_0", again.address)
        for _ in range(2):
            assert context.execute_async_v3(device.stream), parsed.said
            np.testing.assert_array_equal(device.download(again), expected)
            np.testing.assert_array_equal(device.download(arena.words), stored)
