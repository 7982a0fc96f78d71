"""An ONNX file of nothing but paged attention, layer upon layer, and its engine. Imported by path, and by processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnx.helper as h

from kvattention.tensorrt import INPUTS, PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, PluginFields

TENSOR = onnx.TensorProto
MOST = {"T": 256, "S": 16, "B": 64, "A": 40, "W": 128, "P": 24, "C": 64}


def attention_model(
    fields: Sequence[PluginFields],
    inputs: Mapping[str, tuple[int, list[Any]]] | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> bytes:
    """A node for each of ``fields``, the output of one the query of the next.

    ``inputs`` replaces inputs (type, dimensions), ``attributes`` nodes' attributes; None leaves one out.
    """
    first = fields[0]
    hot = TENSOR.FLOAT16 if first.hot == "f16" else TENSOR.BFLOAT16
    query, key = (hot, ["T", first.heads, first.head_dim]), (hot, ["T", first.kv_heads, first.head_dim])
    lists = {"sequences": ["S", 4], "table": ["S", "B"], "appends": ["A", 4], "narrow": ["W", 8], "wide": ["P", 8]}
    tensors: dict[str, Any] = {"q": query, "k": key, "v": key, "arena": (TENSOR.INT64, [1])}
    tensors |= {"scales": (TENSOR.FLOAT, [first.kv_heads, first.head_dim + 1])}
    tensors |= {name: (TENSOR.INT32, dims) for name, dims in (lists | {"merges": ["C", 4]}).items()}
    tensors |= inputs or {}
    nodes, q = [], "q"
    for index, layer in enumerate(fields):
        values = layer.to_mapping() | {"plugin_namespace": PLUGIN_NAMESPACE, "plugin_version": PLUGIN_VERSION}
        values |= attributes or {}
        values = {name: value for name, value in values.items() if value is not None}
        names = [q, *INPUTS[1:]]
        q = f"attended_{index}"
        nodes.append(h.make_node(PLUGIN_NAME, names, [q], name=f"attention_{index}", domain="lowkv", **values))
    graph = h.make_graph(
        nodes,
        "attention",
        [h.make_tensor_value_info(name, *tensors[name]) for name in INPUTS],
        [h.make_tensor_value_info(q, *query)],
    )
    opsets = [h.make_opsetid("", 18), h.make_opsetid("lowkv", 1)]
    model: bytes = h.make_model(graph, opset_imports=opsets).SerializeToString()
    return model


class Parsed:
    """A parsed network, or why it was not; everything TensorRT said is in ``said``."""

    def __init__(self, trt: Any, model: bytes) -> None:
        said: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc,name-defined]
            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.ILogger.WARNING:
                    said.append(message)

        self.trt, self.said, self.logger = trt, said, Logger()
        self.builder = trt.Builder(self.logger)
        self.network = self.builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        self.parser = trt.OnnxParser(self.network, self.logger)
        self.ok = self.parser.parse(model)

    def build(self, sm: int) -> bytes | None:
        """The engine's plan for a compute capability, whatever GPU is here."""
        trt, config = self.trt, self.builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
        profile = self.builder.create_optimization_profile()
        for index in range(self.network.num_inputs):
            tensor = self.network.get_input(index)
            varying = {"q": "T", "k": "T", "v": "T", "sequences": "S", "table": "SB", "appends": "A"}
            names = (varying | {"narrow": "W", "wide": "P", "merges": "C"}).get(tensor.name, "")
            least = [1 if size == -1 else size for size in tensor.shape]
            sizes = iter(names)
            most = [MOST[next(sizes)] if size == -1 else size for size in tensor.shape]
            profile.set_shape(tensor.name, least, most, most)
        config.add_optimization_profile(profile)
        plan = self.builder.build_serialized_network(self.network, config)
        return None if plan is None else bytes(plan)
