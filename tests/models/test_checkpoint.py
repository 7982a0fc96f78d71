"""Safetensors folders and GGUF files: read whole and right, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lowkv.errors import LowkvError
from lowkv.models.checkpoint import WeightsFormat, check_tensors, decoder_weights, open_checkpoint
from lowkv.models.decoder import weight_shapes
from lowkv.models.gguf_file import GgufFile
from lowkv.models.quantized import Quantization

TinyModels = Callable[[str], Any]

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def weights(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    check_tensors(checkpoint)
    return dict(decoder_weights(checkpoint, torch.float32, torch.float32))


@pytest.fixture
def folder(tiny_model: TinyModels, tmp_path: Path) -> Path:
    """A private copy of the tiny Llama's folder."""
    return Path(shutil.copytree(tiny_model("llama").folder, tmp_path / "model"))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["llama", "llama-untied", "qwen2", "qwen3", "gemma3"])
def test_decoder_weights_are_those_that_the_decoder_names(tiny_model: TinyModels, name: str) -> None:
    checkpoint = open_checkpoint(tiny_model(name).folder)
    made = {key: tuple(tensor.shape) for key, tensor in decoder_weights(checkpoint, torch.float32, torch.float32)}
    assert list(made.items()) == list(weight_shapes(checkpoint.config).items())
    assert checkpoint.config.weight_count() == sum(p.numel() for p in tiny_model(name).reference.parameters())


def test_shards_are_read_like_one_file(tiny_model: TinyModels, tmp_path: Path) -> None:
    tiny = tiny_model("llama")
    tiny.reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    single, sharded = weights(tiny.folder), weights(tmp_path)
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(LowkvError, match="which is not in the folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks tensor model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}), "has tensor .*q_proj.bias"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
            r"model.norm.weight does not fit .*: got \(65,\), expected shape \(64,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Callable[..., object], message: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(LowkvError, match=message):
        weights(folder)


def test_harmless_extras_are_left_out(folder: Path) -> None:
    expected = weights(folder)
    change_tensors(
        folder,
        lambda t: t.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),  # a table of old checkpoints
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),  # tied, and saved twice
            }
        ),
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(folder).items())


def test_a_body_that_overflows_float16_is_refused(tiny_model: TinyModels) -> None:
    config = open_checkpoint(tiny_model("gemma3").folder).config
    weights = WeightsFormat(torch.bfloat16, torch.float32, Quantization())
    assert weights.layout(config)["norm"][1] == torch.bfloat16
    with pytest.raises(LowkvError, match=r"beyond 65,504.*set weights\.dtype: bfloat16"):
        replace(weights, dtype=torch.float16).layout(config)


def test_quantized_tensors_are_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    change_tensors(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(LowkvError, match=rf"tensor {name} .* is quantized: got 'F8_E4M3'"):
        weights(folder)


def test_pickles_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LowkvError, match=r"got 'pytorch_model\.bin', .*never loads pickles"):
        open_checkpoint(folder)


def test_an_index_may_not_point_out_of_its_folder(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LowkvError, match="which is not in the folder"):
        open_checkpoint(folder)


def test_what_is_not_there_or_not_readable_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match="no checkpoint at"):
        open_checkpoint(tmp_path / "nothing")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(LowkvError, match="expected a whole safetensors file"):
        weights(folder)
    with pytest.raises(LowkvError, match=r"has no tokenizer\.json"):
        open_checkpoint(folder).write_tokenizer(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(LowkvError, match=r"config\.json"):
        weights(folder)


def write_gguf(
    tiny: Any, path: Path, kind: gguf.GGMLQuantizationType, permute: bool, divisors: np.ndarray | None = None
) -> None:
    """The tiny model as llama.cpp's converter writes it: its names, its Q/K row order, quantized matrices."""
    config = tiny.reference.config
    gemma = config.model_type == "gemma3_text"
    names = GGUF_NAMES | (GEMMA_NORMS if gemma else {})
    writer = gguf.GGUFWriter(path, "gemma3" if gemma else config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if gemma:
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["full_attention"]["factor"])
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    for name, tensor in load_file(tiny.folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        array = tensor.numpy()
        layer = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            layer = f"blk.{number}."
        if permute and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        if gemma and stem.endswith("norm"):
            array = array + np.float32(1)
        if array.ndim == 2:
            array = gguf.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(f"{layer}{names[stem]}.{suffix}", array, raw_dtype=kind)
        else:
            writer.add_tensor(f"{layer}{names[stem]}.{suffix}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["llama", "llama-untied", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_weights_of_the_folder_it_was_made_from(
    tiny_model: TinyModels, tmp_path: Path, name: str
) -> None:
    tiny, path = tiny_model(name), tmp_path / "model.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32, permute=name.startswith("llama"))
    config, original = open_checkpoint(path).config, open_checkpoint(tiny.folder).config
    for field in ("architecture", "head_dim", "kv_heads", "rope", "tied_embeddings", "qkv_bias", "qk_norm"):
        assert getattr(config, field) == getattr(original, field)
    expected, got = weights(tiny.folder), weights(path)
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_a_gguf_file_of_gemma_3(tiny_model: TinyModels, tmp_path: Path) -> None:
    tiny, path = tiny_model("gemma3"), tmp_path / "model.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32, permute=False)
    config, original = open_checkpoint(path).config, open_checkpoint(tiny.folder).config
    # Its GGUF files hold no scale of scores (see `ModelConfig.from_gguf`) and no special tokens here.
    assert config == replace(original, query_scalar=None, bos=None, eos=())
    expected, got = weights(tiny.folder), weights(path)
    assert got.keys() == expected.keys()
    for key in expected:  # 1 is added, subtracted and added again to norms
        torch.testing.assert_close(got[key], expected[key], rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", 1 / 127), ("Q5_1", 1 / 31), ("Q4_1", 1 / 15), ("Q4_0", 1 / 7)],
)
def test_quantized_gguf_tensors_are_dequantized(
    tiny_model: TinyModels, tmp_path: Path, kind: str, error: float
) -> None:
    tiny, path = tiny_model("llama"), tmp_path / "model.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType[kind], permute=True)
    expected, got = weights(tiny.folder), weights(path)
    for key, tensor in expected.items():  # one step of a block that spans -max to max
        assert (got[key] - tensor).abs().max() <= error * 2 * tensor.abs().max()


def test_llama3_rope_in_gguf_is_a_table_of_divisors(tiny_model: TinyModels, tmp_path: Path) -> None:
    from lowkv.models.decoder import inverse_frequencies

    tiny, path = tiny_model("llama-rope-llama3"), tmp_path / "model.gguf"
    original = open_checkpoint(tiny.folder).config
    plain = 1.0 / (original.rope.theta ** (torch.arange(0, 16, 2) / 16))
    divisors = (plain / inverse_frequencies(original.rope, 16)).numpy()
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32, permute=True, divisors=divisors)
    config = open_checkpoint(path).config
    check_tensors(open_checkpoint(path))
    torch.testing.assert_close(inverse_frequencies(config.rope, 16), inverse_frequencies(original.rope, 16))


@pytest.fixture
def gguf_path(tiny_model: TinyModels, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), path, gguf.GGMLQuantizationType.Q8_0, permute=True)
    return path


def test_the_header_is_read_as_the_gguf_package_reads_it(gguf_path: Path) -> None:
    file, reader = GgufFile(gguf_path), gguf.GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert dict(file.metadata) == fields
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(
            file.read(tensor.name),
            gguf.dequantize(tensor.data, tensor.tensor_type).reshape(file.tensors[tensor.name].shape),
        )


@pytest.mark.parametrize("keep", [0, 3, 20, 60, 500, 0.5, -1])
def test_a_truncated_gguf_file_is_refused(gguf_path: Path, keep: float) -> None:
    data = gguf_path.read_bytes()
    end = round(keep * len(data)) if isinstance(keep, float) else keep
    gguf_path.write_bytes(data[:end])
    with pytest.raises(LowkvError, match=r"model\.gguf"):
        weights(gguf_path)


def test_other_files_are_not_taken_for_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(LowkvError, match="is not a GGUF file"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(LowkvError, match="GGUF version that is not known: got 1"):
        GgufFile(path)
    with pytest.raises(LowkvError, match="cannot read"):
        GgufFile(tmp_path / "nothing.gguf")
