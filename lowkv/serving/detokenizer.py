"""Turns a stream of token ids into a stream of text.

A token alone has no text: it may be part of a character, and whether its word begins with a space can depend
on what stands before it. So a few ids of context are decoded along with the new ones and the text of the
context is taken off. Text that may still change is held back: an unfinished UTF-8 character, and whatever may
be the beginning of a stop string. The pieces put together are the text of the whole, cut at the stop string.

One exception, for tokenizers with byte tokens (`<0xE2>`, Llama 2): decoded as a whole, one invalid byte
spoils the valid characters in the run of byte tokens around it; streamed, those given out before it stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8  # prompt tokens to begin with; more than one, since special tokens have no text
_UNFINISHED = 3  # bytes of an unfinished character at most, so as many replacement characters at the end


class TextDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids: nothing cleaned up, invalid UTF-8 as U+FFFD, special tokens left out if asked."""
        ...


class IncrementalDetokenizer:
    """The text of one sequence's output.

    Attributes:
        stopped: the stop string that ended the output, or None.
    """

    def __init__(
        self,
        tokenizer: TextDecoder,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
    ) -> None:
        """At the end of a prompt.

        Args:
            tokenizer: decodes ids.
            prompt_ids: the prompt, of which the end is the first output token's context.
            stop: strings that end the output, none empty.
            min_tokens: stop strings are looked for in the text after this many tokens.
        """
        self.stopped: str | None = None
        self._decode = partial(tokenizer.decode, skip_special=True)
        self._stops = tuple(stop)
        self._unstoppable = min_tokens if self._stops else 0
        # ids decoded together: the context, then those whose text is not all given. `_given` is the text of
        # `_ids` that is the context's or went out already.
        self._ids = list(prompt_ids[-_CONTEXT:])
        if self._ids and self._decode(self._ids).endswith(REPLACEMENT):
            self._ids = []  # a prompt of ids that ends inside a character: the output begins afresh
        self._context = len(self._ids)
        self._given = self._decode(self._ids) if self._ids else ""
        self._held = ""  # complete text that may begin a stop string

    def push(self, token: int) -> str:
        """Add an output token (not one that ends the output by its id).

        Returns:
            The text that is now certain, possibly empty; always empty once stopped.
        """
        if self.stopped is not None:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        finished = not text.endswith(REPLACEMENT)
        if text.startswith(self._given):
            end = len(text)
            while not finished and end > len(text) - _UNFINISHED and text[end - 1 : end] == REPLACEMENT:
                end -= 1
            new = text[len(self._given) : end]
            self._given += new
        elif finished:  # the context's own text changed: an invalid byte in its run, or in a prompt of ids
            new = self._decode(self._ids[self._context :])
        else:
            new = ""
        if finished:
            self._advance()
        return self._certain(new)

    def finish(self) -> str:
        """No more tokens come: the rest of the text, an unfinished character as U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._decode(self._ids)
        if not text.startswith(self._given):
            text, self._given = self._decode(self._ids[self._context :]), ""
        self._unstoppable = 0
        certain = self._certain(text[len(self._given) :])
        rest = certain if self.stopped is not None else certain + self._held
        self._ids, self._context, self._given, self._held = [], 0, "", ""
        return rest

    def _advance(self) -> None:
        """All text is given: the newest ids become the context."""
        newest = self._ids[self._context :]
        given = self._decode(newest)
        if given:
            self._ids, self._given = newest, given
        elif self._given:  # nothing to tell anything by (a special token): keep the context as it was
            del self._ids[self._context :]
            self._given = self._decode(self._ids)
        self._context = len(self._ids)

    def _certain(self, new: str) -> str:
        """The part of the held and the new text that can go out; sets `stopped`."""
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return new
        text = self._held + new
        if not self._stops:
            return text
        # The stop string completed first wins, the longest of those that end together: the same however the
        # text is cut into pieces.
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop (and not all of it)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
