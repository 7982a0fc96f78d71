"""Text to token ids and back, and chat messages to text.

Built on the `tokenizers` library and a `tokenizer.json`; transformers is not needed to serve. Chat templates
come with the checkpoint and are somebody else's code, so they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    import tokenizers
    from jinja2 import Template

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What a tokenizer consists of; all but the first may be absent."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A model's tokenizer. Use `Tokenizer.load`."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], eos: Iterable[int]) -> None:
        self._backend = backend
        self._settings = settings
        self.special_tokens: dict[str, str] = {}
        """`bos_token`, `eos_token`, ... and their texts, as far as the checkpoint names them."""
        for name in _SPECIAL_NAMES:
            text = settings.get(name)
            text = text.get("content") if isinstance(text, Mapping) else text
            if text is not None:
                self.special_tokens[name] = text
        ids = [*eos, backend.token_to_id(self.special_tokens.get("eos_token", ""))]
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ids if i is not None))
        """Every id that ends an answer."""

    @classmethod
    def load(cls, folder: Path, eos: Iterable[int] = ()) -> Tokenizer:
        """Reads a tokenizer from a Hugging Face folder or an engine directory.

        Args:
            folder: holds `tokenizer.json` and, as far as there are any, the others of `TOKENIZER_FILES`.
            eos: further ids that end an answer (the model config's).

        Raises:
            LowkvError: the files are missing or cannot be read.
        """
        import tokenizers

        path = folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for bad JSON
            raise LowkvError(
                f"cannot read {path}", got=str(error), expected="a tokenizer.json of the tokenizers library"
            ) from error
        backend.no_truncation()
        backend.no_padding()
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                settings |= json.loads((folder / name).read_text(encoding="utf-8"))
        template = folder / "chat_template.jinja"
        if template.is_file():
            settings["chat_template"] = template.read_text(encoding="utf-8")
        return cls(backend, settings, eos)

    @property
    def vocab_size(self) -> int:
        """Ids are below this; added tokens count."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which no plain text contains."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    @property
    def prefix(self) -> list[int]:
        """What the model wants before a text: a BOS token, or nothing."""
        bare, full = self.encode("a", add_special=False), self.encode("a")
        return full[: next(at for at in range(len(full)) if full[at : at + len(bare)] == bare)]

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        `add_special` adds what the model wants around a prompt (a BOS token, often nothing). Names of special tokens
        in the text become those tokens, as chat templates need.
        """
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of token ids, as it is: no clean-up of spaces. Bytes that are not yet whole UTF-8 give U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation.

        Encode it with `add_special=False`: templates write special tokens themselves.

        Args:
            messages: mappings with `role` and `content`.
            add_generation_prompt: end where the assistant's answer begins.

        Raises:
            LowkvError: the model has no chat template, or the template refuses the messages.
        """
        template = self._template
        try:
            return template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except Exception as error:  # whatever the checkpoint's code makes of these messages
            raise LowkvError(
                "the model's chat template refuses these messages",
                got=str(error),
                fix="check roles and their order; many models want user and assistant in turn",
            ) from error

    @cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        source = self._settings.get("chat_template")
        if isinstance(source, list):  # several templates by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise LowkvError("this model has no chat template", fix="send a plain text prompt instead of messages")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(source)
        except TemplateError as error:
            raise LowkvError("the model's chat template is not valid Jinja", got=str(error)) from error


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
