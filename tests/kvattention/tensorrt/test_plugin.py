"""The plugin in the real TensorRT-RTX, as far as there is something to see without a GPU: parsing and building."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvattention.cases import CASES
from kvattention.gpu.schedule import workspace_bytes
from kvattention.tensorrt import INPUTS, PLUGIN_NAME, PLUGIN_NAMESPACE, PLUGIN_VERSION, PluginFields, register
from kvattention.tensorrt.fields import fields_from_collection, fields_to_collection
from kvattention.tensorrt.plugin import creator_class

CASE = CASES["plan-mixed"]
FIELDS = [PluginFields.from_layer(index, layer, CASE.heads) for index, layer in enumerate(CASE.layers())]


def test_the_order_of_inputs_is_fixed():
    """Engines are built with it: changing it means a new PLUGIN_VERSION."""
    names = "q k v arena scales sequences table appends narrow wide merges"
    assert PLUGIN_VERSION == "2"
    assert list(INPUTS) == names.split()


def registered(trt: Any) -> Any:
    return trt.get_plugin_registry().get_creator(PLUGIN_NAME, PLUGIN_VERSION, PLUGIN_NAMESPACE)


def make(trt: Any, fields: PluginFields = FIELDS[2]) -> Any:
    collection, arrays = fields_to_collection(trt, fields)
    plugin = registered(trt).create_plugin("layer", collection, trt.TensorRTPhase.BUILD)
    del arrays
    return plugin


@pytest.mark.parametrize("sm", [80, 89, 120])
def test_two_layers_build_for_a_gpu_that_is_not_here(trt: ModuleType, small_engine: ModuleType, sm: int):
    parsed = small_engine.Parsed(trt, small_engine.attention_model(FIELDS[1:3]))
    assert parsed.ok, parsed.said
    layers = [parsed.network.get_layer(index) for index in range(parsed.network.num_layers)]
    assert [layer.type for layer in layers] == [trt.LayerType.PLUGIN_V3] * 2
    output = parsed.network.get_output(0)
    assert (tuple(output.shape), output.dtype) == ((-1, CASE.heads, CASE.head_dim), trt.DataType.HALF)
    plan = parsed.build(sm)
    assert plan is not None, parsed.said
    # What the runtime looks the plugin up by, and the codecs of the second layer.
    assert plan.count(PLUGIN_NAME.encode()) >= 2
    assert b"int4" in plan
    assert b"int2" in plan


def test_bfloat16(trt: ModuleType, small_engine: ModuleType):
    case = CASES["bf16-int4"]
    fields = [PluginFields.from_layer(0, case.layers()[0], case.heads)]
    parsed = small_engine.Parsed(trt, small_engine.attention_model(fields))
    assert parsed.ok, parsed.said
    assert parsed.network.get_output(0).dtype == trt.DataType.BF16
    assert parsed.build(89) is not None, parsed.said


@pytest.mark.parametrize("fields", [*FIELDS, PluginFields.from_layer(9, CASE.layers()[1], CASE.heads, True)])
def test_a_plugin_equals_itself_after_serialization(trt: ModuleType, fields: PluginFields):
    plugin = make(trt, fields)
    assert plugin.fields == fields
    serialized = plugin.get_fields_to_serialize()
    assert fields_from_collection(serialized) == fields
    again = registered(trt).create_plugin("again", serialized, trt.TensorRTPhase.RUNTIME)
    assert again.fields == fields
    assert again.clone().fields == fields
    assert (again.plugin_name, again.plugin_namespace, again.plugin_version) == ("PagedAttention", "lowkv", "2")
    assert again.num_outputs == 1


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"window": None}, "lacks the fields window"),
        ({"k_codec": "int3"}, "field k_codec is 'int3'"),
        ({"heads": 5}, "5 query heads over 2 KV heads"),
    ],
)
def test_nodes_with_wrong_attributes_are_not_parsed(
    trt: ModuleType, small_engine: ModuleType, capfd: Any, attributes: dict[str, Any], message: str
):
    parsed = small_engine.Parsed(trt, small_engine.attention_model(FIELDS[:1], attributes=attributes))
    assert not parsed.ok
    assert message in capfd.readouterr().err  # where TensorRT puts exceptions of creators


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("arena", ("INT32", [1]), "arena is INT32, expected INT64"),
        ("q", ("FLOAT", ["T", 6, 64]), "q is FLOAT, expected HALF"),
        ("scales", ("FLOAT16", [2, 65]), "scales is HALF, expected FLOAT"),
        ("scales", ("FLOAT", [2, 2]), "scales is (2, 2), expected (2, 65)"),
        ("k", ("FLOAT16", ["T", 3, 64]), r"k is (-1, 3, 64), expected (-1, 2, 64)"),
        ("arena", ("INT64", [2]), r"arena is (2,), expected (1,)"),
        ("narrow", ("INT32", ["W", 4]), r"narrow is (-1, 4), expected (-1, 8)"),
        ("table", ("INT32", ["S"]), r"table is (-1,), expected (-1, -1)"),
    ],
)
def test_tensors_that_the_kernels_would_misread_are_refused(
    trt: ModuleType, small_engine: ModuleType, capfd: Any, name: str, tensor: tuple[str, list[Any]], message: str
):
    kind, dims = tensor
    inputs = {name: (getattr(small_engine.TENSOR, kind), dims)}
    parsed = small_engine.Parsed(trt, small_engine.attention_model(FIELDS[:1], inputs))
    assert not parsed.ok
    assert f"layer 0: {message}" in capfd.readouterr().err


def test_one_format_is_supported_at_every_position(trt: ModuleType):
    plugin = make(trt)
    types = ["HALF"] * 3 + ["INT64", "FLOAT"] + ["INT32"] * 6 + ["HALF"]
    every = [trt.DataType.__members__[name] for name in trt.DataType.__members__]
    for pos, want in enumerate(types):
        for kind in every:
            for form in trt.TensorFormat.__members__.values():
                descs = [trt.DynamicPluginTensorDesc() for _ in types]
                descs[pos].desc.type, descs[pos].desc.format = kind, form
                fits = kind == trt.DataType.__members__[want] and form == trt.TensorFormat.LINEAR
                assert plugin.supports_format_combination(pos, descs, len(INPUTS)) == fits, (pos, kind, form)


def test_the_workspace_is_for_the_longest_lists(trt: ModuleType):
    plugin = make(trt)
    descs = [trt.DynamicPluginTensorDesc() for _ in INPUTS]
    for desc, name in zip(descs, INPUTS, strict=True):
        length = {"narrow": 100, "wide": 7}.get(name, 3)
        desc.max, desc.min, desc.opt = [length, 8], [1, 8], [1, 8]
    assert plugin.get_workspace_size(descs, []) == workspace_bytes(100, 7, CASE.heads, CASE.kv_heads, CASE.head_dim)


def test_registering_again_changes_nothing(trt: ModuleType):
    creator = registered(trt)
    register(trt, None)
    assert registered(trt) is creator
    ours = [c for c in trt.get_plugin_registry().all_creators if c.name == PLUGIN_NAME]
    assert len(ours) == len({c.plugin_version for c in ours})


def test_other_versions_live_side_by_side(trt: ModuleType):
    registry = trt.get_plugin_registry()
    other = f"{PLUGIN_VERSION}-other"
    second = creator_class(trt)(version=other)
    assert registry.register_creator(second, PLUGIN_NAMESPACE)
    try:
        assert not registry.register_creator(creator_class(trt)(version=other), PLUGIN_NAMESPACE)
        assert registry.get_creator(PLUGIN_NAME, other, PLUGIN_NAMESPACE) is second
        assert registered(trt).plugin_version == PLUGIN_VERSION
    finally:
        registry.deregister_creator(second)


def test_someone_elses_plugin_of_the_same_name_is_refused(trt: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvattention.tensorrt.plugin._registered", {})
    with pytest.raises(RuntimeError, match=rf"already has a plugin lowkv::PagedAttention of version {PLUGIN_VERSION}"):
        register(trt, None)


def test_building_needs_neither_torch_nor_triton_nor_a_library_path():
    code = """
import sys, small_engine, kvattention.tensorrt as plugin
from kvattention.cases import CASES
from kvattention.tensorrt.libraries import import_tensorrt
trt = import_tensorrt("tensorrt_rtx")
plugin.register(trt, None)
layer, = CASES["int2-gqa3"].layers()
parsed = small_engine.Parsed(trt, small_engine.attention_model([plugin.PluginFields.from_layer(0, layer, 6)] * 2))
print(parsed.ok, len(parsed.build(89)) > 0, sorted({"torch", "triton", "cuda.bindings.driver"} & set(sys.modules)))
"""
    pytest.importorskip("tensorrt_rtx_libs")
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True True []"
