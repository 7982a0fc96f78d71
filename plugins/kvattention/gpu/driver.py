"""The compiled kernels on a GPU through CUDA's driver API: no Torch, no Triton, no compiler.

Two layers. `CubinLauncher` loads cubins into the current context and launches them on any stream; TensorRT's plugin
uses it on TensorRT's stream. `DriverDevice` is a whole device of its own (primary context, one stream, memory, events,
CUDA graphs), and a `kvattention.gpu.attention.Device`.

Everything is asynchronous in the order of the stream, except what says that it waits. Every call of CUDA goes through
`Driver`, which tests replace to see what would be called. None of this has run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvattention.gpu.attention import Arena
from kvattention.gpu.compile import POINTER_ALIGNMENT, Cubin, KernelSet
from kvattention.gpu.launches import Launch
from kvattention.gpu.variants import Variant

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel may have without asking (CUDA C++ Programming Guide, compute capability 8.0)."""

_STAGING_STEP = 64 * 1024


class CudaError(RuntimeError):
    """A CUDA call that failed: the function's name and CUDA's name of the error."""

    def __init__(self, function: str, error: str) -> None:
        super().__init__(f"{function} failed: {error}")
        self.function = function
        self.error = error


class Driver(Protocol):
    """The seam between this module and CUDA: calls by name, and the enumerations of `cuda.bindings.driver`."""

    enums: Any

    def __call__(self, function: str, *arguments: Any) -> Any:
        """The call's results (None, one, or a tuple). Raises CudaError."""

    def query(self, function: str, *arguments: Any) -> bool:
        """Whether the call succeeds; False when CUDA answers "not ready". Raises CudaError for anything else."""


class CudaDriver:
    """`Driver` on `cuda.bindings`."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.enums: Any = driver
        try:
            self("cuInit", 0)
        except CudaError:
            raise
        except RuntimeError as error:  # what cuda.bindings raises when there is no libcuda
            raise CudaError("cuInit", f"the NVIDIA driver is not installed ({error})") from error

    def __call__(self, function: str, *arguments: Any) -> Any:
        status, *results = getattr(self.enums, function)(*arguments)
        if status != self.enums.CUresult.CUDA_SUCCESS:
            raise CudaError(function, self.enums.CUresult(status).name)
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None

    def query(self, function: str, *arguments: Any) -> bool:
        (status,) = getattr(self.enums, function)(*arguments)
        if status not in (self.enums.CUresult.CUDA_SUCCESS, self.enums.CUresult.CUDA_ERROR_NOT_READY):
            raise CudaError(function, self.enums.CUresult(status).name)
        return bool(status == self.enums.CUresult.CUDA_SUCCESS)


# struct's native codes lay arguments out as a C compiler would, which is how CUDA reads them.
_CODES = {"i32": "i", "i64": "q", "fp32": "f"}


class ArgumentBuffer:
    """Kernel arguments as ``cuLaunchKernel`` takes them: their bytes, and an array of pointers to each.

    CUDA copies them during the call, so one buffer serves all launches of a kernel, one at a time.
    """

    def __init__(self, arguments: Sequence[tuple[str, str]], hidden: Sequence[str]) -> None:
        kinds = [kind for _, kind in arguments]
        codes = [_code(kind) for kind in (*kinds, *hidden)]
        self._arguments = tuple(arguments)
        self._pointers = [index for index, kind in enumerate(kinds) if kind.startswith("*")]
        self._nulls = (0,) * len(hidden)
        self._layout = struct.Struct("@" + "".join(codes))
        self._bytes = (ctypes.c_uint64 * -(-self._layout.size // 8))()
        self.offsets = tuple(
            struct.calcsize("@" + "".join(codes[: index + 1])) - struct.calcsize(code)
            for index, code in enumerate(codes)
        )
        start = ctypes.addressof(self._bytes)
        self._table = (ctypes.c_void_p * len(codes))(*(start + offset for offset in self.offsets))
        self.address = ctypes.addressof(self._table)
        """Address of the array of pointers."""

    def pack(self, values: Sequence[Any]) -> None:
        """Write the arguments; hidden ones become nulls.

        Raises ValueError for a wrong number of arguments, one out of its type's range, or a pointer that is not
        aligned as the kernels were compiled for.
        """
        packed = list(values)
        for index in self._pointers:
            packed[index] = address = operator.index(values[index])
            if address % POINTER_ALIGNMENT:
                name = self._arguments[index][0]
                raise ValueError(
                    f"kernel argument {name} lies at {address:#x}, expected {POINTER_ALIGNMENT}-byte alignment"
                )
        try:
            self._layout.pack_into(self._bytes, 0, *packed, *self._nulls)
        except struct.error as error:
            raise ValueError(f"kernel arguments {tuple(values)} do not fit {self._arguments}: {error}") from None

    @property
    def image(self) -> bytes:
        """The bytes as last packed."""
        return bytes(self._bytes)[: self._layout.size]


def _code(kind: str) -> str:
    if kind.startswith("*"):
        return "Q"
    if kind not in _CODES:
        raise ValueError(f"kernel argument type {kind!r} is not supported; use a pointer or one of {', '.join(_CODES)}")
    return _CODES[kind]


@dataclass(frozen=True, eq=False)
class _Kernel:
    cubin: Cubin
    function: Any
    buffer: ArgumentBuffer


class CubinLauncher:
    """Launches kernels from a folder of cubins in the context that is current when each is first used."""

    def __init__(self, driver: Driver, kernels: KernelSet) -> None:
        self.driver = driver
        self.kernels = kernels
        self._loaded: dict[Variant, _Kernel] = {}
        self._lock = threading.Lock()

    def prepare(self, variants: Iterable[Variant]) -> None:
        """Load kernels now, rather than at their first launch: loading waits for the device and breaks a capture.

        Raises ValueError when the folder lacks one of them.
        """
        with self._lock:
            for variant in variants:
                self._kernel(variant)

    def launch(self, launch: Launch, stream: int) -> None:
        with self._lock:
            kernel = self._kernel(launch.variant)
            kernel.buffer.pack(launch.arguments)
            block = 32 * kernel.cubin.num_warps, 1, 1
            shared = kernel.cubin.shared
            self.driver(
                "cuLaunchKernel", kernel.function, *launch.grid, *block, shared, stream, kernel.buffer.address, 0
            )

    def _kernel(self, variant: Variant) -> _Kernel:
        kernel = self._loaded.get(variant)
        if kernel is None:
            kernel = self._loaded[variant] = self._load(self.kernels.load(variant))
        return kernel

    def _load(self, cubin: Cubin) -> _Kernel:
        module = self.driver("cuModuleLoadData", cubin.image)
        function = self.driver("cuModuleGetFunction", module, cubin.entry.encode())
        if cubin.shared > STATIC_SHARED:
            attribute = self.driver.enums.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.driver("cuFuncSetAttribute", function, attribute, cubin.shared)
        return _Kernel(cubin, function, ArgumentBuffer(cubin.arguments, cubin.hidden))


class ContextLaunchers:
    """The launcher of the current CUDA context, for those who are called in contexts of others."""

    def __init__(self, folder: Path, driver: Driver | None = None) -> None:
        self.folder = folder
        self._driver = driver
        self._opened: dict[int, CubinLauncher] = {}

    def __call__(self) -> CubinLauncher:
        """Raises CudaError without a GPU or a context, ValueError when the folder's kernels are another GPU's."""
        if self._driver is None:
            self._driver = CudaDriver()
        driver = self._driver
        context = int(driver("cuCtxGetCurrent"))
        if context not in self._opened:
            kernels = KernelSet.open(self.folder, compute_capability(driver, driver("cuCtxGetDevice")))
            self._opened[context] = CubinLauncher(driver, kernels)
        return self._opened[context]


def compute_capability(driver: Driver, device: Any) -> int:
    """As kernels are named by: 89 for 8.9."""
    attributes = driver.enums.CUdevice_attribute
    major = driver("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = driver("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return 10 * int(major) + int(minor)


_BYTES = {"bfloat16": 2}


def _itemsize(dtype: str) -> int:
    return _BYTES.get(dtype) or np.dtype(dtype).itemsize


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """Contiguous memory of the device; freed with the last reference to it. As an integer it is its address."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    """As NumPy calls it, or "bfloat16"."""

    def __index__(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        """Elements from one index to the next of each dimension, as Torch says it."""
        return tuple(int(np.prod(self.shape[axis + 1 :], dtype=np.int64)) for axis in range(len(self.shape)))

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * _itemsize(self.dtype)


class DriverDevice:
    """One GPU: its primary context (which Torch and TensorRT share), one stream, memory, launches.

    Call `activate` before using it in another thread than the one that made it. Use as a context manager, or `close`.

    Args:
        kernels: folder of cubins; None for a device that only holds memory.
        ordinal: which GPU, as CUDA counts.
    """

    def __init__(self, kernels: Path | None = None, *, ordinal: int = 0, driver: Driver | None = None) -> None:
        self.driver: Driver = driver if driver is not None else CudaDriver()
        self.device = self.driver("cuDeviceGet", ordinal)
        self._memory: dict[int, int] = {}
        self._pinned: list[int] = []
        self._staging: list[_Staging] = []
        self._context = self.driver("cuDevicePrimaryCtxRetain", self.device)
        self.activate()
        self.sm = compute_capability(self.driver, self.device)
        attribute = self.driver.enums.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.processors = int(self.driver("cuDeviceGetAttribute", attribute, self.device))
        self.stream = int(self.driver("cuStreamCreate", int(self.driver.enums.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        """Handle of the stream, which work of others (TensorRT's) may be put on too."""
        self._launcher = None if kernels is None else CubinLauncher(self.driver, KernelSet.open(kernels, self.sm))

    def __enter__(self) -> DriverDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def activate(self) -> None:
        """Make the device the calling thread's."""
        self.driver("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        """Wait for the stream, then give everything back; arrays of this device are invalid from then on."""
        if self._context is None:
            return
        self.activate()
        self.synchronize()
        for staging in self._staging:
            self.driver("cuEventDestroy", staging.event)
        for pointer in (*self._pinned, *(staging.pointer for staging in self._staging)):
            self.driver("cuMemFreeHost", pointer)
        for address in self._memory:
            self.driver("cuMemFree", address)
        self.driver("cuStreamDestroy", self.stream)
        self.driver("cuDevicePrimaryCtxRelease", self.device)
        self._memory, self._pinned, self._staging, self._context = {}, [], [], None

    def free_memory(self) -> int:
        """Bytes that are free on the device."""
        free, _ = self.driver("cuMemGetInfo")
        return int(free)

    def synchronize(self) -> None:
        """Wait until the stream has done all that was put on it."""
        self.driver("cuStreamSynchronize", self.stream)

    # Memory. Allocating and freeing may wait for the device; the copies do not.

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Uninitialized; 256-byte aligned, as CUDA's allocations are."""
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * _itemsize(dtype))
        address = int(self.driver("cuMemAlloc", nbytes))
        self._memory[address] = nbytes
        array = DeviceArray(address, tuple(shape), dtype)
        weakref.finalize(array, self._release, address).atexit = False
        return array

    def allocate(self, words: int) -> Arena:
        memory = self.empty((words,), "int32")
        self.driver("cuMemsetD32Async", memory.address, 0, words, self.stream)
        return Arena(memory, self.upload(np.array([memory.address], np.int64)))

    def upload(self, array: NDArray[Any], into: DeviceArray | None = None) -> DeviceArray:
        """A copy of a host array, which may change as soon as this returns.

        ``into`` is written instead of new memory, as a captured graph needs it; it may be longer than the array.
        """
        host = np.ascontiguousarray(array)
        target = self.empty(host.shape, str(host.dtype)) if into is None else into
        if host.nbytes > target.nbytes:
            raise ValueError(f"{host.nbytes} bytes do not fit into an array of {target.nbytes}")
        if host.nbytes:
            staging = self._stage(host.nbytes)
            ctypes.memmove(staging.pointer, host.ctypes.data, host.nbytes)
            self.driver("cuMemcpyHtoDAsync", target.address, staging.pointer, host.nbytes, self.stream)
            self.driver("cuEventRecord", staging.event, self.stream)
        return target

    def download(self, array: DeviceArray) -> NDArray[Any]:
        """The array's contents; bfloat16 as uint16. Waits for the stream."""
        host = np.empty(array.shape, "uint16" if array.dtype == "bfloat16" else array.dtype)
        if host.nbytes:
            self.driver("cuMemcpyDtoHAsync", host.ctypes.data, array.address, host.nbytes, self.stream)
        self.synchronize()
        return host

    def pinned(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Host memory that the device copies to and from directly; valid until `close`."""
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
        pointer = int(self.driver("cuMemHostAlloc", nbytes, 0))
        self._pinned.append(pointer)
        memory: Any = (ctypes.c_char * nbytes).from_address(pointer)
        count = int(np.prod(shape, dtype=np.int64))
        host: NDArray[Any] = np.frombuffer(memory, dtype, count).reshape(shape)
        return host

    def read(self, array: DeviceArray, host: NDArray[Any]) -> None:
        """Copy the beginning of ``array`` to pinned ``host``, which holds it once the stream has come to here."""
        if host.nbytes > array.nbytes or not host.flags.c_contiguous:
            raise ValueError(f"cannot read {host.nbytes} bytes of an array of {array.nbytes} into {host.strides}")
        self.driver("cuMemcpyDtoHAsync", host.ctypes.data, array.address, host.nbytes, self.stream)

    def _release(self, address: int) -> None:
        if self._memory.pop(address, None) is not None:
            self.activate()
            self.driver("cuMemFree", address)

    def _stage(self, nbytes: int) -> _Staging:
        """Pinned memory whose last copy is done."""
        for staging in self._staging:
            if staging.nbytes >= nbytes and self.driver.query("cuEventQuery", staging.event):
                return staging
        rounded = -(-nbytes // _STAGING_STEP) * _STAGING_STEP
        pointer = int(self.driver("cuMemHostAlloc", rounded, 0))
        event = self.driver("cuEventCreate", int(self.driver.enums.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._staging.append(_Staging(pointer, rounded, event))
        return self._staging[-1]

    # Work.

    def prepare(self, variants: Iterable[Variant]) -> None:
        """Load kernels before they are launched, and before anything is captured."""
        self._kernels.prepare(variants)

    def launch(self, launch: Launch) -> None:
        self._kernels.launch(launch, self.stream)

    @property
    def _kernels(self) -> CubinLauncher:
        if self._launcher is None:
            raise ValueError("this device was made without kernels; give it the folder of cubins")
        return self._launcher

    def event(self) -> Event:
        """A point in the stream, to wait for or to measure by; not yet recorded."""
        return Event(self, self.driver("cuEventCreate", int(self.driver.enums.CUevent_flags.CU_EVENT_DEFAULT)))

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record what is put on the stream in the body instead of running it; launch the graph afterwards.

        Addresses and grids are recorded as they are. Allocate, upload and `prepare` before.
        """
        # Relaxed: an array that Python frees meanwhile calls cuMemFree, which must not break the capture.
        mode = self.driver.enums.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.driver("cuStreamBeginCapture", self.stream, mode)
        graph = Graph(self)
        try:
            yield graph
        except BaseException:
            self._end_broken_capture()
            raise
        captured = self.driver("cuStreamEndCapture", self.stream)
        graph.instantiate(captured)

    def _end_broken_capture(self) -> None:
        """Leave capture mode; the body's exception is what matters, whatever CUDA makes of the rest."""
        try:
            captured = self.driver("cuStreamEndCapture", self.stream)
        except CudaError:  # the capture was invalidated, and has ended
            return
        self.driver("cuGraphDestroy", captured)


@dataclass(frozen=True)
class _Staging:
    pointer: int
    nbytes: int
    event: Any


class Event:
    """A point in a device's stream."""

    def __init__(self, device: DriverDevice, handle: Any) -> None:
        self._device = device
        self._handle = handle

    def record(self) -> Event:
        """The point is behind all that has been put on the stream."""
        self._device.driver("cuEventRecord", self._handle, self._device.stream)
        return self

    def done(self) -> bool:
        """Whether the stream has come to the point."""
        return self._device.driver.query("cuEventQuery", self._handle)

    def wait(self) -> None:
        """Wait until the stream has come to the point."""
        self._device.driver("cuEventSynchronize", self._handle)

    def milliseconds_since(self, earlier: Event) -> float:
        """Time on the device between two points, both of which it has come to."""
        return float(self._device.driver("cuEventElapsedTime", earlier._handle, self._handle))

    def close(self) -> None:
        self._device.driver("cuEventDestroy", self._handle)


class Graph:
    """A captured piece of a device's stream."""

    def __init__(self, device: DriverDevice) -> None:
        self._device = device
        self._executable: Any = None

    def instantiate(self, captured: Any) -> None:
        """Make it launchable; takes the captured graph over."""
        try:
            self._executable = self._device.driver("cuGraphInstantiate", captured, 0)
        finally:
            self._device.driver("cuGraphDestroy", captured)

    def launch(self) -> None:
        """Put all of it on the stream. Raises ValueError before the capture has ended."""
        if self._executable is None:
            raise ValueError("the graph is not complete: launch it after the capture, and before it is closed")
        self._device.driver("cuGraphLaunch", self._executable, self._device.stream)

    def close(self) -> None:
        if self._executable is not None:
            self._device.driver("cuGraphExecDestroy", self._executable)
            self._executable = None
