"""Streamed text equals the text of the whole, for tokenizers trained here on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowkv.serving.detokenizer import REPLACEMENT, IncrementalDetokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Größe naïve café 東京都 한국어 🙂🙃 👩‍👩‍👧 ✓ — “quotes”\n\n  indented\ttext",
    "def f(x):\n    return x + 1\n" * 3,
]


class Wrapped:
    """A `tokenizers` tokenizer with lowkv's decode."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend = tokenizer

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)


def byte_level() -> Wrapped:
    """As GPT-2, Llama 3, Qwen, SmolLM2: every token is a string of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return Wrapped(tokenizer)


def byte_fallback() -> Wrapped:
    """As Llama 2, Mistral: words begin with the mark of a space, the first one's is stripped, rare bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz.,!", "▁hello", "▁world", "▁the", "▁of", "ing", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Wrapped(tokenizer)


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
LEVEL_SIZE = BYTE_LEVEL.backend.get_vocab_size()


def stream(
    tokenizer: Wrapped, prompt: list[int], output: list[int], stop: Sequence[str] = (), min_tokens: int = 0
) -> tuple[list[str], str | None]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, stop, min_tokens=min_tokens)
    pieces = [detokenizer.push(token) for token in output]
    return [*pieces, detokenizer.finish()], detokenizer.stopped


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is completed first, read one character at a time."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(len(stop) for stop in ending)]
    return text


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, LEVEL_SIZE - 1), max_size=12),
    output=st.lists(st.integers(0, LEVEL_SIZE - 1), max_size=30),
)
def test_any_ids_byte_level(prompt: list[int], output: list[int]) -> None:
    """Random ids are mostly invalid UTF-8."""
    pieces, _ = stream(BYTE_LEVEL, prompt, output)
    assert "".join(pieces) == BYTE_LEVEL.decode(output, True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), prompt=st.text(max_size=10))
def test_any_text_byte_level(text: str, prompt: str) -> None:
    pieces, _ = stream(BYTE_LEVEL, BYTE_LEVEL.encode(prompt), BYTE_LEVEL.encode(text))
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(pieces[:-1])


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("ab hello.,é東🙂\n"), max_size=40),
    prompt=st.sampled_from(["", "hello", "東"]),
)
def test_any_text_byte_fallback(text: str, prompt: str) -> None:
    """After a prompt the first word keeps its space; without one it is stripped, as in the whole."""
    before = BYTE_FALLBACK.encode(prompt) if prompt else []
    output = BYTE_FALLBACK.encode(text)
    pieces, _ = stream(BYTE_FALLBACK, before, output)
    whole = BYTE_FALLBACK.decode(before + output, True)
    assert "".join(pieces) == whole[len(prompt) :]
    assert REPLACEMENT not in "".join(pieces)


@settings(max_examples=200, deadline=None)
@given(output=st.lists(st.integers(0, 300), max_size=20))
def test_any_ids_byte_fallback_lose_no_word(output: list[int]) -> None:
    """Invalid byte runs may differ from the whole in how much became U+FFFD, and in nothing else."""
    pieces, _ = stream(BYTE_FALLBACK, [], output)
    kept = [token for token in output if not 3 <= token < 259]
    streamed = "".join(pieces)
    if all(token not in range(3, 259) for token in output):
        assert streamed == BYTE_FALLBACK.decode(output, True)
    for piece in BYTE_FALLBACK.decode(kept, True).split():
        assert all(letter in streamed for letter in piece)


def test_words_keep_their_spaces() -> None:
    """Token by token, "▁world" alone would lose its space."""
    prompt = BYTE_FALLBACK.encode("hello")
    hello, world = (BYTE_FALLBACK.backend.token_to_id(piece) for piece in ("▁hello", "▁world"))
    pieces, _ = stream(BYTE_FALLBACK, prompt, [world, hello, world])
    assert pieces == [" world", " hello", " world", ""]


def test_special_tokens_are_skipped_and_do_not_eat_spaces() -> None:
    world = BYTE_FALLBACK.backend.token_to_id("▁world")
    pieces, _ = stream(BYTE_FALLBACK, [1], [world, 2, world, 2, 2, world])
    assert "".join(pieces) == "world world world"
    pieces, _ = stream(BYTE_LEVEL, [1], [0, *BYTE_LEVEL.encode("the"), 0, *BYTE_LEVEL.encode(" dog"), 1])
    assert "".join(pieces) == "the dog"


def test_a_character_over_several_tokens_comes_whole() -> None:
    ids = [BYTE_FALLBACK.backend.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    for tokenizer, tokens in ((BYTE_FALLBACK, ids), (BYTE_LEVEL, BYTE_LEVEL.encode("\U0001f9ff"))):
        assert len(tokens) > 1
        pieces, _ = stream(tokenizer, tokenizer.encode("a"), tokens)
        assert [bool(piece) for piece in pieces] == [False] * (len(tokens) - 1) + [True, False]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    tokens = BYTE_LEVEL.encode("\U0001f9ff")[:-1]
    pieces, _ = stream(BYTE_LEVEL, [], [*BYTE_LEVEL.encode("ab"), *tokens])
    assert "".join(pieces) == "ab" + REPLACEMENT
    assert pieces[-1] == REPLACEMENT


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("abc 東"), max_size=40),
    stops=st.lists(st.text(st.sampled_from("abc 東"), min_size=1, max_size=5), max_size=4),
)
def test_stop_strings(text: str, stops: list[str]) -> None:
    output = BYTE_LEVEL.encode(text)
    pieces, stopped = stream(BYTE_LEVEL, [], output, stops)
    assert "".join(pieces) == cut(text, stops)
    assert (stopped is not None) == any(stop in text for stop in stops)


def test_a_stop_string_over_token_borders_never_shows() -> None:
    output = [*BYTE_LEVEL.encode("the fox"), *BYTE_LEVEL.encode("\n"), *BYTE_LEVEL.encode("\nUser: no")]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], ["\n\nUser:"])
    seen = ""
    for token in output:
        seen += detokenizer.push(token)
        assert "the fox".startswith(seen)
    assert detokenizer.stopped == "\n\nUser:"
    assert detokenizer.finish() == ""


def test_held_text_comes_out_when_it_was_no_stop_string() -> None:
    output = [token for letter in "xaab" for token in BYTE_LEVEL.encode(letter)]
    pieces, stopped = stream(BYTE_LEVEL, [], output, ["aac"])
    assert pieces == ["x", "", "", "aab", ""]
    assert stopped is None
    pieces, _ = stream(BYTE_LEVEL, [], output[:3], ["aac"])
    assert pieces == ["x", "", "", "aa"]


def test_stop_strings_wait_for_min_tokens() -> None:
    output = [token for letter in "abab" for token in BYTE_LEVEL.encode(letter)]
    assert "".join(stream(BYTE_LEVEL, [], output, ["b"], min_tokens=2)[0]) == "aba"
    assert "".join(stream(BYTE_LEVEL, [], output, ["b"], min_tokens=4)[0]) == "abab"


@pytest.mark.parametrize("name", ["stopped", "finished"])
def test_nothing_comes_after_the_end(name: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [], ["b"])
    if name == "stopped":
        detokenizer.push(BYTE_LEVEL.encode("b")[0])
        assert detokenizer.push(BYTE_LEVEL.encode("a")[0]) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.finish() == ""
