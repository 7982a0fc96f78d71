"""Steps of a TensorRT engine: bindings, execution contexts, CUDA graphs, and one copy each way.

TensorRT wants one execution context for each captured graph, since a graph remembers its context's state; contexts
share one block of activation memory, which is safe because they run one after the other on one stream. So a decode
step's lengths are a key:

    first seen      a context of its own; the step is enqueued, which also warms it up
    seen again      captured, and the graph launched (or enqueued once more, if TensorRT is not ready for that)
    from then on    the graph launched

The least recently used are dropped beyond `GRAPHS`. Steps with prompts in them are enqueued in a context of their own.

TensorRT (`engine`, its contexts) and the GPU (`device`) are reached through the few methods named here, so that tests
can stand in for both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lowkv.engine.tensorrt.profiles import ARENA
from lowkv.errors import LowkvError
from lowkv.serving.executor import Candidates
from lowkv.serving.tensorrt.inputs import OUTPUTS, input_layout, output_layout, step_inputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lowkv.engine.tensorrt.profiles import Profile, StepLimits
    from lowkv.kvcache import KVCache, Step

GRAPHS = 32
"""Captured graphs that are kept. Each holds a context: host memory, and no device memory but TensorRT's own."""

PREFILL, DECODE = 0, 1
"""Indices of the engine's optimization profiles (`lowkv.engine.tensorrt.profiles.engine_profiles`)."""


class Array(Protocol):
    """Device memory; as an integer it is its address."""

    def __index__(self) -> int: ...


class Graph(Protocol):
    def launch(self) -> None: ...
    def close(self) -> None: ...


class StepDevice(Protocol):
    """What a step needs of a GPU (`kvattention.gpu.driver.DriverDevice`); all in the order of one stream."""

    stream: int

    def activate(self) -> None: ...
    def empty(self, shape: tuple[int, ...], dtype: str) -> Array: ...
    def upload(self, array: NDArray[Any], into: Any = None) -> Array: ...
    def pinned(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]: ...
    def read(self, array: Any, host: NDArray[Any]) -> None: ...
    def synchronize(self) -> None: ...
    def capture(self) -> AbstractContextManager[Graph]: ...


@dataclass(frozen=True)
class Session:
    """A deserialized engine, as far as steps need it."""

    name: str
    """For people: TensorRT's version and the GPU."""
    new_context: Callable[[bool], Any]
    """A `trt.IExecutionContext` that brings no activation memory; True: for steps of one shape again and again."""
    capturable: Callable[[Any, int], bool]
    """Whether a context's next step can be captured on a stream."""
    activation_bytes: int
    candidates: int
    """Columns of the outputs values and ids."""
    errors: Callable[[], str]
    """What TensorRT has said went wrong."""


@dataclass(eq=False)
class _Captured:
    context: Any
    graph: Graph | None = None


class TensorRTExecutor:
    """A TensorRT engine over a KV cache whose arena is on the same device."""

    def __init__(
        self,
        session: Session,
        cache: KVCache,
        device: StepDevice,
        heads: int,
        profiles: tuple[Profile, Profile],
        graphs: int = GRAPHS,
    ) -> None:
        self.session = session
        self.cache = cache
        self.device = device
        self.heads = heads
        self.limits: tuple[StepLimits, ...] = tuple(profile.limits for profile in profiles)
        self._most_graphs = graphs
        inputs, outputs = buffer_words(profiles, session.candidates)
        self._inputs = device.empty((inputs,), "int32")
        self._outputs = device.empty((outputs,), "int32")
        self._activations = device.empty((session.activation_bytes,), "uint8")
        self._landing: NDArray[np.int32] = device.pinned((outputs,), "int32")
        self._prefill = self._new_context(PREFILL)
        self._decode: OrderedDict[StepLimits, _Captured] = OrderedDict()

    @property
    def description(self) -> str:
        return self.session.name

    def execute(self, tokens: NDArray[np.int64], step: Step, rows: NDArray[np.int64]) -> Candidates:
        """Feeds `tokens` [T] of `step` and returns the candidates after the tokens at `rows` [S]."""
        self.device.activate()  # the thread that steps need not be the one that opened the engine
        inputs = step_inputs(tokens, step, rows, self.heads, self.cache.plan, self.limits[DECODE])
        self.device.upload(inputs.packed, into=self._inputs)
        if inputs.decode:
            self._run_decode(inputs.dims)
        else:
            self._bind(self._prefill, inputs.dims)
            self._enqueue(self._prefill)
        if not len(rows):
            return Candidates.none()
        layout = output_layout(inputs.dims.R, self.session.candidates)
        landed = self._landing[: layout.words]
        self.device.read(self._outputs, landed)
        self.device.synchronize()
        values, ids, lse = (layout.view(landed, name)[: len(rows)].copy() for name in OUTPUTS)
        return Candidates(values.view(np.float32), ids, lse.view(np.float32))

    def _run_decode(self, dims: StepLimits) -> None:
        known = self._decode.get(dims)
        if known is None:
            known = self._decode[dims] = _Captured(self._new_context(DECODE))
            self._bind(known.context, dims)
            self._enqueue(known.context)
            self._forget_the_oldest()
            return
        self._decode.move_to_end(dims)
        if known.graph is None and not self.session.capturable(known.context, self.device.stream):
            self._enqueue(known.context)
            return
        if known.graph is None:
            with self.device.capture() as graph:
                self._enqueue(known.context)
            known.graph = graph
        known.graph.launch()

    def _forget_the_oldest(self) -> None:
        if len(self._decode) <= self._most_graphs:
            return
        self.device.synchronize()  # it may still be running
        _, oldest = self._decode.popitem(last=False)
        if oldest.graph is not None:
            oldest.graph.close()

    def _new_context(self, profile: int) -> Any:
        context = self._checked(self.session.new_context(profile == DECODE), "create an execution context")
        context.set_device_memory(int(self._activations.__index__()), self.session.activation_bytes)
        done = context.set_optimization_profile_async(profile, self.device.stream)
        self._checked(done, f"use optimization profile {profile}")
        return context

    def _bind(self, context: Any, dims: StepLimits) -> None:
        """Shapes and addresses of a step of these lengths."""
        groups = len(self.cache.plan.groups)
        shapes = dims.shapes(groups)
        addresses = {ARENA: self.cache.words.pointer.__index__()}
        for array, layout in (
            (self._inputs, input_layout(dims, groups)),
            (self._outputs, output_layout(dims.R, self.session.candidates)),
        ):
            start = array.__index__()
            addresses |= {name: start + 4 * offset for name, offset in layout.offsets.items()}
        for name, shape in shapes.items():
            self._checked(context.set_input_shape(name, shape), f"take {name} of shape {shape}")
        for name, address in addresses.items():
            self._checked(context.set_tensor_address(name, address), f"take an address for {name}")

    def _enqueue(self, context: Any) -> None:
        self._checked(context.execute_async_v3(self.device.stream), "run a step")

    def _checked(self, result: Any, what: str) -> Any:
        """TensorRT answers False or None, and says why to its logger."""
        if not result:
            raise LowkvError(f"TensorRT could not {what}: {self.session.errors() or 'it does not say why'}")
        return result


def buffer_words(profiles: tuple[Profile, Profile], candidates: int) -> tuple[int, int]:
    """4-byte words of the buffers that hold the inputs, and the outputs, of any step within the profiles."""
    return (
        max(input_layout(profile.limits, profile.groups).words for profile in profiles),
        max(output_layout(profile.limits.R, candidates).words for profile in profiles),
    )
