"""Tokens to calibrate on: drawn at random, or read from files, which are refused with a reason."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from lowkv.calibration.text import Dataset, dataset_tokens, random_tokens, read_dataset, windows
from lowkv.errors import LowkvError
from lowkv.models.tokenizer import Tokenizer

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    """One token a byte, 256 of them, and <eos>."""
    return Tokenizer.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def chat(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "tokenizer.json").write_bytes((tiny_checkpoint / "tokenizer.json").read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer.load(folder)


def text_of(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([int(i) for i in ids])


def test_random_tokens_cover_the_vocabulary_but_its_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {256}
    ids = random_tokens(tokenizer, 300, 20_000, seed=0)  # a vocabulary wider than the tokenizer's
    assert set(ids.tolist()) == set(range(256))
    np.testing.assert_array_equal(ids, random_tokens(tokenizer, 300, 20_000, seed=0))
    assert not np.array_equal(ids, random_tokens(tokenizer, 300, 20_000, seed=1))
    assert random_tokens(tokenizer, 100, 1000, seed=0).max() < 100


def test_a_text_file_is_read_from_its_beginning(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abcdefgh" * 1000)
    dataset = read_dataset(path)
    assert (dataset.name, dataset.sha256) == ("text.txt", hashlib.sha256(path.read_bytes()).hexdigest())
    ids = dataset_tokens(dataset, tokenizer, 60, seed=0)
    assert text_of(ids, tokenizer) == ("abcdefgh" * 8)[:60]


def test_lines_of_text_and_messages_are_read_in_the_order_of_the_seed(chat: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [{"text": f"text {n} "} for n in range(8)]
    messages = [{"role": "user", "content": "hello "}, {"role": "assistant", "content": "you "}]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"messages": messages}]) + "\n\n")
    dataset = read_dataset(path)
    everything = text_of(dataset_tokens(dataset, chat, 8 * 7 + 27, seed=0), chat)
    assert "<user>hello <assistant>you " in everything
    assert sorted(everything.split("text ")[1:])[0].startswith("0 ")
    assert all(everything.count(f"text {n} ") == 1 for n in range(8))
    orders = {text_of(dataset_tokens(dataset, chat, 64, seed), chat) for seed in range(4)}
    assert len(orders) > 1
    assert text_of(dataset_tokens(dataset, chat, 64, 3), chat) in orders


BAD_LINES = [
    ("{not json", "line 2 of .* is not JSON"),
    ('["text"]', "line 2 of .* is not what is read"),
    ('{"prompt": "hello"}', "line 2 of .* is not what is read"),
    ('{"text": 5}', "line 2 of .* is not what is read"),
    ('{"messages": []}', "line 2 of .* is not what is read"),
    ('{"messages": [{"role": "user"}]}', "line 2 of .* is not what is read"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_malformed_line_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(LowkvError, match=message):
        read_dataset(path)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LowkvError, match=r"cannot read kv_cache\.scales\.text: .*missing\.txt"):
        read_dataset(tmp_path / "missing.txt")
    with pytest.raises(LowkvError, match=r"expected a \.txt or \.jsonl file"):
        read_dataset(tmp_path / "data.parquet")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LowkvError, match="expected UTF-8 text"):
        read_dataset(binary)


def test_a_text_that_is_too_short_is_refused_with_its_length(tokenizer: Tokenizer) -> None:
    dataset = Dataset("short.txt", "", ("x" * 100,))
    with pytest.raises(LowkvError, match=r"too short: short\.txt: got '100 tokens'.*tokens to 100 or less"):
        dataset_tokens(dataset, tokenizer, 101, seed=0)
    with pytest.raises(LowkvError, match=r"got '0 tokens'"):
        dataset_tokens(Dataset("empty.jsonl", "", ()), tokenizer, 64, seed=0)


def test_messages_for_a_model_without_a_chat_template_are_refused_with_their_line(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('\n{"messages": [{"role": "user", "content": "hello"}]}\n')
    with pytest.raises(LowkvError, match=r"line 2 of chat\.jsonl: this model has no chat template"):
        dataset_tokens(read_dataset(path), tokenizer, 32, seed=0)


def test_windows_hold_every_token_once_after_the_prefix() -> None:
    ids = np.arange(100, dtype=np.int64)
    parts = list(windows(ids, 32, []))
    assert [len(part) for part in parts] == [32, 32, 32, 4]
    np.testing.assert_array_equal(np.concatenate(parts), ids)
    parts = list(windows(ids, 32, [-1, -2]))
    assert parts[0].tolist() == list(range(32))
    assert all(part[:2].tolist() == [-1, -2] for part in parts[1:])
    np.testing.assert_array_equal(np.concatenate([parts[0], *(part[2:] for part in parts[1:])]), ids)
    assert max(map(len, parts)) == 32
