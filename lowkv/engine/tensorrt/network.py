"""What a parsed network holds, in the plain values of `report.json`, and whether that is what the recipe asked for.

This is the network that TensorRT's parser made of the ONNX file, before the builder fuses it: the one place where a
machine without a GPU can see types as TensorRT sees them, since a finished plan can only be read with a driver. A
strongly typed network's types are kept by the builder, so what stands here is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvattention.gpu.schedule import LISTS
from lowkv.engine.tensorrt.profiles import group_input
from lowkv.errors import LowkvError
from lowkv.kvcache.formats import FORMATS

if TYPE_CHECKING:
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.config import ModelConfig
    from lowkv.models.quantized import MatrixForm
    from lowkv.recipe import Recipe

_TYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "FP8": "fp8",
    "INT4": "int4",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
}
_PASSING = ("SHUFFLE", "CAST", "IDENTITY", "SQUEEZE", "UNSQUEEZE")
"""Layers that hand a weight on."""


def describe(trt: Any, network: Any) -> dict[str, Any]:
    """Layers, attention, matrix products and bindings of a parsed network."""
    graph = _Graph(trt, network)
    matrices = list(graph.matrices())
    return {
        "inputs": [_binding(network.get_input(index)) for index in range(network.num_inputs)],
        "outputs": [_binding(network.get_output(index)) for index in range(network.num_outputs)],
        "attention": list(graph.attention()),
        "matrices": matrices[:-1],
        "lm_head": matrices[-1] if matrices else None,
        "layers": [_layer(layer) for layer in graph.layers],
    }


def check_network(
    report: Mapping[str, Any],
    recipe: Recipe,
    config: ModelConfig,
    plan: CachePlan,
    kept: Mapping[str, MatrixForm | str] | None = None,
) -> None:
    """Raises `LowkvError` naming the first thing in the report that is not as the recipe says.

    `kept` are the matrices that came quantized in the checkpoint, in forms of their own (`kept_forms`).
    """
    for what, got, expected in _facts(report, recipe, config, plan, kept or {}):
        if got != expected:
            raise LowkvError(f"the network is not the recipe's: {what}", got=got, expected=repr(expected))


def _facts(
    report: Mapping[str, Any],
    recipe: Recipe,
    config: ModelConfig,
    plan: CachePlan,
    kept: Mapping[str, MatrixForm | str],
) -> Iterator[tuple[str, object, object]]:
    """(what, got, expected) for everything that can be compared."""
    attention = report["attention"]
    yield "attention layers", len(attention), config.layers
    specs = plan.layer_specs()
    for index, (layer, planned, spec) in enumerate(zip(attention, plan.layers, specs, strict=True)):
        row = FORMATS[planned.format]
        expected = {
            "layer": index,
            "hot": FORMATS[plan.hot].k.name,
            "k_codec": row.k.name,
            "v_codec": row.v.name,
            "window": planned.window or 0,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "group_size": plan.group_size,
            "hot_offset": spec.hot_offset,
            "cold_offset": spec.cold_offset,
            "fp8_query": int(recipe.kv_cache.fp8_query and row.k.name == row.v.name == "e4m3"),
        }
        for name, value in expected.items():
            yield f"{name} of attention layer {index}", layer["fields"].get(name), value
        lists = [group_input(name, plan.group_of[index]) for name in LISTS]
        yield f"lists of attention layer {index}", layer["lists"], lists
    matrices = [matrix for matrix in report["matrices"] if not matrix["name"].endswith(".offsets.product")]
    yield "matrices whose weights have another precision", _others(matrices, recipe, kept), ()
    head = report["lm_head"]
    yield "lm_head", head is not None, True
    yield "precision of lm_head", (*head["inputs"], head["output"]), (recipe.lm_head.effective,) * 3


def _others(matrices: list[dict[str, Any]], recipe: Recipe, kept: Mapping[str, MatrixForm | str]) -> tuple[str, ...]:
    quantized = recipe.weights.quantization
    form: tuple[str, int | None] = (recipe.weights.dtype if quantized == "none" else quantized, None)
    if quantized == "int4":
        form = ("int4", recipe.weights.group_size)
    others = []
    for matrix in matrices:
        own = kept.get(matrix["name"].removesuffix(".product"))
        expected = form if own is None else (recipe.weights.dtype, None)
        if own is not None and not isinstance(own, str) and own.kind != "none":
            expected = own.kind, own.group_size or None
        if (matrix["weights"], matrix["group_size"]) != expected:
            others.append(f"{matrix['name']} {matrix['weights']}, group_size {matrix['group_size']}")
    return tuple(others)


def effective_precision(matrix: Mapping[str, Any]) -> str:
    """In what a matrix product is computed: its inputs' type, and its output's where that is another."""
    inputs = dict.fromkeys(matrix["inputs"])
    text = " x ".join(inputs)
    return text if list(inputs) == [matrix["output"]] else f"{text} -> {matrix['output']}"


@dataclass
class _Graph:
    """A network's layers and who makes which tensor."""

    trt: Any
    network: Any

    def __post_init__(self) -> None:
        self.layers = [self.network.get_layer(index) for index in range(self.network.num_layers)]
        self.makers: dict[str, Any] = {
            layer.get_output(index).name: layer for layer in self.layers for index in range(layer.num_outputs)
        }

    def attention(self) -> Iterator[dict[str, Any]]:
        from kvattention.tensorrt import INPUTS, PLUGIN_NAME

        for layer in self.layers:
            if layer.type == self.trt.LayerType.PLUGIN_V3:
                name = layer.name
                layer.__class__ = self.trt.IPluginV3Layer
                plugin = layer.plugin
                if plugin.plugin_name == PLUGIN_NAME:
                    yield {
                        "name": name,
                        "precision": _type(layer.get_output(0)),
                        "fields": _fields(plugin),
                        "lists": [layer.get_input(INPUTS.index(each)).name for each in LISTS],
                    }

    def matrices(self) -> Iterator[dict[str, Any]]:
        """Products of activations and stored weights, in the network's order."""
        for layer in self.layers:
            if layer.type != self.trt.LayerType.MATRIX_MULTIPLY:
                continue
            weights = [found for index in range(2) if (found := self._weights(layer.get_input(index))) is not None]
            if len(weights) == 1:
                yield {
                    "name": layer.name,
                    **weights[0],
                    "inputs": [_type(layer.get_input(index)) for index in range(2)],
                    "output": _type(layer.get_output(0)),
                    "activations": self._activations(layer),
                }

    def _weights(self, tensor: Any) -> dict[str, Any] | None:
        """How the weight behind a tensor is stored; None where it is computed."""
        maker = self._behind(tensor)
        if maker is None:
            return None
        if maker.type == self.trt.LayerType.CONSTANT:
            return {"weights": _type(maker.get_output(0)), "group_size": None}
        if maker.type != self.trt.LayerType.DEQUANTIZE:
            return None
        source = self._behind(maker.get_input(0))
        if source is None or source.type != self.trt.LayerType.CONSTANT:
            return None
        codes, scale = source.get_output(0), maker.get_input(1)
        grouped = len(scale.shape) == len(codes.shape) == 2
        groups = [whole // part for whole, part in zip(codes.shape, scale.shape, strict=True)] if grouped else []
        return {"weights": _type(codes), "group_size": max(groups, default=None)}

    def _activations(self, layer: Any) -> str:
        """The narrowest type that the activations went through on their way into the product."""
        for index in range(2):
            tensor = layer.get_input(index)
            if self._weights(tensor) is None:
                maker = self._behind(tensor)
                narrow = maker is not None and maker.type == self.trt.LayerType.DEQUANTIZE
                return _type(maker.get_input(0) if narrow else tensor)
        return ""

    def _behind(self, tensor: Any) -> Any:
        """The layer that makes a tensor, past those that only hand it on; None for a network's input."""
        maker = self.makers.get(tensor.name)
        while maker is not None and _kind(maker) in _PASSING:
            maker = self.makers.get(maker.get_input(0).name)
        return maker


def _kind(layer: Any) -> str:
    return str(layer.type).rpartition(".")[2]


def _type(tensor: Any) -> str:
    name = str(tensor.dtype).rpartition(".")[2]
    return _TYPES.get(name, name.lower())


def _layer(layer: Any) -> dict[str, str]:
    precision = _type(layer.get_output(0)) if layer.num_outputs else ""
    return {"name": layer.name, "type": _kind(layer), "precision": precision}


def _binding(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "type": _type(tensor), "dims": list(tensor.shape)}


def _fields(plugin: Any) -> dict[str, Any]:
    """What the plugin itself says it would write into the plan."""
    return {field.name: _plain(field) for field in plugin.get_fields_to_serialize()}


def _plain(field: Any) -> str | int | float:
    if str(field.type).endswith("CHAR"):
        return bytes(field.data).rstrip(b"\0").decode()
    value: str | int | float = field.data.ravel()[0].item()
    return value
