"""What would be called on a GPU, seen at the seam: a driver that records, with CUDA's real enumerations."""

from __future__ import annotations

import ctypes
import gc
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver")

from kvattention.cases import CASES, Case, Playback
from kvattention.gpu import driver as driver_module
from kvattention.gpu.attention import GpuAttention
from kvattention.gpu.compile import Cubin, KernelSet, write_cubins, write_index
from kvattention.gpu.driver import ArgumentBuffer, ContextLaunchers, CubinLauncher, CudaDriver, CudaError, DriverDevice
from kvattention.gpu.goldens import Played, expect
from kvattention.gpu.launches import Launch, move_launch
from kvattention.gpu.variants import MOVE, Variant, needed
from kvattention.reference import ReferenceAttention

ATTEND = Variant("attend", "f16", "int4", "int2", 64, 32, 16)
HIDDEN = ("*i8", "*i8")


class RecordingDriver:
    """Hands out numbers as CUDA would, keeps real host memory for pinned blocks, and runs host-to-device copies."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.enums: Any = driver
        self.calls: list[tuple[Any, ...]] = []
        self.launched: list[tuple[bytes, ...]] = []
        self.parameters: tuple[int, ...] = ()
        """Sizes of the launched kernel's parameters, which CUDA knows from the cubin."""
        self.fail: dict[str, str] = {}
        self.ready = True
        self.context = 1
        self.capability = 89
        self._next = 0x10000
        self._memory: dict[int, ctypes.Array[ctypes.c_char]] = {}

    def __call__(self, function: str, *arguments: Any) -> Any:
        self.calls.append((function, *arguments))
        if function in self.fail:
            raise CudaError(function, self.fail[function])
        return getattr(self, function, lambda *_: None)(*arguments)

    def query(self, function: str, *arguments: Any) -> bool:
        self.calls.append((function, *arguments))
        return self.ready

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def _handle(self, *_: Any) -> int:
        self._next += 0x1000
        return self._next

    cuMemAlloc = cuStreamCreate = cuEventCreate = cuModuleLoadData = cuModuleGetFunction = _handle  # noqa: N815
    cuDevicePrimaryCtxRetain = cuStreamEndCapture = cuGraphInstantiate = _handle  # noqa: N815

    def cuDeviceGet(self, ordinal: int) -> int:  # noqa: N802
        return ordinal

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> int:  # noqa: N802
        return {75: self.capability // 10, 76: self.capability % 10, 16: 58}[int(attribute)]

    def cuCtxGetCurrent(self) -> int:  # noqa: N802
        return self.context

    def cuMemGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return 3 << 30, 8 << 30

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> int:  # noqa: N802
        memory = ctypes.create_string_buffer(nbytes)
        self._memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:  # noqa: N802
        self.calls[-1] += (ctypes.string_at(source, nbytes),)

    def cuLaunchKernel(self, function: Any, *rest: Any) -> None:  # noqa: N802
        """Copies the parameters as CUDA does: through the array of pointers, by the kernel's parameter sizes."""
        pointers = (ctypes.c_void_p * len(self.parameters)).from_address(rest[-2])
        pairs = zip(pointers, self.parameters, strict=True)
        self.launched.append(tuple(ctypes.string_at(pointer, size) for pointer, size in pairs if pointer is not None))


@pytest.fixture
def cuda() -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A folder with two kernels whose machine code is none."""
    move = Cubin("move", 89, "move", MOVE.arguments, HIDDEN, 4, 0, 32, 0, "3.9.0", b"\x7fELF move")
    attend = Cubin(ATTEND.name, 89, "attend", ATTEND.arguments, HIDDEN, 8, 60000, 32, 0, "3.9.0", b"\x7fELF attend")
    write_index(tmp_path, [move, attend], 89)
    return tmp_path


def test_arguments_are_packed_byte_by_byte():
    arguments = (("a", "*fp16"), ("n", "i32"), ("b", "*i64"), ("scale", "fp32"), ("m", "i32"), ("w", "i64"))
    buffer = ArgumentBuffer(arguments, HIDDEN)
    assert buffer.offsets == (0, 8, 16, 24, 28, 32, 40, 48)
    buffer.pack((0x1122334455667780, -2, 0x10, 0.5, np.int32(7), -(1 << 40)))
    expected = (
        bytes.fromhex("8077665544332211")
        + bytes.fromhex("feffffff") + bytes(4)  # the next pointer is aligned to 8
        + bytes.fromhex("1000000000000000")
        + bytes.fromhex("0000003f") + bytes.fromhex("07000000")
        + struct.pack("<q", -(1 << 40))
        + bytes(16)
    )  # fmt: skip
    assert buffer.image == expected
    pointers = (ctypes.c_void_p * 8).from_address(buffer.address)
    sizes = (8, 4, 8, 4, 4, 8, 8, 8)
    starts = zip(buffer.offsets, sizes, strict=True)
    for pointer, (offset, size) in zip(pointers, starts, strict=True):
        assert pointer is not None
        assert ctypes.string_at(pointer, size) == expected[offset : offset + size]
    buffer.pack((0, 0, 0, 0.0, 0, 0))
    assert buffer.image == bytes(56)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((24, 1, 1.0), "argument x lies at 0x18, expected 16-byte alignment"),
        ((16, 1 << 31, 1.0), "do not fit"),
        ((16, 1), "do not fit"),
        ((16, 1, 1.0, 1), "do not fit"),
        ((-16, 1, 1.0), "do not fit"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(values: tuple[Any, ...], message: str):
    buffer = ArgumentBuffer((("x", "*fp16"), ("n", "i32"), ("s", "fp32")), HIDDEN)
    with pytest.raises(ValueError, match=message):
        buffer.pack(values)


def test_unknown_argument_types_are_refused():
    with pytest.raises(ValueError, match="type 'tensordesc' is not supported; use a pointer or one of i32, i64, fp32"):
        ArgumentBuffer((("x", "tensordesc"),), ())


def test_a_launch_passes_grid_block_shared_memory_and_stream(cuda: RecordingDriver, kernels: Path):
    launcher = CubinLauncher(cuda, KernelSet.open(kernels, 89))
    cuda.parameters = (8, 8, 4, 8, 8)
    launcher.launch(move_launch(0x1000, 0x2000, 5, 8192), 77)
    load, find, launched = cuda.calls
    assert load == ("cuModuleLoadData", b"\x7fELF move")
    assert find[0] == "cuModuleGetFunction"
    assert find[2] == b"move"
    assert launched[0] == "cuLaunchKernel"
    assert launched[2:10] == (5, 2, 1, 128, 1, 1, 0, 77)
    assert launched[11] == 0
    assert cuda.launched == [
        (struct.pack("<Q", 0x1000), struct.pack("<Q", 0x2000), struct.pack("<i", 8192), bytes(8), bytes(8))
    ]
    launcher.launch(move_launch(0x1000, 0x3000, 1, 16), 78)
    assert cuda.names().count("cuModuleLoadData") == 1


def test_shared_memory_beyond_48_kib_is_asked_for(cuda: RecordingDriver, kernels: Path):
    launcher = CubinLauncher(cuda, KernelSet.open(kernels, 89))
    launcher.prepare([ATTEND, MOVE])
    attributes = [call for call in cuda.calls if call[0] == "cuFuncSetAttribute"]
    wanted = cuda.enums.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert [call[2:] for call in attributes] == [(wanted, 60000)]
    before = len(cuda.calls)
    cuda.parameters = (*(8 if kind.startswith("*") else 4 for _, kind in ATTEND.arguments), 8, 8)
    launcher.launch(Launch(ATTEND, (3, 2, 1), (16,) * 10 + (1,) * 10 + (0.125,)), 5)
    (launched,) = cuda.calls[before:]  # nothing else is called once a kernel is loaded
    assert launched[2:10] == (3, 2, 1, 256, 1, 1, 60000, 5)
    with pytest.raises(ValueError, match="lack merge"):
        launcher.prepare([Variant("merge", "f16", head_dim=64, rows=16)])


def test_every_context_has_a_launcher_of_its_own(cuda: RecordingDriver, kernels: Path):
    launchers = ContextLaunchers(kernels, cuda)
    first = launchers()
    assert launchers() is first
    cuda.context = 2
    assert launchers() is not first
    cuda.context = 1
    assert launchers() is first
    cuda.capability = 80
    cuda.context = 3
    with pytest.raises(ValueError, match="for compute capability 89, but this GPU's is 80"):
        launchers()


def test_a_device_says_what_it_is(cuda: RecordingDriver):
    device = DriverDevice(driver=cuda)
    assert (device.sm, device.processors, device.free_memory()) == (89, 58, 3 << 30)
    with pytest.raises(ValueError, match="without kernels"):
        device.launch(move_launch(0, 0, 1, 16))


def test_an_arena_is_zeroed_and_knows_its_address(cuda: RecordingDriver):
    device = DriverDevice(driver=cuda)
    arena = device.allocate(1 << 20)
    (zeroed,) = [call for call in cuda.calls if call[0] == "cuMemsetD32Async"]
    assert zeroed[1:] == (arena.words.address, 0, 1 << 20, device.stream)
    (copied,) = [call for call in cuda.calls if call[0] == "cuMemcpyHtoDAsync"]
    assert copied[1] == arena.pointer.address
    assert copied[5] == struct.pack("<Q", arena.words.address)


def test_uploads_use_pinned_memory_again_only_once_its_copy_is_done(cuda: RecordingDriver):
    device = DriverDevice(driver=cuda)
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    first = device.upload(array.T)
    assert (first.shape, first.stride(), first.dtype, first.nbytes) == ((4, 3), (3, 1), "int32", 48)
    cuda.ready = False
    device.upload(array, into=first)
    cuda.ready = True
    device.upload(array[:1], into=first)
    copies = [call for call in cuda.calls if call[0] == "cuMemcpyHtoDAsync"]
    assert [call[5] for call in copies] == [array.T.tobytes(), array.tobytes(), array[:1].tobytes()]
    assert all(call[1] == first.address and call[4] == device.stream for call in copies)
    sources = [call[2] for call in copies]
    assert sources[0] != sources[1]
    assert sources[2] == sources[0]
    assert cuda.names().count("cuMemHostAlloc") == 2
    assert "cuStreamSynchronize" not in cuda.names()
    with pytest.raises(ValueError, match="64 bytes do not fit into an array of 48"):
        device.upload(np.zeros(16, np.int32), into=first)


def test_memory_goes_back_with_the_last_reference_and_at_the_end(cuda: RecordingDriver):
    with DriverDevice(driver=cuda) as device:
        dropped = device.empty((4, 2), "bfloat16")
        kept = device.empty((3,), "float32")
        assert ("cuMemAlloc", 16) in cuda.calls
        address = dropped.address
        del dropped
        gc.collect()
        assert cuda.calls[-1] == ("cuMemFree", address)
    assert ("cuMemFree", kept.address) in cuda.calls
    assert cuda.names()[-2:] == ["cuStreamDestroy", "cuDevicePrimaryCtxRelease"]
    count = len(cuda.calls)
    device.close()
    del kept
    gc.collect()
    assert len(cuda.calls) == count


def test_reading_back(cuda: RecordingDriver):
    device = DriverDevice(driver=cuda)
    array = device.empty((2, 3), "float32")
    before = len(cuda.calls)
    assert device.download(array).shape == (2, 3)
    assert cuda.names()[before:] == ["cuMemcpyDtoHAsync", "cuStreamSynchronize"]
    host = device.pinned((1, 3), "float32")
    device.read(array, host)
    assert cuda.calls[-1] == ("cuMemcpyDtoHAsync", host.ctypes.data, array.address, 12, device.stream)
    with pytest.raises(ValueError, match="cannot read 36 bytes of an array of 24"):
        device.read(array, device.pinned((3, 3), "float32"))


def test_a_graph_is_captured_and_launched(cuda: RecordingDriver, kernels: Path):
    device = DriverDevice(kernels, driver=cuda)
    device.prepare([MOVE])
    cuda.parameters = (8, 8, 4, 8, 8)
    before = len(cuda.calls)
    with device.capture() as graph:
        device.launch(move_launch(0x1000, 0x2000, 1, 16))
        with pytest.raises(ValueError, match="not complete"):
            graph.launch()
    graph.launch()
    graph.close()
    assert cuda.names()[before:] == [
        "cuStreamBeginCapture",
        "cuLaunchKernel",
        "cuStreamEndCapture",
        "cuGraphInstantiate",
        "cuGraphDestroy",
        "cuGraphLaunch",
        "cuGraphExecDestroy",
    ]


def test_a_capture_ends_when_its_body_fails(cuda: RecordingDriver):
    device = DriverDevice(driver=cuda)
    with pytest.raises(KeyError), device.capture():
        raise KeyError("body")
    assert cuda.names()[-2:] == ["cuStreamEndCapture", "cuGraphDestroy"]
    cuda.fail["cuStreamEndCapture"] = "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    with pytest.raises(KeyError), device.capture():
        raise KeyError("body")


def test_events_wait_only_where_they_say_so(cuda: RecordingDriver):
    device = DriverDevice(driver=cuda)
    first, second = device.event().record(), device.event().record()
    cuda.ready = False
    assert not second.done()
    assert "cuEventSynchronize" not in cuda.names()
    second.wait()
    cuda.cuEventElapsedTime = lambda start, end: 1.5  # type: ignore[attr-defined]
    assert second.milliseconds_since(first) == 1.5
    assert cuda.calls[-1][0] == "cuEventElapsedTime"


def test_errors_carry_the_function_and_cudas_name(monkeypatch: pytest.MonkeyPatch):
    from cuda.bindings import driver

    result = driver.CUresult
    answers = {"cuInit": (result.CUDA_SUCCESS,), "cuMemGetInfo": (result.CUDA_SUCCESS, 1, 2)}
    answers |= {"cuMemAlloc": (result.CUDA_ERROR_OUT_OF_MEMORY, None), "cuEventQuery": (result.CUDA_ERROR_NOT_READY,)}
    for name, answer in answers.items():
        monkeypatch.setattr(driver, name, lambda *_, answer=answer: answer)
    cuda = CudaDriver()
    assert cuda("cuMemGetInfo") == (1, 2)
    assert cuda.query("cuEventQuery", 1) is False
    with pytest.raises(CudaError, match="cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY") as caught:
        cuda("cuMemAlloc", 1 << 50)
    assert (caught.value.function, caught.value.error) == ("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    monkeypatch.setattr(driver, "cuEventQuery", lambda *_: (result.CUDA_ERROR_ILLEGAL_ADDRESS,))
    with pytest.raises(CudaError, match="cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        cuda.query("cuEventQuery", 1)


no_driver = pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="here the calls would be made")


@no_driver
def test_without_a_driver_the_first_call_says_so():
    with pytest.raises(CudaError, match="cuInit failed: the NVIDIA driver is not installed"):
        DriverDevice()


@no_driver
def test_the_bindings_take_every_call_as_it_is_made(cuda: RecordingDriver, kernels: Path):
    """cuda.bindings converts a call's arguments before it looks for the driver: without one, only that is tried."""
    cuda.parameters = (8, 8, 4, 8, 8)
    with DriverDevice(kernels, driver=cuda) as device:
        arena = device.allocate(64)
        device.prepare([ATTEND])
        with device.capture() as graph:
            device.launch(move_launch(arena.pointer, arena.words, 1, 16))
        graph.launch()
        graph.close()
        early, late = device.event().record(), device.event().record()
        late.done()
        late.wait()
        cuda("cuEventElapsedTime", early._handle, late._handle)
        early.close()
        device.upload(np.zeros(4, np.int32))
        device.upload(np.zeros(4, np.int32))
        device.download(device.empty((4,), "float16"))
        device.free_memory()
    cuda("cuInit", 0)
    ContextLaunchers(kernels, cuda)()
    used = set(cuda.names())
    source = Path(driver_module.__file__).read_text()
    assert used == {
        word for word in source.replace('"', " ").split() if word.startswith("cu") and word in dir(cuda.enums)
    }
    for function, *arguments in cuda.calls:
        extra = 1 if function == "cuMemcpyHtoDAsync" else 0  # the recorder's copy of the bytes
        with pytest.raises(RuntimeError, match="NVIDIA driver library"):
            getattr(cuda.enums, function)(*arguments[: len(arguments) - extra])


def test_importing_loads_no_cuda_and_no_torch():
    code = "import sys, kvattention.gpu.driver; print(*{'torch', 'triton', 'cuda.bindings.driver'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Callable[[Case], DriverDevice]]:
    """device(case): this machine's GPU with the kernels that the case needs, compiled for it."""
    opened: list[DriverDevice] = []

    def open_device(case: Case) -> DriverDevice:
        with DriverDevice() as bare:
            sm = bare.sm
        write_cubins(tmp_path, needed(case.layers(), case.heads), sm)
        opened.append(DriverDevice(tmp_path))
        return opened[-1]

    yield open_device
    for one in opened:
        one.close()


def run_layer(device: DriverDevice, attention: GpuAttention, arena: Any, step: Any, index: int, layer: Any) -> Any:
    q, k, v = (device.upload(x[index].astype(np.float16)) for x in (step.q, step.k, step.v))
    return device.download(attention.paged_attention(q, k, v, arena, step.batch, layer)).astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plan-mixed", "k4v2-sinks", "e4m3-mixture", "int2-d80", "f16-g64"])
def test_cubins_match_the_golden(name: str, device: Callable[[Case], DriverDevice]):
    case = CASES[name]
    playback, reference, gpu = Playback(case), ReferenceAttention(), device(case)
    attention = GpuAttention(gpu, part_tokens=64)
    arena = attention.allocate(playback.arena.size)
    for lengths, step in zip(case.steps, playback, strict=True):
        gpu.upload(playback.arena, into=arena.words)
        outputs = [run_layer(gpu, attention, arena, step, i, layer) for i, layer in enumerate(playback.layers)]
        attention.seal(arena, step.seal, playback.layers)
        for i, layer in enumerate(playback.layers):
            reference.paged_attention(step.q[i], step.k[i], step.v[i], playback.arena, step.batch, layer)
        reference.seal(playback.arena, step.seal, playback.layers)
        stored = gpu.download(arena.words)
        np.testing.assert_array_equal(stored, playback.arena)
        active = [s for s, n in enumerate(lengths) if n]
        played = Played(active, step, outputs, stored, playback.arena)
        for i, output in enumerate(outputs):
            golden, tolerance = expect(playback, played, i, False)
            assert (np.abs(output - golden) <= tolerance).all()


@pytest.mark.gpu
def test_a_captured_step_can_be_replayed(device: Callable[[Case], DriverDevice]):
    case = CASES["int2-gqa3"]
    playback, gpu = Playback(case), device(case)
    step, layer = next(iter(playback)), playback.layers[0]
    attention = GpuAttention(gpu, part_tokens=64)
    arena = attention.allocate(playback.arena.size)
    q, k, v = (gpu.upload(x[0].astype(np.float16)) for x in (step.q, step.k, step.v))
    expected = gpu.download(
        attention.paged_attention(q, k, v, arena, step.batch, layer)
    )  # uploads lists, loads kernels
    out = gpu.empty(q.shape, "float16")
    with gpu.capture() as graph:
        attention.paged_attention(q, k, v, arena, step.batch, layer, out)
    gpu.upload(np.full(q.shape, np.nan, np.float16), into=out)
    graph.launch()
    np.testing.assert_array_equal(gpu.download(out), expected)
    graph.close()
