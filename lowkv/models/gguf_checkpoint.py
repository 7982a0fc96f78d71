"""A `.gguf` file as a checkpoint: llama.cpp's tensor names become Hugging Face's, quantized tensors become floats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lowkv.models.checkpoint import norm_names
from lowkv.models.config import ModelConfig
from lowkv.models.gguf_file import GgufFile

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.calibration.scales import KVScales

_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "attn_norm": "attention_norm",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_post_norm",
}
"""Norms over the hidden size, by the decoder's names."""
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufCheckpoint:
    """Implements `lowkv.models.checkpoint.Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.files = (path,)

    @cached_property
    def config(self) -> ModelConfig:
        tensors = self._file.tensors
        divisors = self._file.read(_ROPE_DIVISORS).tolist() if _ROPE_DIVISORS in tensors else ()
        return ModelConfig.from_gguf(self._file.metadata, tuple(tensors), divisors)

    @cached_property
    def _names(self) -> dict[str, str]:
        """Hugging Face name -> name in the file; names that are not known stay as they are, to be refused."""
        norms = norm_names(self.config)
        parts = _LAYER_NAMES | {name: norms[ours] for name, ours in _NORMS.items() if ours in norms}
        return {_hf_name(name, parts): name for name in self._file.tensors if name != _ROPE_DIVISORS}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._file.tensors[source].shape for name, source in self._names.items()}

    def tensor(self, name: str) -> Tensor:
        import torch

        tensor = torch.from_numpy(self._file.read(self._names[name]))
        if name.endswith("norm.weight"):  # llama.cpp's are ready to multiply by
            return tensor - self.config.norm_offset
        if self.config.architecture == "llama":
            if ".q_proj." in name:
                return _half_rotation(tensor, self.config.heads)
            if ".k_proj." in name:
                return _half_rotation(tensor, self.config.kv_heads)
        return tensor

    def kv_scales(self) -> KVScales | None:
        return None

    @property
    def types(self) -> tuple[str, ...]:
        """Names of the forms that its tensors are stored in."""
        from gguf import GGMLQuantizationType

        return tuple(sorted({GGMLQuantizationType(tensor.kind).name for tensor in self._file.tensors.values()}))

    def write_tokenizer(self, folder: Path) -> tuple[str, ...]:
        from lowkv.models.gguf_tokenizer import write_gguf_tokenizer

        return write_gguf_tokenizer(self._file, folder)


def _hf_name(name: str, parts: Mapping[str, str]) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    if prefix == "blk" and layer.isdecimal() and part in parts:
        return f"model.layers.{layer}.{parts[part]}.{kind}"
    return name


def _half_rotation(weight: Tensor, heads: int) -> Tensor:
    """Undoes llama.cpp's row order for architecture llama.

    There a rotary pair is two neighbouring rows of a head; here (and in Hugging Face) it is a row of the
    head's first half and the same row of its second half.
    """
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
