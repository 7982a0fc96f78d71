"""The decoder as an ONNX file for TensorRT, attention as the plugin `lowkv::PagedAttention`, weights beside it.

    checkpoint --one tensor at a time--> model.onnx.data
    Decoder over tensors without data --torch.onnx.export--> graph --rewritten here--> model.onnx

The decoder that Torch runs is the one that is exported: it is traced, not written again. It is traced over tensors
that have shapes and no data, as inputs of the graph; then the inputs become initializers that point into the data
file, which is written straight from the checkpoint. So the model is never in memory, and nothing can fold a weight
into a second copy. Tied embeddings are one initializer: the logits multiply by it, and looking up gathers columns.

What tracing cannot say is traced as an operator of our own and rewritten: INT4 and FP8 products become
DequantizeLinear and MatMul, the form from which TensorRT makes its quantized kernels. Types are explicit everywhere
(the network is strongly typed): RMSNorm, rotation angles and, by recipe, logits in float32, the rest in 16 bit.

Rewriting and writing are `lowkv.engine.tensorrt.onnx_file`'s.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvattention.gpu.launches import layer_scales
from kvattention.gpu.schedule import LISTS
from kvattention.tensorrt.fields import PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, PluginFields
from lowkv.engine.tensorrt.onnx_file import (
    FP8_PRODUCT,
    INT4_PRODUCT,
    inline_tensor,
    rename,
    rewrite_products,
    write_data,
    write_model,
)
from lowkv.engine.tensorrt.profiles import ARENA, engine_inputs, group_input
from lowkv.errors import LowkvError
from lowkv.models.checkpoint import WeightsFormat, check_tensors, conversion_stage
from lowkv.models.decoder import Decoder, candidates, rotary_frequencies
from lowkv.models.quantized import Fp8Matrix, Int4Matrix, QuantizedMatrix, assembled, unpack

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray
    from torch import Tensor

    from kvattention import LayerSpec
    from lowkv.engine.progress import Progress
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.config import ModelConfig
    from lowkv.recipe import Recipe

CANDIDATES = 256
"""Logits of each row that leave the engine; a smaller vocabulary leaves as a whole."""

OUTPUTS = ("values", "ids", "lse")
"""float32 [R, N], int32 [R, N], float32 [R]: see `lowkv.models.decoder.candidates`."""

OPSET = 21
"""The first in which DequantizeLinear knows INT4 and blocks."""

FREQUENCIES = "inverse_frequencies"
_EXAMPLE = {"T": 7, "R": 3, "S": 4, "B": 5, "A": 6, "W": 8, "P": 9, "C": 10}
"""Sizes to trace with: different ones and none of 1, so that no two dimensions are taken for one another."""

_LARGEST_DIM = 2**20


def export_onnx(
    checkpoint: Checkpoint,
    config: ModelConfig,
    plan: CachePlan,
    recipe: Recipe,
    path: Path,
    progress: Progress,
    scales: Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]] | None = None,
) -> Path:
    """Writes the model to `path` and its weights to a file beside it.

    Args:
        checkpoint: the model's weights.
        config: the checkpoint's.
        plan: every layer's KV format.
        recipe: its weights, lm_head and fp8_query say in which precision what is computed.
        path: of the ONNX file; the weights go to `path` + ".data".
        progress: told of the stages and of the bytes of weights written.
        scales: per layer (K scales [kv_heads, head_dim] or [kv_heads], V scales [kv_heads]), float32, of 8-bit keys
            and values; None is all ones.

    Returns:
        `path`.

    Raises:
        LowkvError: onnx or onnxscript is not installed, or the recipe does not fit the model.
    """
    _check_installed()
    weights = WeightsFormat.from_recipe(recipe)
    check_tensors(checkpoint)
    layout = dict(_offset_layout(weights.layout(config, checkpoint), weights.dtype))
    specs = plan.layer_specs(scales)
    progress.begin("exporting the model to ONNX")
    model = _trace(_Traced(config, _fields(specs, config, recipe), plan.group_of), layout, config, len(plan.groups))
    rewrite_products(model)
    data = path.with_name(path.name + ".data")
    progress.begin(
        conversion_stage(checkpoint, weights), sum(prod(shape) * dtype.itemsize for shape, dtype in layout.values())
    )
    initializers = write_data(data, _with_offsets(weights.tensors(checkpoint)), weights.dtype, progress.advance)
    initializers.append(inline_tensor(FREQUENCIES, rotary_frequencies(config)))
    initializers += [inline_tensor(scales_name(index), scales) for index, scales in enumerate(_kv_scales(specs))]
    write_model(model, initializers, path)
    return path


def scales_name(layer: int) -> str:
    """The initializer float32 [kv_heads, head_dim + 1] of a layer's K scales, by channel, and V scales."""
    return f"scales_{layer}"


def _check_installed() -> None:
    for package in ("onnx", "onnxscript"):
        if find_spec(package) is None:
            raise LowkvError(
                "exporting to ONNX needs packages that are not here",
                got=f"no {package}",
                expected="onnx and onnxscript",
                fix="pip install 'lowkv[cpu,tensorrt]'",
            )


def _fields(specs: Sequence[LayerSpec], config: ModelConfig, recipe: Recipe) -> list[PluginFields]:
    def fp8_query(spec: LayerSpec) -> bool:
        return recipe.kv_cache.fp8_query and spec.cold.k.name == spec.cold.v.name == "e4m3"

    return [PluginFields.from_layer(i, spec, config.heads, fp8_query(spec)) for i, spec in enumerate(specs)]


def _kv_scales(specs: Sequence[LayerSpec]) -> Tensor:
    """[layers, kv_heads, head_dim + 1], as the plugin takes them."""
    return torch.from_numpy(layer_scales(specs))


# -- zero points ---------------------------------------------------------------------------------------------
#
# TensorRT decodes INT4 without zero points only. With them, x @ ((codes - zeros) * scales) is x @ (codes * scales) less
# the sums of x over its groups @ (zeros * scales): a second, small product, whose matrix is stored in place of zeros.

_ZEROS, OFFSETS = ".zeros", ".offsets"


def _offset_layout(
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    for name, (shape, stored) in layout.items():
        if name.endswith(_ZEROS):
            yield name.removesuffix(_ZEROS) + OFFSETS, ((shape[0], 2 * shape[1]), dtype)
        else:
            yield name, (shape, stored)


def _with_offsets(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    scales = None
    for name, tensor in tensors:
        if name.endswith(_ZEROS):
            assert scales is not None
            yield name.removesuffix(_ZEROS) + OFFSETS, unpack(tensor) * scales
        else:
            scales = tensor  # those of a matrix come right before its zeros
            yield name, tensor


# -- tracing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _TracedMatrix:
    """A quantized matrix whose product is an operator that `_rewrite_products` knows."""

    matrix: Int4Matrix | Fp8Matrix
    offsets: Tensor | None  # [in / group_size, out]

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def prepared(self) -> QuantizedMatrix:
        return self

    def matmul(self, x: Tensor) -> Tensor:
        matrix = self.matrix
        if isinstance(matrix, Int4Matrix):
            x = x if matrix.smoothing is None else x * matrix.smoothing
            inputs = [x, matrix.codes, matrix.scales]
            product = self._product(INT4_PRODUCT, inputs, {"group_size": matrix.group_size})
            if self.offsets is None:
                return product
            return product - x.reshape(x.shape[0], -1, matrix.group_size).sum(-1) @ self.offsets
        inputs = [x, matrix.codes, matrix.scale, *([] if matrix.input_scale is None else [matrix.input_scale])]
        return self._product(FP8_PRODUCT, inputs, {})

    def _product(self, name: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> Tensor:
        return _symbolic(name, inputs, attributes, self.dtype, (inputs[0].shape[0], self.shape[1]))


class _Traced(torch.nn.Module):
    """The whole engine: tokens and lists in, candidates out."""

    def __init__(self, config: ModelConfig, fields: Sequence[PluginFields], group_of: Sequence[int]) -> None:
        super().__init__()
        self._config = config
        self._group_of = group_of
        self._groups = max(group_of) + 1
        self._attributes = [
            field.to_mapping() | {"plugin_namespace": PLUGIN_NAMESPACE, "plugin_version": PLUGIN_VERSION}
            for field in fields
        ]

    def forward(self, weights: dict[str, Tensor], inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(zip(engine_inputs(self._groups), inputs, strict=True))
        weights = dict(weights)
        frequencies = weights.pop(FREQUENCIES)
        scales = [weights.pop(scales_name(layer)) for layer in range(self._config.layers)]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            lists = (given[group_input(name, self._group_of[layer])] for name in LISTS)
            operands = (q, k, v, given[ARENA], scales[layer], *lists)
            return _symbolic(PLUGIN_NAME, operands, self._attributes[layer], q.dtype, q.shape)

        offsets = {name.removesuffix(OFFSETS): weights.pop(name) for name in list(weights) if name.endswith(OFFSETS)}
        matrices: dict[str, Tensor | QuantizedMatrix] = {
            name: weight if isinstance(weight, torch.Tensor) else _TracedMatrix(weight, offsets.get(name))
            for name, weight in assembled(weights).items()
        }
        decoder = Decoder(self._config, matrices, frequencies)
        return candidates(decoder.forward(given["tokens"], given["positions"], attention, given["rows"]), CANDIDATES)


def _symbolic(
    name: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any], dtype: torch.dtype, shape: Sequence[Any]
) -> Tensor:
    """An operator of our own domain, which the exporter writes down as it is."""
    operator = f"{PLUGIN_NAMESPACE}::{name}"
    return torch.onnx.ops.symbolic(operator, inputs, dict(attributes), dtype=dtype, shape=shape, version=1)


def _trace(
    traced: _Traced, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], config: ModelConfig, groups: int
) -> onnx.ModelProto:
    """The graph, with weights as inputs of their own names before those of an engine with so many cache groups."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    shapes = dict(layout)
    shapes[FREQUENCIES] = ((len(config.ropes), config.head_dim // 2), torch.float32)
    shapes |= {
        scales_name(layer): ((config.kv_heads, config.head_dim + 1), torch.float32) for layer in range(config.layers)
    }
    inputs = engine_inputs(groups)
    dims = {letter: torch.export.Dim(letter, min=1, max=_LARGEST_DIM) for letter in _EXAMPLE}
    with FakeTensorMode():  # shapes and types, no data
        weights = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        given = [
            torch.empty(
                [_EXAMPLE[size] if isinstance(size, str) else size for size in sizes],
                dtype=torch.int64 if name == ARENA else torch.int32,
            )
            for name, sizes in inputs.items()
        ]
    dynamic = [
        {axis: dims[size] for axis, size in enumerate(sizes) if isinstance(size, str)} or None
        for sizes in inputs.values()
    ]
    with _quiet(), torch.inference_mode():
        program = torch.onnx.export(
            traced.eval(),
            (weights, given),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(dict.fromkeys(weights), dynamic),
            output_names=list(OUTPUTS),
            optimize=True,
            verbose=False,
        )
    assert program is not None
    model: onnx.ModelProto = program.model_proto
    called = {f"weights_{name.replace('.', '_')}": name for name in shapes}  # as `forward` calls them
    rename(model, called | {f"inputs_{index}": name for index, name in enumerate(inputs)})
    assert [value.name for value in model.graph.input] == [*shapes, *inputs]
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what the exporter says of operators of other packages, of shared dimensions and of itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)
