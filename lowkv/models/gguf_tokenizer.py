"""From a GGUF file's vocabulary to the `tokenizer.json` that it was made from.

A GGUF stores tokens, merges and the *name* of the rule that splits text before merging. The rules are in no
file, so those that are known stand in a table here; another one is refused by name, as a wrong rule gives
slightly wrong token ids that nobody notices.

SentencePiece vocabularies (`tokenizer.ggml.model = llama`) have no merges: a piece's score says how early two
neighbours become it, whichever two they are. So every way to make a piece out of two becomes a merge. Those that put a
space before a text (Llama 2's) are refused: they do so after special tokens too, which tokenizer.json cannot say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowkv.errors import LowkvError
from lowkv.models.gguf_file import GgufFile

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"
"""What a space is in a SentencePiece vocabulary."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
}
"""`tokenizer.ggml.pre` -> pre-tokenizers of the original tokenizer.json."""


_USE_A_FOLDER = "use the model's Hugging Face folder, which has a tokenizer.json"


def write_gguf_tokenizer(file: GgufFile, folder: Path) -> tuple[str, ...]:
    """Writes `tokenizer.json` and `tokenizer_config.json`; returns their names.

    Raises:
        LowkvError: a kind of vocabulary or a splitting rule that is not known.
    """
    tokenizer, settings = tokenizer_from_gguf(file)
    for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return ("tokenizer.json", "tokenizer_config.json")


def tokenizer_from_gguf(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of `tokenizer.json` and `tokenizer_config.json`."""
    metadata = file.metadata
    model = metadata.get("tokenizer.ggml.model")
    if model not in _KINDS:
        raise LowkvError(
            f"{file.path} has a vocabulary that lowkv cannot rebuild a tokenizer from",
            got=model,
            expected="gpt2 (byte-level BPE) or llama (SentencePiece)",
            fix=_USE_A_FOLDER,
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    names = {
        name: tokens[metadata[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if metadata.get(key) is not None
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
    } | _KINDS[model](file, tokens, kinds)
    if metadata.get("tokenizer.ggml.add_bos_token", model == "llama"):
        tokenizer["post_processor"] = _bos_processor(tokens, metadata["tokenizer.ggml.bos_token_id"])
    template = metadata.get("tokenizer.chat_template")
    return tokenizer, names | ({"chat_template": template} if template else {})


def _gpt2(file: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Byte-level BPE."""
    rule = file.metadata.get("tokenizer.ggml.pre")
    if rule not in _PRE_TOKENIZERS:
        raise LowkvError(
            f"{file.path} splits text by a rule that lowkv does not know",
            got=rule,
            expected="one of " + ", ".join(_PRE_TOKENIZERS),
            fix=_USE_A_FOLDER,
        )
    # Llama 3 takes a word that is in the vocabulary whole, whether or not merges lead to it.
    model = _bpe(tokens, file.metadata["tokenizer.ggml.merges"], ignore_merges=rule == "llama-bpe")
    return {
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[rule]},
        "post_processor": _byte_level(use_regex=True),
        "decoder": _byte_level(use_regex=True),
        "model": model,
    }


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Pieces by score, bytes for what has none, spaces as they are."""
    metadata = file.metadata
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise LowkvError(
            f"{file.path} has a SentencePiece vocabulary that puts a space before a text",
            expected="tokenizer.ggml.add_space_prefix: false",
            fix=_USE_A_FOLDER,
        )
    unknown = tokens[metadata["tokenizer.ggml.unknown_token_id"]]
    model = _bpe(
        tokens,
        _merges(tokens, metadata["tokenizer.ggml.scores"], kinds),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=unknown,
    )
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": model,
    }


_KINDS = {"gpt2": _gpt2, "llama": _sentencepiece}
"""`tokenizer.ggml.model` -> what of a tokenizer.json depends on it."""


def _merges(tokens: list[str], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two, those of the best pieces first."""
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL}
    order = sorted(
        (index for index, kind in enumerate(kinds) if kind == _NORMAL and len(tokens[index]) > 1),
        key=lambda index: (-scores[index], index),
    )
    merges = []
    for index in order:
        piece = tokens[index]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                merges.append((left, right))
    return merges


def _bpe(tokens: list[str], merges: Sequence[object], **settings: object) -> dict[str, Any]:
    defaults = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    vocab = {token: index for index, token in enumerate(tokens)}
    return defaults | settings | {"vocab": vocab, "merges": merges}


def _bos_processor(tokens: list[str], index: int) -> dict[str, Any]:
    bos, first, second = tokens[index], {"id": "A", "type_id": 0}, {"id": "B", "type_id": 1}
    special = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": first}],
        "pair": [special, {"Sequence": first}, special, {"Sequence": second}],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
