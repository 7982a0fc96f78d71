"""Model configs: read right, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowkv.errors import LowkvError
from lowkv.models.config import ModelConfig, RopeConfig
from lowkv.models.safetensors_checkpoint import read_config

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA_31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN2 = LLAMA_3_8B | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "use_sliding_window": False,
}
MISTRAL = LLAMA_3_8B | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
QWEN3 = LLAMA_3_8B | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
"""As transformers 4 writes it: embeddings are tied without a word."""

GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_3_70B, 70_553_706_496),
        (QWEN2, 494_032_768),
        (GEMMA3_1B, 999_885_952),  # what each model's card says
    ],
)
def test_weights_are_counted_from_a_bare_config(config: dict[str, Any], count: int) -> None:
    assert ModelConfig.from_hf_config(config).weight_count() == count


def test_transformers_4_and_5_layouts_give_the_same_config() -> None:
    old = LLAMA_3_8B | {"rope_scaling": LLAMA_31_SCALING}
    new = {key: value for key, value in LLAMA_3_8B.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA_31_SCALING | {"rope_theta": 500000.0}
    config = ModelConfig.from_hf_config(old)
    assert config == ModelConfig.from_hf_config(new)
    assert config.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert (
        ModelConfig.from_hf_config(LLAMA_3_8B | {"rope_scaling": {"type": "linear", "factor": 2}}).rope.kind == "linear"
    )


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA_3_8B | {"sliding_window": 128}, (None,) * 32),  # a key that Llama does not know
        (MISTRAL, (4096,) * 32),
        (MISTRAL | {"sliding_window": None}, (None,) * 32),
        (QWEN2, (None,) * 24),
        (QWEN2 | {"use_sliding_window": True}, (None,) * 21 + (32768,) * 3),
        (
            QWEN2 | {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 12},
            (32768, None) * 12,
        ),
        (GEMMA3_1B, ((512,) * 5 + (None,)) * 4 + (512, 512)),
        (GEMMA3_1B | {"sliding_window_pattern": None, "_sliding_window_pattern": 2}, (512, None) * 13),
        (GEMMA3_1B | {"layer_types": ["full_attention", "sliding_attention"] * 13}, (None, 512) * 13),
    ],
)
def test_each_layer_has_the_window_that_its_checkpoint_means(
    config: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert ModelConfig.from_hf_config(config).windows == windows


def test_architectures_bring_their_own_biases_and_norms() -> None:
    qwen2, qwen3 = ModelConfig.from_hf_config(QWEN2), ModelConfig.from_hf_config(QWEN3)
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm) == (False, True)
    assert (qwen3.head_dim, qwen3.q_width, qwen3.kv_width) == (128, 4096, 1024)


def test_gemma_3_brings_norms_scales_and_two_rotary_embeddings() -> None:
    config = ModelConfig.from_hf_config(GEMMA3_1B)
    assert (config.activation, config.post_norms, config.norm_offset, config.qk_norm) == ("gelu_tanh", True, 1.0, True)
    assert (config.embedding_scale, config.softmax_scale, config.tied_embeddings) == (1152**0.5, 1 / 16, True)
    assert config.ropes == (RopeConfig(1e6), RopeConfig(1e4))
    assert [config.rope_index(layer) for layer in range(7)] == [1, 1, 1, 1, 1, 0, 1]
    scaled = ModelConfig.from_hf_config(
        GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 144}
    )
    assert scaled.ropes == (RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4))  # far attention alone is stretched
    assert scaled.softmax_scale == 1 / 12


def test_gemma_3_in_both_layouts_of_transformers() -> None:
    old = GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 20000}
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    new["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }
    assert ModelConfig.from_hf_config(old) == ModelConfig.from_hf_config(new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}, "images beside text"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "not a text generator"),
        ({"model_type": "gemma2"}, "soft-capped logits"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "attention to later tokens"),
        ({"hidden_activation": "silu"}, "activation silu"),
        ({"sliding_window": None}, "lacks sliding_window"),
        ({"layer_types": ["chunked_attention"] * 26}, "chunked_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "got 'yarn'"),
    ],
)
def test_what_gemma_checkpoints_may_want_beyond_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LowkvError, match=message):
        ModelConfig.from_hf_config(GEMMA3_1B | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, r"MLA\)\): got 'deepseek_v3', expected one of llama .* qwen3"),
        ({"model_type": "mixtral"}, "mixture of experts"),
        ({"model_type": "jamba"}, "hybrid"),
        ({"model_type": "gemma3"}, "gemma3_text"),
        ({"model_type": "never_heard_of"}, "never_heard_of"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "got 'dynamic', expected default, linear or llama3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "got 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "different rotary embeddings"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_key_value_heads": 5}, "32 heads, 5 KV heads"),
        ({"hidden_size": "4096"}, "hidden is not a size"),
        ({"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"]}, "Ministral"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["linear_attention"],
            },
            "linear_attention",
        ),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LowkvError, match=message):
        ModelConfig.from_hf_config(LLAMA_3_8B | {"head_dim": 128} | change)


def test_gguf_metadata() -> None:
    config = ModelConfig.from_gguf(GGUF, ["token_embd.weight"])
    assert config.rms_eps == 1e-5
    assert config.tied_embeddings
    assert config.eos == (2,)
    assert config.weight_count() == 134_515_008
    untied = ModelConfig.from_gguf(GGUF | {"tokenizer.ggml.eot_token_id": 7}, ["output.weight"], [1.0, 2.0])
    assert not untied.tied_embeddings
    assert untied.eos == (2, 7)
    assert untied.rope == RopeConfig(100000.0, "divisors", divisors=(1.0, 2.0))


GEMMA3_GGUF = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 18,
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1000000.0,
    "gemma3.vocab_size": 262144,
}


def test_gguf_metadata_of_gemma_3() -> None:
    config = ModelConfig.from_gguf(GEMMA3_GGUF, [])
    assert (config.architecture, config.head_dim, config.norm_offset) == ("gemma3_text", 256, 1.0)
    assert config.windows == ((512,) * 5 + (None,)) * 3
    assert config.ropes == (RopeConfig(1e6), RopeConfig(1e4))
    assert config.weight_count() == 268_098_176
    other = ModelConfig.from_gguf(
        GEMMA3_GGUF
        | {
            "gemma3.attention.sliding_window_pattern": [True, False] * 9,
            "gemma3.rope.freq_base_swa": 20000.0,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
        [],
    )
    assert other.windows == (512, None) * 9
    assert other.ropes == (RopeConfig(1e6, "linear", 8.0), RopeConfig(2e4))
    large = GEMMA3_GGUF | {"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    assert ModelConfig.from_gguf(large, []).softmax_scale == 168**-0.5  # 27B: no key says so
    with pytest.raises(LowkvError, match="soft-capped"):
        ModelConfig.from_gguf(GEMMA3_GGUF | {"gemma3.final_logit_softcapping": 30.0}, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma2"}, "soft-capped"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 32}, "part of a head"),
        ({"llama.attention.value_length": 32}, "V heads"),
        ({"llama.attention.head_count_kv": [3, 3, 1]}, "different numbers of heads"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
    ],
)
def test_gguf_files_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LowkvError, match=message):
        ModelConfig.from_gguf(GGUF | change, [])


@pytest.mark.parametrize("config", [LLAMA_3_8B | {"rope_scaling": LLAMA_31_SCALING}, MISTRAL, QWEN2, QWEN3, GEMMA3_1B])
def test_a_config_survives_json(config: dict[str, Any]) -> None:
    model = ModelConfig.from_hf_config(config)
    plain = json.loads(json.dumps(model.to_mapping()))
    assert ModelConfig.from_mapping(plain) == model
    with pytest.raises(LowkvError, match="surprise"):
        ModelConfig.from_mapping(plain | {"surprise": 1})


def test_the_ids_that_end_an_answer_come_from_generation_config_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert read_config(tmp_path).eos == (128001,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128009]}))
    assert read_config(tmp_path).eos == read_config(tmp_path / "config.json").eos == (128001, 128009)
