"""Writes tiny quantized checkpoints with the libraries that write them for real.

    LLMCOMPRESSOR_PYTHON tests/models/data/make.py llmcompressor FOLDER [CASE ...]
    MODELOPT_PYTHON      tests/models/data/make.py modelopt FOLDER [CASE ...]

Run it with an interpreter that has the library; it imports nothing of lowkv. Each case becomes FOLDER/CASE, a Hugging
Face folder with `logits.json` beside it: tokens, and the last logits that the written file gives for them in
transformers' model, its weights decoded (in float32, activations not rounded). The cases named are made, all without
names.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENS = [3, 17, 42, 5, 60, 9, 28, 33, 1, 55, 12, 48]


def tiny(layers: int = 2, **changes: Any) -> LlamaForCausalLM:
    """A random Llama with 4 heads, 2 KV heads, and channels of inputs that matter more than others."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64} | changes
    config = LlamaConfig(
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.4)
            if "k_proj" in name:
                parameter.mul_(1.5)  # K and V scales that cannot be taken for one another
    return model.half()


def samples(count: int = 16, length: int = 32) -> torch.Tensor:
    return torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(11))


def _tokenizer() -> Any:
    """One token per word, so that engines can be built from the files."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2")


def _write_logits(model: torch.nn.Module, folder: Path) -> None:
    with torch.inference_mode():
        logits = model.float()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    (folder / "logits.json").write_text(json.dumps({"tokens": TOKENS, "logits": _rounded(logits[-3:])}) + "\n")


def _rounded(logits: torch.Tensor) -> list[list[float]]:
    return [[round(value, 5) for value in row] for row in logits.tolist()]


# -- llm-compressor ----------------------------------------------------------------------------------------------------


def _oneshot(folder: Path, recipe: Any, model: LlamaForCausalLM) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot

    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda self, *_: self  # AWQ pins whatever the machine

    rows = samples()
    data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()})
    with tempfile.TemporaryDirectory() as original:
        model.save_pretrained(original)  # the library reads the config of the model's folder again
        model = LlamaForCausalLM.from_pretrained(original, dtype=torch.float16)
        oneshot(
            model=model,
            dataset=data,
            processor=_tokenizer(),
            recipe=recipe,
            max_seq_length=rows.shape[1],
            num_calibration_samples=rows.shape[0],
        )
        model.save_pretrained(folder, save_compressed=True)  # it looks into the original folder once more
    _tokenizer().save_pretrained(folder)
    _write_logits(_decompressed(folder), folder)


def _decompressed(folder: Path) -> torch.nn.Module:
    """The written checkpoint, read back by transformers and decoded by compressed-tensors; rounds no activations."""
    from compressed_tensors.quantization import disable_quantization
    from transformers import CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(run_compressed=False), torch_dtype=torch.float32
    )
    model.apply(disable_quantization)
    return model.eval()


def _kv(strategy: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}


def _quantization(**settings: Any) -> Any:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(ignore=["lm_head"], **settings)


def _gptq(symmetric: bool, group_size: int, actorder: str | None) -> Any:
    from llmcompressor.modifiers.gptq import GPTQModifier

    return GPTQModifier(ignore=["lm_head"], config_groups=_w4(symmetric, group_size, actorder))


def _w4(symmetric: bool, group_size: int, actorder: str | None = None) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    return {"group_0": {"targets": ["Linear"], "weights": weights | ({"actorder": actorder} if actorder else {})}}


def _awq(symmetric: bool, group_size: int) -> Any:
    from llmcompressor.modifiers.awq import AWQModifier

    return [AWQModifier(ignore=["lm_head"], config_groups=_w4(symmetric, group_size), duo_scaling=False)]


LLMCOMPRESSOR: dict[str, Callable[[Path], None]] = {
    "lc-fp8-dynamic-kv-tensor": lambda folder: _oneshot(
        folder, _quantization(targets="Linear", scheme="FP8_DYNAMIC", kv_cache_scheme=_kv("tensor")), tiny()
    ),
    "lc-fp8-static-kv-head": lambda folder: _oneshot(
        folder, _quantization(targets="Linear", scheme="FP8", kv_cache_scheme=_kv("attn_head")), tiny(1)
    ),
    "lc-kv-only": lambda folder: _oneshot(folder, _quantization(kv_cache_scheme=_kv("tensor")), tiny()),
    "lc-w4a16-g32": lambda folder: _oneshot(folder, _quantization(config_groups=_w4(True, 32)), tiny(1)),
    "lc-w4a16-asym-g64-static": lambda folder: _oneshot(folder, _gptq(False, 64, "static"), tiny(1)),
    "lc-w4a16-g128": lambda folder: _oneshot(
        folder, _gptq(True, 128, None), tiny(1, hidden_size=128, intermediate_size=256)
    ),
    "lc-awq-asym-g32": lambda folder: _oneshot(folder, _awq(False, 32), tiny(1)),
}


# -- ModelOpt ----------------------------------------------------------------------------------------------------------


def _modelopt(folder: Path, weights: str | None, kv: str | None, model: LlamaForCausalLM, group_size: int = 64) -> None:
    """`weights` and `kv` are names of ModelOpt's own presets."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    rows = samples()
    with torch.inference_mode():
        mtq.quantize(model, _preset(weights, kv, group_size), lambda quantized: quantized(rows))
        export_hf_checkpoint(model, export_dir=folder)
    _tokenizer().save_pretrained(folder)
    _write_logits(_decoded(folder), folder)


def _decoded(folder: Path) -> torch.nn.Module:
    """The written checkpoint in transformers' own model: the library exports what it cannot load, so decoded here."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    config = LlamaConfig.from_pretrained(folder)
    del config.quantization_config
    model = LlamaForCausalLM(config).float().eval()
    plain = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale")
        if tensor.dtype == torch.uint8:  # two outputs to a byte, the even one in the low half
            rows, size = 2 * tensor.shape[0], tensor.shape[1]
            codes = torch.empty(rows, size)
            codes[0::2], codes[1::2] = tensor & 0xF, tensor >> 4
            codes[codes > 7] -= 16
            plain[name] = codes * scale.repeat_interleave(size // scale.shape[1], 1)
        elif scale is not None:
            plain[name] = tensor.float() * (scale[:, None] if scale.dim() else scale)
        elif name.endswith(".weight"):
            plain[name] = tensor.float()
        elif name.endswith(".pre_quant_scale"):
            linear = model.get_submodule(name.removesuffix(".pre_quant_scale"))
            linear.register_forward_pre_hook(lambda _, inputs, scale=tensor: (inputs[0] * scale.float(),))
    model.load_state_dict(plain | {"lm_head.weight": plain["model.embed_tokens.weight"]})
    return model


def _preset(weights: str | None, kv: str | None, group_size: int) -> dict[str, Any]:
    import modelopt.torch.quantization as mtq

    config: dict[str, Any] = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
    if weights is not None:
        config = copy.deepcopy(getattr(mtq, weights))
    for entry in config["quant_cfg"]:
        sizes = (entry.get("cfg") or {}).get("block_sizes")
        if sizes:
            sizes[-1] = group_size
    if kv is not None:
        config["quant_cfg"] = [*config["quant_cfg"], *copy.deepcopy(getattr(mtq, kv)["quant_cfg"])]
    return config


MODELOPT: dict[str, Callable[[Path], None]] = {
    "mo-fp8-kv": lambda folder: _modelopt(folder, "FP8_DEFAULT_CFG", "FP8_KV_CFG", tiny(1)),
    "mo-fp8": lambda folder: _modelopt(folder, "FP8_DEFAULT_CFG", None, tiny(1)),
    "mo-fp8-kv-affine": lambda folder: _modelopt(folder, "FP8_DEFAULT_CFG", "FP8_AFFINE_KV_CFG", tiny(1)),
    "mo-kv-only": lambda folder: _modelopt(folder, None, "FP8_KV_CFG", tiny()),
    "mo-fp8-channel": lambda folder: _modelopt(folder, "FP8_PER_CHANNEL_PER_TOKEN_CFG", None, tiny(1)),
    "mo-int4-awq": lambda folder: _modelopt(folder, "INT4_AWQ_CFG", "FP8_KV_CFG", tiny(1)),
    "mo-int4-awq-g128": lambda folder: _modelopt(
        folder, "INT4_AWQ_CFG", "FP8_KV_CFG", tiny(1, hidden_size=128, intermediate_size=128), group_size=128
    ),
}
CASES = {"llmcompressor": LLMCOMPRESSOR, "modelopt": MODELOPT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=sorted(CASES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("case", nargs="*")
    options = parser.parse_args()
    cases = CASES[options.library]
    for name in options.case or cases:
        folder = options.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        cases[name](folder)
        print("written:", folder, flush=True)


if __name__ == "__main__":
    main()
