"""Tokenizers and chat templates, on small vocabularies made here (SmolLM2's own is in test_smollm2.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from lowkv.errors import LowkvError
from lowkv.models.gguf_tokenizer import tokenizer_from_gguf
from lowkv.models.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces ",
    "naïve café 東京 🙂",
    "line\r\n\n\tend",
    "it's 1234,5",
    "<s>hello</s>",
]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MESSAGES = [{"role": "user", "content": "<b>hi & bye</b>"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a byte-level tokenizer that adds a BOS token."""
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(4)  # what a checkpoint was trained with must not cut prompts
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
    assert tokenizer.encode(text) == [256, *tokenizer.encode(text, add_special=False)]


def test_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder, eos=[258, 257])
    assert tokenizer.eos_ids == (258, 257)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.vocab_size == 259
    ids = tokenizer.encode("a<|end|>")
    assert ids[-1] == 258
    assert tokenizer.decode(ids) == "<s>a<|end|>"
    assert tokenizer.decode(ids, skip_special=True) == "a"
    assert tokenizer.token_to_id("<|end|>") == 258
    assert tokenizer.token_to_id("nothing") is None


def test_half_a_character_decodes_to_a_replacement(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("🙂", add_special=False)
    assert tokenizer.decode(ids[:2]) == "\ufffd"


def test_missing_and_broken_files_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LowkvError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(LowkvError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}[{{ m.role }}]\n"
    "{{ m.content | tojson }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_chat_templates_are_found_where_checkpoints_keep_them(folder: Path, place: str) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if place == "file":
        settings["chat_template"] = "an older one"
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        settings["chat_template"] = TEMPLATE if place == "config" else several
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.apply_chat_template(MESSAGES) == '<s>[user]\n"<b>hi & bye</b>"[assistant]'
    assert not tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False).endswith("[assistant]")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),  # the sandbox
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "not valid Jinja"),
        (None, "no chat template"),
    ],
)
def test_templates_that_fail_say_why(folder: Path, template: str | None, message: str) -> None:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(LowkvError, match=message):
        Tokenizer.load(folder).apply_chat_template(MESSAGES)


def gguf_vocabulary(rule: str, **more: Any) -> Any:
    tokens = [*ALPHABET, "Ġhello", "<s>", "</s>", "<think>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 4],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    }
    return SimpleNamespace(path=Path("model.gguf"), metadata=metadata | more)


def tokenizer_of(vocabulary: Any) -> Tokenizer:
    tokenizer, settings = tokenizer_from_gguf(vocabulary)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(tokenizer)), settings, ())


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_vocabulary_becomes_a_tokenizer(rule: str, text: str) -> None:
    tokenizer = tokenizer_of(gguf_vocabulary(rule))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a</s><think>", add_special=False)[-2:] == [258, 259]
    assert tokenizer.eos_ids == (258,)


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ", "Ġ123", "!"]),
        ("smollm", ["it", "'s", "ĠĠ", "1", "2", "3", "!"]),  # digits stand alone, before spaces are looked at
        ("llama-bpe", ["it", "'s", "Ġ", "Ġ", "123", "!"]),
        ("qwen2", ["it", "'s", "Ġ", "Ġ", "1", "2", "3", "!"]),
    ],
)
def test_text_is_split_by_the_rule_of_the_vocabulary(rule: str, pieces: list[str]) -> None:
    tokenizer, _ = tokenizer_from_gguf(gguf_vocabulary(rule))
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("it's  123!")] == pieces


def test_rules_that_differ_beyond_splitting() -> None:
    whole = tokenizer_of(gguf_vocabulary("llama-bpe"))
    assert whole.encode(" hello", add_special=False) == [256]  # in the vocabulary, though no merge leads there
    assert len(tokenizer_of(gguf_vocabulary("gpt-2")).encode(" hello", add_special=False)) == 6
    decomposed = "e\u0301"
    normalized = tokenizer_of(gguf_vocabulary("qwen2"))
    assert normalized.decode(normalized.encode(decomposed)) == "\u00e9"


def sentencepiece_vocabulary(**more: Any) -> Any:
    """Pieces with scores, as Gemma's: a smaller score is a later merge."""
    pieces = ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab", "\n"]
    scores = [-9.0, -9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -4.0, -9.0]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "   ", "<turn>", *bytes_, *pieces]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * 4 + [0.0] * 258 + scores,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 4, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return SimpleNamespace(path=Path("model.gguf"), metadata=metadata | more)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["a", "bc"]),  # bc has the better score, though ab comes first
        ("ab", ["ab"]),
        (" ab", ["▁ab"]),
        (" abc", ["▁a", "bc"]),
        ("a   b", ["a", "   ", "b"]),  # a run of spaces is a piece that nothing merges with
        ("a  b", ["a", "▁", "▁", "b"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("b<turn>\na", ["b", "<turn>", "\n", "a"]),
    ],
)
def test_a_sentencepiece_vocabulary_becomes_a_tokenizer(text: str, pieces: list[str]) -> None:
    vocabulary = sentencepiece_vocabulary()
    tokenizer = tokenizer_of(vocabulary)
    tokens = vocabulary.metadata["tokenizer.ggml.tokens"]
    assert [tokens[index] for index in tokenizer.encode(text)] == ["<bos>", *pieces]
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_a_bos_token_is_added_if_the_file_says_so() -> None:
    vocabulary = gguf_vocabulary("llama-bpe", **{"tokenizer.ggml.add_bos_token": True})
    tokenizer = tokenizer_of(vocabulary)
    assert tokenizer.encode("a")[0] == 257
    assert tokenizer.encode("a", add_special=False)[0] != 257


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "cannot rebuild a tokenizer from: got 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "puts a space before a text"),
        ({"tokenizer.ggml.pre": "tekken"}, "a rule that lowkv does not know: got 'tekken'"),
    ],
)
def test_vocabularies_that_are_not_known_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LowkvError, match=message):
        tokenizer_from_gguf(gguf_vocabulary("smollm", **change))
