"""Every layout of quantized matrices and every name of KV scales: read exactly, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lowkv.errors import LowkvError
from lowkv.models.checkpoint import (
    WeightsFormat,
    check_tensors,
    conversion_stage,
    kept_forms,
    open_checkpoint,
)
from lowkv.models.decoder import Decoder
from lowkv.models.dense import DenseAttention
from lowkv.models.imports.layouts import ACTIVATION_ORDER
from lowkv.models.quantized import DecodedMatrix, Fp8Matrix, Int4Matrix, Quantization, assembled
from tests.models import quantized_folders as folders

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
GPTQ_V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
ORDERED = GPTQ | {"desc_act": True}
STATIC = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor", "symmetric": True}
DYNAMIC = STATIC | {"dynamic": True, "strategy": "token"}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}

CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "awq-g32": (folders.pack_awq(32), AWQ, "int4"),
    "awq-g64": (folders.pack_awq(64), AWQ | {"group_size": 64}, "int4"),
    "gptq-g32": (folders.pack_gptq(32), GPTQ, "int4"),
    "gptq-symmetric": (folders.pack_gptq(64, symmetric=True), GPTQ | {"sym": True, "group_size": 64}, "int4"),
    "gptq-v2": (folders.pack_gptq(32, v2=True), GPTQ_V2, "int4"),
    "gptq-order": (folders.pack_gptq(32, shuffled=True), ORDERED, "int4"),
    "rows-g32": (folders.pack_rows(32), folders.compressed("pack-quantized", folders.int4_weights(32)), "int4"),
    "rows-zeros": (
        folders.pack_rows(64, symmetric=False),
        folders.compressed("pack-quantized", folders.int4_weights(64, symmetric=False)),
        "int4",
    ),
    "rows-order": (
        folders.pack_rows(32, symmetric=False, shuffled=True),
        folders.compressed("pack-quantized", folders.int4_weights(32, symmetric=False)),
        "int4",
    ),
    "fp8-dynamic": (
        folders.pack_float8(per_output=True, static=False),
        folders.compressed("float-quantized", folders.float8_weights("channel"), DYNAMIC),
        "fp8",
    ),
    "fp8-static": (
        folders.pack_float8(per_output=False, static=True),
        folders.compressed("float-quantized", folders.float8_weights("tensor"), STATIC),
        "fp8",
    ),
    "autofp8": (
        folders.pack_float8(per_output=False, static=True),
        {"quant_method": "fp8", "activation_scheme": "static"},
        "fp8",
    ),
    "modelopt-fp8": (folders.pack_float8(per_output=False, static=True), MODELOPT_FP8, "fp8"),
}


def logits(weights: dict[str, Any], config: Any) -> torch.Tensor:
    decoder, attention = Decoder(config, weights), DenseAttention(config)
    tokens = torch.randint(0, config.vocab, (24,), generator=torch.Generator().manual_seed(2))
    attention.begin_step([(0, len(tokens))])
    with torch.inference_mode():
        return decoder.forward(tokens, torch.arange(24), attention, torch.arange(24))


def stored(folder: Path, kind: str, dtype: torch.dtype = torch.float32, head: torch.dtype = torch.float32) -> Any:
    """The decoder's weights as an engine would store and load them, and their config."""
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint)
    weights = WeightsFormat(dtype, head, Quantization(kind))
    tensors = dict(weights.tensors(checkpoint))
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert layout == weights.layout(checkpoint.config, checkpoint)
    return assembled(tensors), checkpoint.config


def dense(weights: dict[str, Any]) -> dict[str, Any]:
    return {key: w if isinstance(w, torch.Tensor) else w.dequantize() for key, w in weights.items()}


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CASES)
def test_every_value_is_the_one_that_was_packed(name: str, tmp_path: Path) -> None:
    pack, quantization, kind = CASES[name]
    meant = folders.write_folder(tmp_path, pack, quantization)
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    for key, expected in meant.items():
        if key.endswith("_proj.weight"):
            torch.testing.assert_close(checkpoint.tensor(key), expected, rtol=1e-6, atol=0)
    # The same values again, through the fused matrices that an engine keeps.
    weights, _ = stored(tmp_path, kind)
    for layer in range(2):
        for ours, parts in (("qkv", ("q", "k", "v")), ("output", ("o",))):
            whole = torch.cat([meant[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in parts]).t()
            torch.testing.assert_close(dense(weights)[f"layers.{layer}.{ours}"], whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_an_engine_s_logits_are_those_of_the_decoded_checkpoint(name: str, tmp_path: Path) -> None:
    pack, quantization, kind = CASES[name]
    meant = folders.write_folder(tmp_path, pack, quantization)
    plain = tmp_path / "plain"
    folders.write_folder(plain, folders.pack_dense, None)
    change_tensors(plain, lambda tensors: tensors.update(meant))
    reference = logits(*stored(plain, "none"))
    spread = float(reference.std())
    decoded_weights, config = stored(tmp_path, "none")
    assert float((logits(decoded_weights, config) - reference).abs().max()) < 1e-4 * spread
    kept, _ = stored(tmp_path, kind)
    without_rounding = {
        key: DecodedMatrix(w.dequantize(), None) if isinstance(w, Fp8Matrix) else w for key, w in kept.items()
    }
    assert float((logits(without_rounding, config) - reference).abs().max()) < 1e-4 * spread
    # In float16 as far away as the decoded checkpoint's own engine is: its rounding, and nothing else.
    noise = float((logits(*stored(plain, "none", torch.float16)) - reference).abs().max())
    half, _ = stored(tmp_path, kind, torch.float16)
    without_rounding = {
        key: DecodedMatrix(w.dequantize(), None) if isinstance(w, Fp8Matrix) else w for key, w in half.items()
    }
    assert float((logits(without_rounding, config) - reference).abs().max()) < 2 * noise < 0.1 * spread


@pytest.mark.parametrize("name", [name for name in CASES if "order" not in name])
def test_codes_are_kept_as_they_are(name: str, tmp_path: Path) -> None:
    pack, quantization, kind = CASES[name]
    folders.write_folder(tmp_path, pack, quantization)
    weights, _ = stored(tmp_path, kind, torch.float16)
    matrices = [weights[f"layers.{layer}.{part}"] for layer in range(2) for part in ("qkv", "output", "down")]
    assert {type(matrix) for matrix in matrices} == {Int4Matrix if kind == "int4" else Fp8Matrix}
    assert "is kept" in conversion_stage(
        open_checkpoint(tmp_path), WeightsFormat(torch.float16, torch.float32, Quantization(kind))
    )
    assert "is decoded to float16" in conversion_stage(
        open_checkpoint(tmp_path), WeightsFormat(torch.float16, torch.float32, Quantization("none"))
    )
    if kind == "fp8":
        static = "static" in name or name.startswith(("modelopt", "auto"))
        assert all((matrix.input_scale is not None) == static for matrix in matrices)


@pytest.mark.parametrize("name", ["gptq-order", "rows-order"])
def test_scattered_groups_are_decoded_and_that_is_said(name: str, tmp_path: Path) -> None:
    pack, quantization, kind = CASES[name]
    folders.write_folder(tmp_path, pack, quantization)
    checkpoint = open_checkpoint(tmp_path)
    assert set(kept_forms(checkpoint, Quantization(kind)).values()) == {ACTIVATION_ORDER}
    stage = conversion_stage(checkpoint, WeightsFormat(torch.float16, torch.float32, Quantization(kind)))
    assert stage.endswith("is kept, 8 of 8 matrices are decoded to float16")


def test_a_group_order_that_says_nothing_new_is_no_order(tmp_path: Path) -> None:
    folders.write_folder(tmp_path, folders.pack_gptq(32), ORDERED)
    forms = kept_forms(open_checkpoint(tmp_path), Quantization("int4"))
    assert {str(form) for form in forms.values()} == {"int4 (groups of 32, zero points)"}


def test_per_tensor_scales_of_parts_stay_apart(tmp_path: Path) -> None:
    """q, k and v have a scale each: fused, they have one for every output; where they agree, one is enough."""
    pack, quantization, kind = CASES["fp8-static"]
    folders.write_folder(tmp_path, pack, quantization)
    weights, _ = stored(tmp_path, kind)
    assert weights["layers.0.qkv"].scale.shape == (128,)
    assert weights["layers.0.output"].scale.shape == (1,)
    tensors = load_file(tmp_path / "model.safetensors")
    parts = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert len(weights["layers.0.qkv"].scale.unique()) == 3
    most = max(float(tensors[f"{part}.input_scale"]) for part in parts)
    assert float(weights["layers.0.qkv"].input_scale) == most
    change_tensors(tmp_path, lambda t: t.update({f"{part}.weight_scale": torch.tensor([1e-4]) for part in parts}))
    assert stored(tmp_path, kind)[0]["layers.0.qkv"].scale.shape == (1,)


def test_another_quantization_than_the_checkpoint_s_is_refused(tmp_path: Path) -> None:
    folders.write_folder(tmp_path, *CASES["awq-g32"][:2])
    with pytest.raises(LowkvError, match=r"another form than the recipe's: got 'weights.quantization fp8; int4 by AWQ"):
        stored(tmp_path, "fp8")


def test_a_quantized_checkpoint_of_gemma_3(tmp_path: Path) -> None:
    """Four norms a layer, two for Q and K, all stored less 1; the matrices are anybody's."""
    pack, quantization, kind = CASES["autofp8"]
    folders.write_folder(tmp_path, pack, quantization)
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    norms = {
        f"model.layers.{layer}.{name}.weight": torch.randn(size)
        for layer in range(2)
        for name, size in (
            ("pre_feedforward_layernorm", 64),
            ("post_feedforward_layernorm", 64),
            ("self_attn.q_norm", 16),
            ("self_attn.k_norm", 16),
        )
    }
    change_tensors(tmp_path, lambda tensors: tensors.update(norms))
    weights, read = stored(tmp_path, kind)
    assert read.windows == (8, None)
    assert isinstance(weights["layers.1.qkv"], Fp8Matrix)
    assert torch.equal(weights["layers.1.mlp_norm"], norms["model.layers.1.pre_feedforward_layernorm.weight"] + 1)
    assert torch.equal(weights["layers.1.mlp_post_norm"], norms["model.layers.1.post_feedforward_layernorm.weight"] + 1)
    assert torch.equal(weights["layers.0.k_norm"], norms["model.layers.0.self_attn.k_norm.weight"] + 1)
    assert logits(weights, read).isfinite().all()


def test_matrices_that_the_library_left_stay_in_floating_point(tmp_path: Path) -> None:
    _, quantization, _ = CASES["rows-g32"]
    rows = folders.pack_rows(32)

    def pack(generator: torch.Generator, out: int, size: int) -> folders.Packed:
        return folders.pack_dense(generator, out, size) if size == 128 else rows(generator, out, size)

    folders.write_folder(tmp_path, pack, quantization | {"ignore": ["lm_head", "re:.*down_proj"]})
    weights, _ = stored(tmp_path, "int4", torch.float16)
    assert isinstance(weights["layers.1.down"], torch.Tensor)
    assert isinstance(weights["layers.1.qkv"], Int4Matrix)
    change_config(tmp_path, ignore=["lm_head"])
    with pytest.raises(LowkvError, match=r"contradicts itself: its config says that .*down_proj is INT4"):
        stored(tmp_path, "none")
    change_config(tmp_path, ignore=["lm_head", "re:.*(down|up)_proj"])
    with pytest.raises(LowkvError, match=r"contradicts itself: its config leaves .*up_proj in floating point"):
        stored(tmp_path, "none")


def kv_only(**scheme: Any) -> dict[str, Any]:
    """A config of compressed-tensors for keys and values alone."""
    return folders.compressed("dense", {}, kv_cache_scheme=folders.kv_scheme(**scheme), config_groups={})


AUTOFP8 = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
MODELOPT_KV = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
KV_CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "llm-compressor": (kv_only(), "k_scale", "v_scale"),
    "legacy": (AUTOFP8, "k_proj.output_scale", "v_proj.output_scale"),
    "modelopt": (MODELOPT_KV, "k_proj.k_scale", "v_proj.v_scale"),
}


def kv_folder(folder: Path, name: str) -> None:
    quantization, k, v = KV_CASES[name]
    pack = folders.pack_float8(per_output=False, static=True) if name == "legacy" else folders.pack_dense
    folders.write_folder(folder, pack, quantization)
    scales = {
        f"model.layers.{layer}.self_attn.{key}": torch.tensor([0.01 * (2 * layer + index + 1)])
        for layer in range(2)
        for index, key in enumerate((k, v))
    }
    change_tensors(folder, lambda tensors: tensors.update(scales))


@pytest.mark.parametrize("name", KV_CASES)
def test_kv_scales_are_read_under_every_name(name: str, tmp_path: Path) -> None:
    kv_folder(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    scales = checkpoint.kv_scales()
    assert scales is not None
    assert (scales.source, scales.granularity, scales.missing) == ("checkpoint", "tensor", frozenset())
    assert [(float(k[1, 3]), float(v[1])) for k, v in scales.layers] == [
        (np.float32(0.01), np.float32(0.02)),
        (np.float32(0.03), np.float32(0.04)),
    ]
    assert scales.layers[0][0].shape == (2, 16)


def test_a_scale_per_head_is_read_and_a_query_s_is_left_out(tmp_path: Path) -> None:
    kv_folder(tmp_path, "llm-compressor")
    change_config(tmp_path, kv_cache_scheme=folders.kv_scheme(strategy="attn_head"))
    prefix = "model.layers.1.self_attn."
    change_tensors(
        tmp_path,
        lambda t: t.update(
            {
                prefix + "k_scale": torch.tensor([0.5, 0.25]).view(2, 1, 1),
                prefix + "q_scale": torch.ones(1),
                prefix + "k_zero_point": torch.zeros(1),
            }
        ),
    )
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    scales = checkpoint.kv_scales()
    assert scales is not None
    assert scales.granularity == "head"
    assert scales.layers[1][0][:, 7].tolist() == [0.5, 0.25]
    assert checkpoint.found_scales.ignored == (prefix + "k_zero_point", prefix + "q_scale")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"self_attn.k_scale": torch.tensor([0.0])}, r"scale of K of layer 1 is not usable: .*k_scale: got 0\.0"),
        ({"self_attn.v_scale": torch.tensor([-1.0])}, "scale of V of layer 1 is not usable"),
        ({"self_attn.v_scale": torch.tensor([float("nan")])}, "scale of V of layer 1 is not usable"),
        ({"self_attn.k_scale": torch.ones(3)}, r"scales of K of layer 1 have the wrong shape: .*got 'F32 \[3\]'"),
        ({"self_attn.k_scale": torch.ones(2, 1, 16)}, "scales of K of layer 1 have the wrong shape"),
        ({"self_attn.k_scale": torch.ones(1, dtype=torch.int32)}, "wrong shape: .*got 'I32"),
        ({"self_attn.k_scale": None}, r"lacks the scale of K of layer 1: got 'a config with kv_cache_scheme 8-bit"),
        ({"self_attn.k_proj.k_scale": torch.tensor([0.7])}, "layer 1 has two scales for K: got '.*k_scale, .*k_scale'"),
        ({"self_attn.v_zero_point": torch.tensor([3.0])}, "with a zero point are not supported: .*v_zero_point"),
        ({"self_attn.k_proj.k_bias": torch.ones(1, 2, 1, 16)}, "with a zero point are not supported: .*k_bias"),
    ],
)
def test_kv_scales_that_cannot_be_used_are_refused_by_name(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    kv_folder(tmp_path, "llm-compressor")

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in change.items():
            if tensor is None:
                del tensors[f"model.layers.1.{name}"]
            else:
                tensors[f"model.layers.1.{name}"] = tensor

    change_tensors(tmp_path, apply)
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    with pytest.raises(LowkvError, match=message):
        checkpoint.kv_scales()


def test_modelopt_without_scales_means_one_and_that_is_said(tmp_path: Path) -> None:
    folders.write_folder(tmp_path, folders.pack_dense, KV_CASES["modelopt"][0])
    scales = open_checkpoint(tmp_path).kv_scales()
    assert scales is not None
    assert all((k == 1).all() and (v == 1).all() for k, v in scales.layers)
    assert "hold no scales: 1.0 is meant" in scales.details["warnings"][0]


def test_an_export_that_clamps_is_noticed(tmp_path: Path) -> None:
    kv_folder(tmp_path, "modelopt")
    ends = ("k_scale", "v_scale")
    change_tensors(tmp_path, lambda t: t.update({key: torch.ones(()) for key in t if key.endswith(ends)}))
    scales = open_checkpoint(tmp_path).kv_scales()
    assert scales is not None
    assert "exactly 1.0: an export that clamps" in scales.details["warnings"][0]


def test_a_layer_without_scales_is_missing_where_the_library_may_leave_it_out(tmp_path: Path) -> None:
    kv_folder(tmp_path, "modelopt")
    change_tensors(tmp_path, lambda t: t.pop("model.layers.1.self_attn.v_proj.v_scale"))
    scales = open_checkpoint(tmp_path).kv_scales()
    assert scales is not None
    assert scales.missing == {(1, "v")}


FP8_GROUP = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized in a way that lowkv does not read: got 'quant_method bitsandb"),
        ({}, "quant_method missing"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt checkpoint has weights in NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "weights in MIXED_PRECISION"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "NVFP4"}, "keys and values in NVFP4"),
        (AWQ | {"bits": 3}, "AWQ checkpoint has 3-bit weights"),
        (AWQ | {"version": "gemv"}, "weights in version gemv"),
        (AWQ | {"zero_point": False}, "weights without zero points"),
        (AWQ | {"group_size": "many"}, "a group size that is none"),
        (GPTQ | {"bits": 8}, "GPTQ checkpoint has 8-bit weights"),
        (GPTQ | {"checkpoint_format": "marlin"}, "weights in format marlin"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"settings of their own for some layers \(dynamic\)"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "weights in blocks"),
        (folders.compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), "8-bit int"),
        (folders.compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "4-bit float weights"),
        (folders.compressed("float-quantized", FP8_GROUP | {"strategy": "block"}), "neither per tensor nor per output"),
        (kv_only(dynamic=True), "dynamic scales"),
        (kv_only(symmetric=False), "zero points of keys"),
        (kv_only(num_bits=4), "keys and values in a form"),
        (folders.compressed("dense", {}, transform_config={"config_groups": {"R1": {}}}), "rotated weights"),
        (folders.compressed("dense", {}, sparsity_config={"format": "sparse-24"}), "sparse weights"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    folders.write_folder(tmp_path, folders.pack_dense, quantization)
    if not quantization:
        config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"bits": 4}}
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LowkvError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "have another quant_algo: got 'W4A16_AWQ', expected FP8"),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "have another KV cache scheme"),
        (
            {"quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0*"]},
            "have another list of excluded modules",
        ),
    ],
)
def test_two_configs_that_contradict_each_other_are_refused(
    inner: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folders.write_folder(tmp_path, folders.pack_float8(per_output=False, static=True), MODELOPT_FP8)
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": inner}))
    with pytest.raises(LowkvError, match=f"contradicts itself: config.json and hf_quant_config.json {message}"):
        open_checkpoint(tmp_path)
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    assert beside in checkpoint.files
    change_config(tmp_path, quant_method="awq")
    with pytest.raises(LowkvError, match=r"config\.json names awq, hf_quant_config\.json is ModelOpt's"):
        open_checkpoint(tmp_path)


def test_modelopt_s_own_config_is_enough(tmp_path: Path) -> None:
    folders.write_folder(tmp_path, folders.pack_float8(per_output=False, static=True), None)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert isinstance(stored(tmp_path, "fp8")[0]["layers.0.down"], Fp8Matrix)


DOWN = "model.layers.1.mlp.down_proj."


@pytest.mark.parametrize(
    ("name", "part", "value", "message"),
    [
        ("awq-g32", "qzeros", None, "lacks tensor .*down_proj.qzeros: got 'other parts of .*down_proj'"),
        ("awq-g32", "qweight", None, "lacks tensor .*down_proj.qweight"),
        ("awq-g32", "scales", torch.ones(3, 64).half(), r"down_proj.scales does not fit .*got 'F16 \[3, 64\]'"),
        ("awq-g32", "scales", torch.full((4, 64), float("nan")).half(), "scales holds what is no scale: got nan"),
        ("gptq-g32", "g_idx", torch.full((128,), 9, dtype=torch.int32), "g_idx names groups that are not there"),
        ("gptq-g32", "qweight", torch.zeros(16, 64), r"down_proj.qweight does not fit .*got 'F32 \[16, 64\]'"),
        ("gptq-symmetric", "qzeros", torch.zeros(2, 8, dtype=torch.int32), "says sym: true, and .*qzeros is not"),
        ("rows-g32", "weight_scale", None, "lacks tensor .*weight_scale"),
        ("rows-g32", "weight_shape", torch.tensor([64, 96]), r"contradicts itself: .*weight_shape .*got \(64, 96\)"),
        ("fp8-static", "input_scale", None, "lacks tensor .*input_scale"),
        ("fp8-static", "input_scale", torch.zeros(1), "input_scale is zero"),
        ("fp8-dynamic", "weight_scale", torch.ones(1), r"does not fit .*expected F16 or BF16 or F32 \[64\]"),
        ("modelopt-fp8", "weight_scale", None, "lacks tensor .*weight_scale"),
    ],
)  # fmt: skip
def test_a_matrix_whose_parts_do_not_fit_is_named(
    name: str, part: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    pack, quantization, kind = CASES[name]
    folders.write_folder(tmp_path, pack, quantization)

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[DOWN + part]
        else:
            tensors[DOWN + part] = value

    change_tensors(tmp_path, apply)
    with pytest.raises(LowkvError, match=message):
        stored(tmp_path, kind)


def test_a_truncated_file_and_foreign_tensors_are_refused(tmp_path: Path) -> None:
    folders.write_folder(tmp_path, *CASES["awq-g32"][:2])
    change_tensors(tmp_path, lambda t: t.update({DOWN + "lora_A": torch.ones(1)}))
    with pytest.raises(LowkvError, match=r"has tensor model\.layers\.1\.mlp\.down_proj\.lora_A"):
        stored(tmp_path, "int4")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(LowkvError, match="expected a whole safetensors file"):
        stored(tmp_path, "int4")
