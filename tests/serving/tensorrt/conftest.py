"""A GPU and a TensorRT engine that do in host memory what the real ones would be told to do on a device.

`HostDriver` stands where CUDA's driver API does, `FakeEngine` where TensorRT does; all between is the real thing.
The engine's "model" is a formula: the best candidate after token t at position p is `after(t, p)`.
"""

# ruff: noqa: N802, N815 - CUDA's names

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvattention.gpu.attention import GpuAttention
from kvattention.gpu.compile import Cubin, write_index
from kvattention.gpu.driver import DriverDevice
from kvattention.gpu.schedule import DIRECT
from kvattention.gpu.variants import MOVE, seal_variant
from lowkv.engine.tensorrt.profiles import (
    GROUP_LISTS,
    Profile,
    decode_limits,
    engine_inputs,
    group_input,
    prefill_limits,
)
from lowkv.kvcache import CachePlan, KVCache
from lowkv.recipe import KVCacheConfig
from lowkv.serving.tensorrt.executor import Session, TensorRTExecutor

VOCAB = 300
CANDIDATES = 256
HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 64, 4096
MAX_SEQUENCES, MAX_TOKENS = 12, 96


def after(token: int, position: int) -> int:
    return (7 * token + 3 * position + 1) % VOCAB


class HostDriver:
    """CUDA's driver API on host memory. Work is done at once, or recorded while a stream is captured."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.enums: Any = driver
        self.calls: list[str] = []
        self.recording: list[Callable[[], None]] | None = None
        self._memory: dict[int, Any] = {}
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self._handles = 1 << 40

    def __call__(self, function: str, *arguments: Any) -> Any:
        self.calls.append(function)
        return getattr(self, "_" + function, lambda *_: None)(*arguments)

    def query(self, function: str, *arguments: Any) -> bool:
        return True

    def submit(self, work: Callable[[], None]) -> None:
        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    def owns(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + len(block) for start, block in self._memory.items())

    def _handle(self, *_: Any) -> int:
        self._handles += 1
        return self._handles

    _cuStreamCreate = _cuEventCreate = _cuModuleLoadData = _cuModuleGetFunction = _handle
    _cuDevicePrimaryCtxRetain = _handle

    def _cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def _cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        return {75: 8, 76: 9, 16: 58}[int(attribute)]

    def _cuMemAlloc(self, size: int) -> int:
        block = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(block) // 256) * 256
        self._memory[address] = (ctypes.c_char * size).from_buffer(block, address - ctypes.addressof(block))
        return address

    def _cuMemHostAlloc(self, size: int, flags: int) -> int:
        return self._cuMemAlloc(size)

    def _cuMemFree(self, address: int) -> None:
        del self._memory[address]

    def _cuMemFreeHost(self, address: int) -> None:
        del self._memory[address]

    def _cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        assert self.owns(target, size)
        self.submit(lambda: ctypes.memmove(target, source, size) and None)

    def _cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> None:
        assert self.owns(source, size)
        self.submit(lambda: ctypes.memmove(target, source, size) and None)

    def _cuStreamBeginCapture(self, stream: int, mode: Any) -> None:
        self.recording = []

    def _cuStreamEndCapture(self, stream: int) -> int:
        graph = self._handle()
        self._graphs[graph], self.recording = self.recording or [], None
        return graph

    def _cuGraphInstantiate(self, graph: int, flags: int) -> int:
        executable = self._handle()
        self._graphs[executable] = self._graphs[graph]
        return executable

    def _cuGraphLaunch(self, executable: int, stream: int) -> None:
        for work in self._graphs[executable]:
            work()

    def _cuGraphDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    def _cuGraphExecDestroy(self, executable: int) -> None:
        del self._graphs[executable]

    @property
    def graphs(self) -> int:
        return len(self._graphs)


@dataclass
class FakeEngine:
    """Makes contexts, and remembers the shapes of every step that ran."""

    driver: HostDriver
    profiles: tuple[Profile, Profile]
    arena: int = 0
    contexts: int = 0
    steps: list[tuple[int, dict[str, tuple[int, ...]]]] = field(default_factory=list)
    """(profile, shapes) in order."""
    failing: bool = False
    ready: bool = True

    def new_context(self, repeated: bool) -> FakeContext:
        self.contexts += 1
        return FakeContext(self)


class FakeContext:
    """`trt.IExecutionContext`, as strict as the real one about profiles, shapes and addresses."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.profile = -1
        self.memory = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_device_memory(self, address: int, size: int) -> None:
        assert self.engine.driver.owns(address, size)
        assert address % 256 == 0
        self.memory = address

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        profile = self.engine.profiles[self.profile]
        most = profile.limits.shapes(profile.groups)[name]
        if len(shape) != len(most) or any(not 1 <= have <= limit for have, limit in zip(shape, most, strict=True)):
            return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if address % 256 and name != "arena":
            return False
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        if self.engine.failing:
            return False
        assert set(self.shapes) == set(engine_inputs(self.engine.profiles[0].groups))
        assert self.memory
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        self.engine.driver.submit(lambda: self._compute(shapes, addresses))
        return True

    def _compute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        def tensor(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            assert self.engine.driver.owns(addresses[name], size), f"{name} lies outside the device's memory"
            memory = (ctypes.c_char * size).from_address(addresses[name])
            return np.frombuffer(memory, dtype).reshape(shape)

        given = {name: tensor(name, shape, np.int64 if name == "arena" else np.int32) for name, shape in shapes.items()}
        assert given["arena"][0] == self.engine.arena
        for group in range(self.engine.profiles[0].groups):
            check_lists(given | {name: given[group_input(name, group)] for name in GROUP_LISTS})
        rows = given["rows"]
        best = np.array([after(int(given["tokens"][row]), int(given["positions"][row])) for row in rows])
        tensor("values", (len(rows), CANDIDATES), np.float32)[...] = -np.arange(CANDIDATES, dtype=np.float32)
        tensor("ids", (len(rows), CANDIDATES), np.int32)[...] = (best[:, None] + np.arange(CANDIDATES)) % VOCAB
        tensor("lse", (len(rows),), np.float32)[...] = 0.5 + best
        self.engine.steps.append((self.profile, shapes))


def check_lists(given: dict[str, np.ndarray]) -> None:
    """The lists hold together: every sequence's new tokens are appended once, and lie at the positions behind its past.

    Sequences without appends are padding, and must come last.
    """
    appends = given["appends"][given["appends"][:, 0] >= 0]
    counts = np.zeros(len(given["sequences"]), int)
    np.add.at(counts, appends[:, 0], appends[:, 3] & ~DIRECT)
    real = int((counts > 0).sum())
    assert (counts[:real] > 0).all()
    start = 0
    for (past, _, _, query_start), count in zip(given["sequences"][:real], counts[:real], strict=True):
        assert query_start == start
        np.testing.assert_array_equal(given["positions"][start : start + count], past + np.arange(count))
        start += count
    for name in ("narrow", "wide"):
        assert given[name][:, 0].max() < real
    table = given["table"]
    assert all(table[sequence, block] >= 0 for sequence, block in appends[:, :2])
    assert (table[real:] == -1).all()


@dataclass
class Rig:
    """An executor and what stands in for the machine below it."""

    executor: TensorRTExecutor
    engine: FakeEngine
    driver: HostDriver
    vocab: int = VOCAB
    max_sequences: int = MAX_SEQUENCES
    max_tokens: int = MAX_TOKENS

    after = staticmethod(after)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """rig(format, graphs=..., windows=...) -> Rig."""
    pytest.importorskip("cuda.bindings.driver")
    made: list[DriverDevice] = []

    @dataclass(frozen=True)
    class Geometry:
        windows: tuple[int | None, ...]
        layers: int = 2
        kv_heads: int = KV_HEADS
        head_dim: int = HEAD_DIM
        softmax_scale: float = HEAD_DIM**-0.5

    def make(
        name: str = "fp16",
        graphs: int = 32,
        budget: int = 2**24,
        windows: tuple[int | None, int | None] = (None, None),
    ) -> Rig:
        variants = (MOVE, seal_variant("f16", HEAD_DIM, 32))
        hidden = ("*i8", "*i8")
        cubins = [
            Cubin(v.name, 89, v.kernel, v.arguments, hidden, 4, 0, 32, 0, "3.9.0", b"\x7fELF " + v.name.encode())
            for v in variants
        ]
        write_index(tmp_path, cubins, 89)
        driver = HostDriver()
        device = DriverDevice(tmp_path, driver=driver)
        made.append(device)
        plan = CachePlan.from_config(Geometry(windows), KVCacheConfig(format=name))
        cache = KVCache(plan, budget, GpuAttention(device))
        shared = {"length": LENGTH, "group_size": plan.group_size}
        groups = len(plan.groups)
        profiles = (
            Profile("prefill", prefill_limits(MAX_SEQUENCES, MAX_TOKENS, gqa=HEADS // KV_HEADS, **shared), groups),
            Profile("decode", decode_limits(MAX_SEQUENCES, **shared), groups),
        )
        engine = FakeEngine(driver, profiles, cache.words.words.address)
        session = Session(
            name="a stand-in",
            new_context=engine.new_context,
            capturable=lambda context, stream: engine.ready,
            activation_bytes=4096,
            candidates=CANDIDATES,
            errors=lambda: "out of luck",
        )
        return Rig(TensorRTExecutor(session, cache, device, HEADS, profiles, graphs), engine, driver)

    yield make
    for device in made:
        device.close()
