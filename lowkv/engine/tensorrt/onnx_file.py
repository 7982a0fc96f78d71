"""From the graph that Torch's exporter made to the files on disk: quantized products, names, weights.

The same input gives the same bytes: names depend on the graph alone, and what the exporter notes of the machine it ran
on (files, lines, versions) is dropped. Nothing here knows the decoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import lowkv
from kvattention.tensorrt.fields import PLUGIN_NAME, PLUGIN_NAMESPACE

if TYPE_CHECKING:
    import onnx
    from torch import Tensor

INT4_PRODUCT = "Int4MatMul"
"""(x, codes, scales) with group_size: x times an `Int4Matrix`, zero points aside."""

FP8_PRODUCT = "Fp8MatMul"
"""(x, codes, scale, input_scale?): x, rounded if there is a scale for that, times an `Fp8Matrix`."""

_ALIGNMENT = 64
"""Of every tensor in the data file, in bytes."""

_FP8_ZERO = "fp8_zero"
_SCALARS = (".scale", ".scales", ".input_scale")

_TYPES = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float8_e4m3fn: "FLOAT8E4M3FN",
    torch.uint8: "INT4",  # two to a byte, the first in the low half: as `Int4Matrix` has them
}


# -- quantized products --------------------------------------------------------------------------------------


def rewrite_products(model: onnx.ModelProto) -> None:
    """Turns the products of quantized matrices into standard operators, named by the matrix.

    TensorRT reads weight-only INT4 from DequantizeLinear -> MatMul, and FP8 from a MatMul both of whose inputs come
    out of DequantizeLinear, the activations' behind a QuantizeLinear.
    """
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.domain == PLUGIN_NAMESPACE and node.op_type == INT4_PRODUCT:
            nodes += _int4_product(node)
        elif node.domain == PLUGIN_NAMESPACE and node.op_type == FP8_PRODUCT:
            nodes += _fp8_product(node)
        else:
            node.name = ""  # the exporter's; `write_model` gives all that have none
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _int4_product(node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
    from onnx.helper import make_node

    x, codes, scales = node.input
    matrix = codes.removesuffix(".codes")
    weight = f"{matrix}.decoded"
    group_size = next(attribute.i for attribute in node.attribute if attribute.name == "group_size")
    return (
        make_node("DequantizeLinear", [codes, scales], [weight], weight, axis=0, block_size=group_size),
        make_node("MatMul", [x, weight], node.output, f"{matrix}.product"),
    )


def _fp8_product(node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
    from onnx.helper import make_node

    x, codes, scale, *parameters = node.input
    matrix = codes.removesuffix(".codes")
    weight, code, rounded = f"{matrix}.decoded", f"{matrix}.input_codes", f"{matrix}.input_decoded"
    # The axis counts only where there is a scale for every output.
    decode = make_node("DequantizeLinear", [codes, scale], [weight], weight, axis=1)
    if not parameters:
        return decode, make_node("MatMul", [x, weight], node.output, f"{matrix}.product")
    (input_scale,) = parameters
    return (
        make_node("QuantizeLinear", [x, input_scale, _FP8_ZERO], [code], code),
        make_node("DequantizeLinear", [code, input_scale], [rounded], rounded),
        decode,
        make_node("MatMul", [rounded, weight], node.output, f"{matrix}.product"),
    )


# -- weights -------------------------------------------------------------------------------------------------


def inline_tensor(name: str, tensor: Tensor) -> onnx.TensorProto:
    """A tensor inside the ONNX file."""
    proto = _tensor(name, tensor)
    proto.raw_data = _bytes(tensor)
    return proto


def write_data(
    path: Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, written: Callable[[int], None]
) -> list[onnx.TensorProto]:
    """Writes the tensors to a data file, as they come, and returns what the ONNX file says of them.

    Args:
        path: of the data file, beside the ONNX file.
        tensors: as `lowkv.models.quantized` stores them.
        dtype: that matrices are decoded to. FP8 scales are converted to it; those of whole matrices stay inline.
        written: told the number of bytes of each tensor.
    """
    import onnx

    protos, has_fp8 = [], False
    with path.open("wb") as file:
        for name, tensor in tensors:
            if tensor.numel() == 1 and name.endswith(_SCALARS):
                protos.append(inline_tensor(name, tensor.to(dtype).reshape(())))
            else:
                tensor = tensor.to(dtype) if name.endswith(".scales") else tensor
                file.write(b"\0" * (-file.tell() % _ALIGNMENT))
                proto = _tensor(name, tensor)
                proto.data_location = onnx.TensorProto.EXTERNAL
                place = {"location": path.name, "offset": file.tell(), "length": tensor.nbytes}
                for key, value in place.items():
                    proto.external_data.add(key=key, value=str(value))
                tensor.contiguous().view(torch.uint8).numpy().tofile(file)
                protos.append(proto)
            has_fp8 |= tensor.dtype == torch.float8_e4m3fn
            written(tensor.nbytes)
    if has_fp8:
        protos.append(inline_tensor(_FP8_ZERO, torch.zeros((), dtype=torch.float8_e4m3fn)))
    return protos


def _tensor(name: str, tensor: Tensor) -> onnx.TensorProto:
    import onnx

    packed = tensor.dtype == torch.uint8
    shape = (*tensor.shape[:-1], 2 * tensor.shape[-1]) if packed else tensor.shape
    return onnx.TensorProto(name=name, dims=shape, data_type=onnx.TensorProto.DataType.Value(_TYPES[tensor.dtype]))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# -- the file ------------------------------------------------------------------------------------------------


def rename(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Gives values other names, wherever they occur."""
    graph = model.graph
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.get(value.name, value.name)


def write_model(model: onnx.ModelProto, initializers: Sequence[onnx.TensorProto], path: Path) -> None:
    """Writes the ONNX file: inputs of the initializers' names become the initializers."""
    graph = model.graph
    weights = {tensor.name for tensor in initializers}
    inputs = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)
    _give_names(model, weights)
    graph.initializer.extend(initializers)
    _strip(model)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _give_names(model: onnx.ModelProto, weights: set[str]) -> None:
    """Nodes are named by the weight or layer that they are about, or by their operator; values as their nodes."""
    graph = model.graph
    fixed = weights | {value.name for value in (*graph.input, *graph.output)}
    names = {tensor.name: f"constant_{index}" for index, tensor in enumerate(graph.initializer)}
    counts: Counter[str] = Counter()
    for node in graph.node:
        name = _node_name(node, weights)
        counts[name] += 1
        node.name = name if counts[name] == 1 else f"{name}_{counts[name]}"
        for index, output in enumerate(node.output):
            if output not in fixed:
                names[output] = node.name if len(node.output) == 1 else f"{node.name}.{index}"
    assert not fixed & set(names.values())
    rename(model, names)


def _node_name(node: onnx.NodeProto, weights: set[str]) -> str:
    if node.domain == PLUGIN_NAMESPACE and node.op_type == PLUGIN_NAME:
        layer = next(attribute.i for attribute in node.attribute if attribute.name == "layer")
        return f"layers.{layer}.attention"
    if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights:
        return f"{node.input[1]}.product"
    if node.op_type == "Gather" and node.input[0] in weights:
        return f"{node.input[0]}.lookup"
    return str(node.name or node.op_type)


def _strip(model: onnx.ModelProto) -> None:
    """Drops what the exporter noted beside the graph."""
    graph = model.graph
    for item in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        item.doc_string = ""
        del item.metadata_props[:]
    for name in ("value_info", "quantization_annotation", "metadata_props"):
        graph.ClearField(name)
    graph.name, graph.doc_string = "lowkv", ""
    for name in ("metadata_props", "functions", "training_info"):
        model.ClearField(name)
    model.doc_string, model.domain = "", ""
    model.producer_name, model.producer_version = "lowkv", lowkv.__version__
