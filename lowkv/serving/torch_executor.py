"""The Torch decoder as an executor, on the CPU or on a GPU, called eagerly.

What differs between the two is in small adapters chosen once: how attention is reached (the CPU's kernels take NumPy,
the GPU's take tensors where they are) and how arrays travel (not at all, or through page-locked memory, one copy in
and one out per step).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lowkv.errors import LowkvError
from lowkv.models.decoder import candidates
from lowkv.serving.executor import CANDIDATES, Candidates, step_positions
from lowkv.serving.memory import Footprint, check_fits, torch_workspace

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from lowkv.engine.directory import EngineDir
    from lowkv.kvcache import KVCache, Step
    from lowkv.models.decoder import Decoder

_HOT_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtype in which the GPU kernels take q, k and v, by the plan's hot format."""


class TorchExecutor:
    """The Torch decoder over a KV cache; the cache's arena is on the device of the decoder's weights."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device = decoder.device
        self._attend = self._attend_on_device if cache.attention.name == "gpu" else self._attend_through_numpy
        self._link: Link = SameMemory() if self.device.type == "cpu" else CopiedMemory(self.device)

    @property
    def description(self) -> str:
        name = f" ({torch.cuda.get_device_name(self.device)})" if self.device.type == "cuda" else ""
        return f"Torch {torch.__version__} in {str(self.decoder.dtype).removeprefix('torch.')} on {self.device}{name}"

    def execute(self, tokens: NDArray[np.int64], step: Step, rows: NDArray[np.int64]) -> Candidates:
        """Feeds `tokens` [T] of `step` and returns the candidates after the tokens at `rows` [S]."""
        if not len(rows):
            self.hidden(tokens, step)
            return Candidates.none()
        with torch.inference_mode():
            return self._link.download(*candidates(self.logits(tokens, step, rows), CANDIDATES))

    def logits(self, tokens: NDArray[np.int64], step: Step, rows: NDArray[np.int64]) -> Tensor:
        """All logits after the tokens at `rows`: [S, vocab] float32."""
        ids, positions, wanted = self._link.upload(tokens, step_positions(step), rows)
        with torch.inference_mode():
            return self.decoder.logits(self._hidden(ids, positions, step)[wanted])

    def hidden(self, tokens: NDArray[np.int64], step: Step) -> Tensor:
        """The residual stream of all T tokens after the last layer, [T, hidden]; the KV cache is written."""
        ids, positions = self._link.upload(tokens, step_positions(step))
        return self._hidden(ids, positions, step)

    def _hidden(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor:
        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend(layer, q, k, v, step)

        with torch.inference_mode():
            return self.decoder.hidden(tokens, positions, attention)

    def _attend_through_numpy(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        out = self.cache.attend(layer, q.float().numpy(), k.float().numpy(), v.float().numpy(), step)
        return torch.from_numpy(out).to(self.decoder.dtype)

    def _attend_on_device(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        hot = _HOT_DTYPES[self.cache.plan.hot]  # a recipe's is the decoder's own dtype, and nothing is converted
        out: Tensor = self.cache.attend(layer, q.to(hot), k.to(hot), v.to(hot), step)
        return out.to(self.decoder.dtype)


class Link(Protocol):
    """How a step's arrays come to the device and its candidates back."""

    def upload(self, *arrays: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """The arrays as tensors on the device."""

    def download(self, values: Tensor, ids: Tensor, lse: Tensor) -> Candidates:
        """The candidates on the host, complete."""


class SameMemory:
    """The CPU's link: nothing is copied."""

    def upload(self, *arrays: NDArray[np.int64]) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(array) for array in arrays)

    def download(self, values: Tensor, ids: Tensor, lse: Tensor) -> Candidates:
        return Candidates(values.numpy(), ids.numpy(), lse.numpy())


class CopiedMemory:
    """A GPU's link: one copy in and one copy out per step, each through a page-locked buffer that is reused."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = 0
        self._locked = device.type == "cuda"
        self._in = self._buffer(1024, torch.int64)
        self._out = self._buffer(1024, torch.int32)
        self._copied = torch.cuda.Event() if self._locked else None  # type: ignore[no-untyped-call]

    def upload(self, *arrays: NDArray[np.int64]) -> tuple[Tensor, ...]:
        if self._locked:
            torch.cuda.set_device(self.device)  # a thread's own setting, and the thread that steps may be another
        sizes = [len(array) for array in arrays]
        if self._copied is not None:
            self._copied.synchronize()  # a step without candidates does not wait: its copy may still be on its way
        self._in = self._grown(self._in, sum(sizes))
        staged = self._in[: sum(sizes)]
        np.concatenate(arrays, out=staged.numpy())
        there = staged.to(self.device, non_blocking=True, copy=True)
        self.copies += 1
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))
        return torch.split(there, sizes)

    def download(self, values: Tensor, ids: Tensor, lse: Tensor) -> Candidates:
        count, width = values.shape
        packed = torch.cat((values.view(torch.int32), ids, lse.view(torch.int32)[:, None]), 1)  # [S, 2 N + 1]
        self._out = self._grown(self._out, packed.numel())
        staged = self._out[: packed.numel()].view(count, 2 * width + 1)
        staged.copy_(packed, non_blocking=True)
        self.copies += 1
        if self._locked:
            torch.cuda.current_stream(self.device).synchronize()
        host = staged.numpy()
        return Candidates(
            host[:, :width].view(np.float32).copy(),  # the buffer is the next step's
            host[:, width : 2 * width].copy(),
            host[:, 2 * width].copy().view(np.float32),
        )

    def _grown(self, buffer: Tensor, size: int) -> Tensor:
        return buffer if len(buffer) >= size else self._buffer(1 << (size - 1).bit_length(), buffer.dtype)

    def _buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._locked)


def open_on_cpu(engine: EngineDir, budget: int, threads: int | None) -> TorchExecutor:
    """A `cpu` engine on this machine's cores."""
    # Torch is imported before kvattention's CPU kernels: their thread pool then shares the OpenMP runtime it brings.
    from kvattention import select
    from lowkv.kvcache import KVCache

    if threads is not None:
        torch.set_num_threads(threads)
    cache = KVCache(engine.cache_plan, budget, select("cpu", threads=threads), engine.scales)
    return TorchExecutor(engine.load_decoder(), cache)


def open_on_cuda(engine: EngineDir, budget: int, device_id: int) -> TorchExecutor:
    """A `cuda` engine on one GPU. Raises `LowkvError` when there is none, or too little of its memory is free."""
    from kvattention.gpu.attention import GpuAttention
    from kvattention.gpu.torch_device import TorchDevice
    from lowkv.kvcache import KVCache

    device = _cuda_device(device_id)
    torch.cuda.set_device(device)
    free, _ = torch.cuda.mem_get_info(device)
    quantized = engine.recipe.weights.quantization != "none"
    workspace = torch_workspace(engine.model_config, engine.recipe.serving, quantized=quantized)
    where = f"GPU {device_id} ({torch.cuda.get_device_name(device)})"
    check_fits(Footprint(budget, engine.weight_bytes, workspace), free, where)
    fp8_query = engine.recipe.kv_cache.fp8_query
    if fp8_query and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise LowkvError(
            "kv_cache.fp8_query needs FP8 tensor cores",
            got=f"{where}, compute capability {capability[0]}.{capability[1]}",
            expected="8.9 or later",
            fix="leave kv_cache.fp8_query out of the recipe and build again",
        )
    attention = GpuAttention(TorchDevice(str(device)), fp8_query=fp8_query)
    cache = KVCache(engine.cache_plan, budget, attention, engine.scales)
    return TorchExecutor(engine.load_decoder(str(device)), cache)


def _cuda_device(device_id: int) -> torch.device:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_id >= found:
        built = f"PyTorch {torch.__version__}" + ("" if torch.version.cuda else ", built without CUDA")
        raise LowkvError(
            "this engine needs an NVIDIA GPU that PyTorch can use",
            got=f"GPU {device_id} of {found} ({built})",
            expected=f"a device id below {found}" if found else "at least one GPU",
            fix="serve it where there is one, or build the recipe with target: cpu",
        )
    return torch.device("cuda", device_id)
