"""A step as a TensorRT engine's inputs: how long every list is, padded how far, and where it lies in one buffer.

Everything of a step that the engine reads is int32 and travels in one copy. Where a list lies depends on the lists'
lengths alone, so that a CUDA graph, which remembers addresses, can be replayed for every step of the same lengths:

    | tokens | positions | rows | sequences | table | appends | narrow | wide | merges | sequences.1 | table.1 | ...
    each on a 256-byte border; `arena` does not change and has a place of its own

Decode steps are padded to few different lengths, so that few graphs serve all of them. Padding is null items, which
the kernels skip, and tokens that no sequence owns, whose outputs are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from kvattention.gpu.schedule import LISTS, make_schedule, pad_schedule
from lowkv.engine.tensorrt.profiles import ARENA, StepLimits, group_input
from lowkv.serving.executor import step_positions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from lowkv.kvcache import Step
    from lowkv.kvcache.plan import CachePlan

ALIGNMENT = 64
"""In 4-byte words: 256 bytes, as the device's own allocations are aligned."""

OUTPUTS = ("values", "ids", "lse")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Where tensors of 4-byte elements lie in one buffer."""

    shapes: Mapping[str, Shape]
    offsets: Mapping[str, int]
    """In words."""
    words: int

    @classmethod
    def of(cls, shapes: Mapping[str, Shape]) -> Layout:
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
        return cls(shapes, offsets, end)

    def pack(self, arrays: Mapping[str, NDArray[np.int32]]) -> NDArray[np.int32]:
        """One vector with every array in its place."""
        packed = np.zeros(self.words, np.int32)
        for name, shape in self.shapes.items():
            self.view(packed, name)[...] = arrays[name].reshape(shape)
        return packed

    def view(self, packed: NDArray[np.int32], name: str) -> NDArray[np.int32]:
        """A tensor's place in the vector, in its shape."""
        start = self.offsets[name]
        return packed[start : start + prod(self.shapes[name])].reshape(self.shapes[name])


@lru_cache(maxsize=256)  # steps are alike
def input_layout(dims: StepLimits, groups: int) -> Layout:
    """Where the inputs of a step of these lengths lie, `arena` aside."""
    return Layout.of({name: shape for name, shape in dims.shapes(groups).items() if name != ARENA})


def output_layout(rows: int, candidates: int) -> Layout:
    """Where the candidates of so many rows lie."""
    shapes: dict[str, Shape] = {"values": (rows, candidates), "ids": (rows, candidates), "lse": (rows,)}
    return Layout.of(shapes)


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One step, ready to be uploaded."""

    dims: StepLimits
    """Lengths of the lists, padding included."""
    decode: bool
    """Every sequence has one token and wants its candidates: the step goes through the decode profile."""
    packed: NDArray[np.int32]


def step_inputs(
    tokens: NDArray[np.int64], step: Step, rows: NDArray[np.int64], heads: int, plan: CachePlan, most: StepLimits
) -> StepInputs:
    """A step's inputs; a decode step is padded, up to `most`, the decode profile's limits."""
    schedules = [make_schedule(batch, heads, plan.kv_heads, plan.group_size) for batch in step.batches]
    schedule = schedules[0]  # the others' lists are as long
    dims = StepLimits(
        T=len(tokens),
        R=max(1, len(rows)),  # a dimension is 1 at least: without rows, the candidates of token 0 are not read
        S=len(schedule.sequences),
        B=schedule.table.shape[1],
        A=len(schedule.appends),
        W=len(schedule.narrow),
        P=len(schedule.wide),
        C=len(schedule.merges),
    )
    decode = len(tokens) == len(rows) == len(schedule.sequences)
    if decode:
        dims = padded(dims, most)
        schedules = [pad_schedule(each, dims.S, dims.B, dims.A, dims.W, dims.P, dims.C) for each in schedules]
    arrays = {
        "tokens": _lengthened(tokens, dims.T),
        "positions": _lengthened(step_positions(step), dims.T),
        "rows": _lengthened(rows, dims.R),
        **{group_input(name, group): getattr(each, name) for group, each in enumerate(schedules) for name in LISTS},
    }
    return StepInputs(dims, decode, input_layout(dims, len(schedules)).pack(arrays))


def padded(dims: StepLimits, most: StepLimits) -> StepLimits:
    """The lengths that a decode step is padded to: powers of two, and never beyond the profile.

    A sequence's merge is there or not, and costs nothing when it is not: as many as sequences saves half the graphs.
    """
    wanted = vars(dims) | {"C": max(dims.C, dims.S)}
    return StepLimits(**{name: min(_power_of_2(size), getattr(most, name)) for name, size in wanted.items()})


def _power_of_2(n: int) -> int:
    """The next one, n itself included."""
    return 1 << (n - 1).bit_length()


def _lengthened(array: NDArray[np.int64], length: int) -> NDArray[np.int32]:
    """As int32, with zeros up to that length."""
    longer = np.zeros(length, np.int32)
    longer[: len(array)] = array
    return longer
