"""Real plans of every kind of engine, for three GPU generations, on a machine without a GPU.

A plan cannot be read here. What is checked is the network as TensorRT's parser made it, whose types a strongly typed
build keeps, and that the builder took it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from lowkv.engine.progress import NoProgress
from lowkv.engine.tensorrt.network import check_network, effective_precision
from lowkv.errors import LowkvError
from lowkv.kvcache.formats import FORMATS
from lowkv.models.checkpoint import open_checkpoint, tensor_shapes
from lowkv.models.config import ModelConfig
from lowkv.recipe import LmHeadConfig, Recipe, WeightsConfig
from tests.engine.tensorrt.conftest import Exported

if TYPE_CHECKING:
    Export = Callable[[str], Exported]

PLANS = ("fp16", "fp8", "k4v2", "kivi2", "mixed", "int4-kivi2")
INPUTS = {
    "tokens": ("int32", [-1]),
    "positions": ("int32", [-1]),
    "rows": ("int32", [-1]),
    "arena": ("int64", [1]),
    "sequences": ("int32", [-1, 4]),
    "table": ("int32", [-1, -1]),
    "appends": ("int32", [-1, 4]),
    "narrow": ("int32", [-1, 8]),
    "wide": ("int32", [-1, 8]),
    "merges": ("int32", [-1, 4]),
}
OUTPUTS = {"values": ("float32", [-1, 256]), "ids": ("int32", [-1, 256]), "lse": ("float32", [-1])}


@pytest.mark.parametrize("sm", [80, 89, 120])
@pytest.mark.parametrize("name", PLANS)
def test_every_engine_builds_and_holds_what_its_recipe_says(
    name: str, sm: int, exported: Export, tmp_path: Path
) -> None:
    network = exported(name)
    report = network.build(tmp_path / "model.plan", sm)
    assert (tmp_path / "model.plan").stat().st_size > 100_000
    formats = [FORMATS[layer.format] for layer in network.plan.layers]
    fields = [layer["fields"] for layer in report["attention"]]
    assert len(fields) == network.config.layers
    assert [(f["layer"], f["k_codec"], f["v_codec"]) for f in fields] == [
        (index, row.k.name, row.v.name) for index, row in enumerate(formats)
    ]
    assert {(f["hot"], f["heads"], f["kv_heads"], f["head_dim"], f["group_size"]) for f in fields} == {
        ("f16", 4, 2, 16, 32)
    }
    stored = {(matrix["weights"], matrix["group_size"]) for matrix in report["matrices"]}
    assert stored == {("int4", 32) if name.startswith("int4") else ("float16", None)}
    assert {matrix["output"] for matrix in report["matrices"]} == {"float16"}
    assert effective_precision(report["lm_head"]) == "float32"
    assert {b["name"]: (b["type"], b["dims"]) for b in report["inputs"]} == INPUTS
    assert {b["name"]: (b["type"], b["dims"]) for b in report["outputs"]} == OUTPUTS
    assert report["builder"]["sm"] == sm
    assert len(report["builder"]["layers"]) >= len(report["profiles"])


def test_gemma_3_builds_with_a_window_in_some_layers(
    tensorrt_recipe: Callable[..., Recipe], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Heads of 256, GELU, norms after attention and MLP, two rotary embeddings, in bfloat16."""
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "gemma3"))
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_act": None,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 64,
        "sliding_window_pattern": 3,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(ModelConfig.from_hf_config(config))
    save_file({name: torch.full(shape, 0.1) for name, shape in shapes.items()}, folder / "model.safetensors")
    recipe = tensorrt_recipe("k4v2")
    kv_cache = replace(recipe.kv_cache, model_dtype="bfloat16", skip_layers=("sliding_window",))
    recipe = replace(recipe, weights=WeightsConfig("bfloat16"), kv_cache=kv_cache)
    report = Exported.of(open_checkpoint(folder), recipe, tmp_path).build(tmp_path / "model.plan")
    fields = [layer["fields"] for layer in report["attention"]]
    assert [(f["window"], f["k_codec"], f["head_dim"]) for f in fields] == [
        (64, "bf16", 256),
        (64, "bf16", 256),
        (0, "int4", 256),
    ]
    assert {matrix["output"] for matrix in report["matrices"]} == {"bfloat16"}


def test_a_mixed_plan_has_a_format_for_every_layer(exported: Export) -> None:
    """So that the test above compares different things."""
    assert [layer.format for layer in exported("mixed").plan.layers] == ["fp16", "kivi4"]


def test_profiles_are_the_recipe_s(exported: Export, tmp_path: Path) -> None:
    prefill, decode = exported("kivi2").build(tmp_path / "model.plan")["profiles"]
    assert (prefill["name"], decode["name"]) == ("prefill", "decode")
    assert prefill["shapes"]["tokens"] == {"min": (1,), "opt": (64,), "max": (64,)}
    assert prefill["shapes"]["sequences"] == {"min": (1, 4), "opt": (8, 4), "max": (8, 4)}
    assert prefill["shapes"]["table"]["max"] == (8, 32)
    assert decode["shapes"]["tokens"]["max"] == (8,)
    assert decode["shapes"]["wide"]["max"] == (1, 8)
    assert list(prefill["shapes"]) == list(INPUTS)


def test_the_same_input_gives_the_same_report(exported: Export, tmp_path: Path) -> None:
    network = exported("k4v2")
    reports = [json.dumps(network.build(tmp_path / "model.plan")) for _ in range(2)]
    assert reports[0] == reports[1]


def test_fp8_weights_are_multiplied_in_fp8(exported: Export, tmp_path: Path) -> None:
    report = exported("fp8-weights").build(tmp_path / "model.plan")
    assert {(matrix["weights"], matrix["activations"]) for matrix in report["matrices"]} == {("fp8", "fp8")}
    assert report["lm_head"]["activations"] == "float32"


def test_fp8_queries_are_a_field_of_the_layers_that_have_them(exported: Export, tmp_path: Path) -> None:
    report = exported("fp8-query").build(tmp_path / "model.plan")
    assert [layer["fields"]["fp8_query"] for layer in report["attention"]] == [1, 1]


class Recorder(NoProgress):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.totals: dict[str, int | None] = {}
        self.done: dict[str, int] = {}

    def begin(self, stage: str, total: int | None = None) -> None:
        self.stages.append(stage)
        self.totals[stage] = total

    def advance(self, amount: int) -> None:
        self.done[self.stages[-1]] = self.done.get(self.stages[-1], 0) + amount


def test_tensorrt_s_phases_are_stages(exported: Export, tmp_path: Path) -> None:
    progress = Recorder()
    exported("fp16").build(tmp_path / "model.plan", progress=progress)
    assert progress.stages[0] == "TensorRT for SM89: reading the network"
    assert len(progress.stages) >= 3
    assert all(stage.startswith("TensorRT for SM89: ") for stage in progress.stages)
    assert progress.done
    assert all(done <= (progress.totals[stage] or 0) for stage, done in progress.done.items())


class Interrupts(NoProgress):
    """Ctrl-C in the middle of TensorRT's work."""

    def __init__(self) -> None:
        self.stages = 0

    def begin(self, stage: str, total: int | None = None) -> None:
        self.stages += 1
        if self.stages == 3:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_build(exported: Export, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        exported("fp16").build(tmp_path / "model.plan", progress=Interrupts())
    assert list(tmp_path.iterdir()) == []
    exported("fp16").build(tmp_path / "model.plan")  # TensorRT is none the worse for it


# -- what TensorRT, or we, refuse --------------------------------------------------------------------------------------


def edited(network: Exported, folder: Path, change: Callable[[Any], None]) -> Path:
    """A copy of the network's file after `change(graph)`."""
    import onnx

    for path in network.onnx.parent.iterdir():
        shutil.copy(path, folder / path.name)
    path = folder / network.onnx.name
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    onnx.save(model, path)
    return path


def node_of(graph: Any, operator: str, index: int = 0) -> Any:
    return [node for node in graph.node if node.op_type == operator][index]


def attribute(node: Any, name: str) -> Any:
    return next(attribute for attribute in node.attribute if attribute.name == name)


def test_an_operator_that_tensorrt_does_not_know(exported: Export, tmp_path: Path) -> None:
    network = exported("fp16")
    names: list[str] = []

    def change(graph: Any) -> None:
        node = node_of(graph, "PagedAttention", 1)
        node.op_type = "UnpagedAttention"
        names.append(node.name)

    onnx = edited(network, tmp_path, change)
    with pytest.raises(LowkvError, match=r"does not take layer (\S+) \(UnpagedAttention\): .") as caught:
        network.build(tmp_path / "model.plan", onnx=onnx)
    assert names[0] in str(caught.value)
    assert not (tmp_path / "model.plan").exists()


def test_a_plugin_version_that_is_not_here(exported: Export, tmp_path: Path) -> None:
    network = exported("fp16")

    def change(graph: Any) -> None:
        attribute(node_of(graph, "PagedAttention"), "plugin_version").s = b"0"

    with pytest.raises(LowkvError, match=r"does not take layer \S+ \(PagedAttention\)"):
        network.build(tmp_path / "model.plan", onnx=edited(network, tmp_path, change))


def test_a_layer_in_another_format_than_planned(exported: Export, tmp_path: Path) -> None:
    network = exported("kivi2")

    def change(graph: Any) -> None:
        attribute(node_of(graph, "PagedAttention", 1), "v_codec").s = b"int4"

    with pytest.raises(
        LowkvError, match=r"not the recipe's: v_codec of attention layer 1: got 'int4', expected 'int2'"
    ):
        network.build(tmp_path / "model.plan", onnx=edited(network, tmp_path, change))


def test_weights_that_are_not_there(exported: Export, tmp_path: Path) -> None:
    onnx = shutil.copy(exported("fp16").onnx, tmp_path / "model.onnx")
    with pytest.raises(LowkvError, match=r"does not take the exported network: .*initializer: lm_head"):
        exported("fp16").build(tmp_path / "model.plan", onnx=onnx)


def test_a_network_is_compared_with_everything_the_recipe_says(exported: Export, tmp_path: Path) -> None:
    network = exported("kivi2")
    report = network.build(tmp_path / "model.plan")
    config, recipe, plan = network.config, network.recipe, network.plan
    check_network(report, recipe, config, plan)
    for change, message in (
        ({"weights": WeightsConfig("float16", "int4", 32)}, r"matrices .*float16"),
        (
            {"weights": WeightsConfig("bfloat16"), "kv_cache": replace(recipe.kv_cache, model_dtype="bfloat16")},
            "matrices",
        ),
        ({"lm_head": LmHeadConfig("float16")}, r"precision of lm_head: got \('float32', "),
    ):
        with pytest.raises(LowkvError, match=message):
            check_network(report, replace(recipe, **change), config, plan)
    with pytest.raises(LowkvError, match=r"attention layers: got 2, expected 3"):
        check_network(report, recipe, replace(config, layers=3, windows=(None,) * 3), plan)
    quantized = exported("int4-kivi2")
    report = quantized.build(tmp_path / "model.plan")
    recipe = replace(quantized.recipe, weights=WeightsConfig("float16", "int4", 64))
    with pytest.raises(LowkvError, match=r"another precision: got \('layers.0.qkv.product int4, group_size 32'"):
        check_network(report, recipe, quantized.config, quantized.plan)


def test_what_only_the_builder_refuses(exported: Export, tmp_path: Path) -> None:
    """FP8 products for a GPU without FP8 tensor cores: `lowkv build` says so before, from the recipe."""
    with pytest.raises(LowkvError, match=r"tensorrt_rtx \S+ cannot build .* for SM80: .*sm80.*fp8"):
        exported("fp8-weights").build(tmp_path / "model.plan", sm=80)
    assert list(tmp_path.iterdir()) == []
