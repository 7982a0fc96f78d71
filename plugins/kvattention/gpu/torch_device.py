"""Torch's memory and Triton's launcher: kernels on a CUDA GPU, or interpreted on the CPU under TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvattention.gpu import kernels
from kvattention.gpu.attention import Arena
from kvattention.gpu.launches import Launch


class TorchDevice:
    """``device`` is what Torch calls it: "cuda", "cuda:1"; "cpu" needs TRITON_INTERPRET=1 before the first import."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self.kernels: Any = kernels

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor.clone()
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def allocate(self, words: int) -> Arena:
        memory = torch.zeros(words, dtype=torch.int32, device=self.device)  # Torch aligns to 64 bytes or more
        return Arena(memory, self.upload(np.array([memory.data_ptr()], np.int64)))

    def launch(self, launch: Launch) -> None:
        variant = launch.variant
        kernel = getattr(self.kernels, variant.kernel)
        options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
        kernel[launch.grid](*launch.arguments, **variant.constants, **options)
