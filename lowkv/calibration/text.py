"""The tokens that a model is calibrated on: random ones, or those of a text.

    random     uniform over the vocabulary, special tokens left out, after what the model wants before a text (BOS)
    dataset    a .txt file, one text
               a .jsonl file, a text a line: {"messages": [...]} through the model's chat template, or {"text": "..."}
               without a file: articles of the Wikipedia excerpt of `lowkv.wikipedia`, those that evaluation
               does not begin with

Where a dataset has several texts, the seed says in which order they are taken; one text is read from its beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.models.tokenizer import Tokenizer

Ids = NDArray[np.int64]

_CHARACTERS = 16
"""Characters that a token hardly ever exceeds: no more of a long text is tokenized than is needed."""


@dataclass(frozen=True)
class Dataset:
    """Texts to calibrate on."""

    name: str
    """For people: the file's name, or what the bundled text is."""
    sha256: str
    texts: tuple[str | tuple[Mapping[str, Any], ...], ...]
    """Plain texts and conversations."""
    lines: tuple[int, ...] = ()
    """The file's line that each comes from; empty where there are no lines."""


def read_dataset(path: Path) -> Dataset:
    """The texts of a .txt or .jsonl file. Raises `LowkvError` for another file, or a line that is neither form."""
    if path.suffix not in (".txt", ".jsonl"):
        raise LowkvError(
            "kv_cache.scales.text is not a text that can be read", got=str(path), expected="a .txt or .jsonl file"
        )
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LowkvError(f"cannot read kv_cache.scales.text: {path}", got=str(error), expected="UTF-8 text") from error
    digest = hashlib.sha256(raw).hexdigest()
    if path.suffix == ".txt":
        return Dataset(path.name, digest, (text,))
    found = [(number, _entry(line, path, number)) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return Dataset(path.name, digest, tuple(entry for _, entry in found), tuple(number for number, _ in found))


def bundled_dataset(cache: Path | None = None) -> Dataset:
    """The second half of the Wikipedia excerpt's articles. Raises `LowkvError` when it cannot be downloaded."""
    from lowkv.wikipedia import SOURCE, wikipedia

    articles = [text for _, text in wikipedia(cache)]
    half = articles[len(articles) // 2 :]
    return Dataset(SOURCE, hashlib.sha256("\0".join(half).encode()).hexdigest(), tuple(half))


def dataset_tokens(dataset: Dataset, tokenizer: Tokenizer, count: int, seed: int) -> Ids:
    """The first `count` token ids of a dataset, its texts one after another.

    Raises:
        LowkvError: there are not so many, or the model cannot read conversations.
    """
    order = np.random.default_rng(seed).permutation(len(dataset.texts))
    ids: list[int] = []
    for index in order:
        ids += _encoded(dataset, int(index), tokenizer, count - len(ids))
        if len(ids) >= count:
            return np.array(ids[:count], np.int64)
    raise LowkvError(
        f"the text to calibrate on is too short: {dataset.name}",
        got=f"{len(ids)} tokens",
        expected=f"kv_cache.scales.tokens: {count}",
        fix=f"give more text, or set kv_cache.scales.tokens to {len(ids)} or less" if len(ids) >= 32 else "give more",
    )


def random_tokens(tokenizer: Tokenizer, vocab: int, count: int, seed: int) -> Ids:
    """`count` token ids, uniform over those below `vocab` that are no special tokens."""
    special = [i for i in tokenizer.special_ids if i < vocab]
    ordinary = np.setdiff1d(np.arange(min(vocab, tokenizer.vocab_size)), special)
    drawn = np.random.default_rng(seed).choice(ordinary, count)
    prefix = tokenizer.prefix[:count]
    drawn[: len(prefix)] = prefix
    return drawn.astype(np.int64)


def windows(ids: Ids, length: int, prefix: Sequence[int]) -> Iterator[Ids]:
    """The ids in windows of at most `length`, each beginning with the prefix: the first has it already, or a chat's."""
    yield ids[:length]
    size = length - len(prefix)
    for begin in range(length, len(ids), size):
        yield np.concatenate((np.array(prefix, np.int64), ids[begin : begin + size]))


def _entry(line: str, path: Path, number: int) -> str | tuple[Mapping[str, Any], ...]:
    expected = '{"messages": [{"role": ..., "content": ...}, ...]} or {"text": "..."}'
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise LowkvError(f"line {number} of {path} is not JSON", got=str(error), expected=expected) from error
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        text: str = entry["text"]
        return text
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        return tuple(messages)
    raise LowkvError(f"line {number} of {path} is not what is read", got=line[:80], expected=expected)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _encoded(dataset: Dataset, index: int, tokenizer: Tokenizer, count: int) -> Sequence[int]:
    """At least the first `count` tokens of one text, if it has them."""
    text = dataset.texts[index]
    if isinstance(text, str):
        short = text[: max(1, count) * _CHARACTERS]
        ids = tokenizer.encode(short)
        return ids if len(ids) >= count or short == text else tokenizer.encode(text)
    try:
        prompt = tokenizer.apply_chat_template(text, add_generation_prompt=False)
    except LowkvError as error:
        raise LowkvError(
            f"line {dataset.lines[index]} of {dataset.name}: {error.message}",
            got=error.got,
            fix='give messages that the model\'s chat template takes, or {"text": "..."} lines',
        ) from error
    return tokenizer.encode(prompt, add_special=False)
