"""The NVIDIA GPUs of this machine, asked of the driver itself: no Torch, no TensorRT, no other program needed.

Only what CUDA programs will see: CUDA_VISIBLE_DEVICES counts. Nothing is allocated on the devices.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}


@dataclass(frozen=True)
class Gpu:
    """One device, by the number that CUDA programs know it by."""

    index: int
    name: str
    sm: int
    """Compute capability, times ten."""
    memory: int
    """Bytes in all."""

    def __str__(self) -> str:
        return f"GPU {self.index}: {self.name} (SM{self.sm})"


def visible_gpus() -> tuple[Gpu, ...]:
    """Every GPU that a CUDA program started here would see; empty without a driver, or when it sees none."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_describe(driver, index) for index in range(count.value))


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, number = ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    return Gpu(index, name.value.decode(errors="replace"), 10 * capability[0] + capability[1], memory.value)
