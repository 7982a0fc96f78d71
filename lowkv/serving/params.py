"""What a request may ask of the sampler.

One frozen object, checked when it is made, so that nothing further in is ever handed an impossible request:
an error names the field, what was got and what is allowed. It holds no state (that is `sampler.SamplerState`)
and knows no tokenizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowkv.errors import LowkvError

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence's tokens are chosen and when it ends.

    Attributes:
        max_tokens: output tokens at most, at least 1.
        min_tokens: until this many output tokens exist, stop tokens cannot be chosen and stop strings are not
            looked for.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 keeps all.
        repetition_penalty: CTRL (arXiv 1909.05858, section 4.1), over prompt and output: a positive logit of a
            token seen before is divided by it, a negative one multiplied. 1 does nothing.
        presence_penalty: subtracted once from the logit of every token in the output (as OpenAI's API has it).
        frequency_penalty: subtracted once for every time that the token is in the output.
        seed: the same seed gives the same draws, whatever else runs beside it; None draws one at admission.
        stop: strings that end the output; the string itself and what follows it are not returned.
        stop_token_ids: token ids that end the output, beside the model's own end tokens.
        bad_words: strings whose tokens are not to be generated (alone or after a space).
        ignore_eos: the model's end tokens do not end the output (`stop_token_ids` still do).
        logprobs: report each token's log-probability.

    Raises:
        LowkvError: a field has the wrong type or an impossible value; the message names it.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise LowkvError(
                "min_tokens is larger than max_tokens",
                got=self.min_tokens,
                expected=f"at most max_tokens ({self.max_tokens})",
                fix="lower min_tokens or raise max_tokens",
            )
        _real("temperature", self.temperature, 0.0, math.inf, "0 (greedy) or a positive number")
        _integer("top_k", self.top_k, 0)
        _real("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1", open_low=True)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "a positive number", open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0, "between -2 and 2")
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "between -2 and 2")
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        _strings("stop", self.stop)
        _strings("bad_words", self.bad_words)
        if not isinstance(self.stop_token_ids, tuple):
            raise LowkvError(
                "stop_token_ids has the wrong type", got=self.stop_token_ids, expected="a tuple of token ids"
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        for name in ("ignore_eos", "logprobs"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise LowkvError(f"{name} has the wrong type", got=value, expected="true or false")

    @property
    def greedy(self) -> bool:
        """Nothing is drawn: the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Some penalty changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    bound = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise LowkvError(f"{name} has the wrong type", got=value, expected=f"a whole number, {bound}")
    if value < low or (high is not None and value > high):
        raise LowkvError(f"{name} is out of range", got=value, expected=bound)


def _real(name: str, value: object, low: float, high: float, allowed: str, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LowkvError(f"{name} has the wrong type", got=value, expected=f"a number {allowed}")
    below = value <= low if open_low else value < low
    if not math.isfinite(value) or below or value > high:
        raise LowkvError(f"{name} is out of range", got=value, expected=allowed)


def _strings(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise LowkvError(f"{name} has the wrong type", got=value, expected="a tuple of strings")
    if "" in value:
        raise LowkvError(
            f"{name} holds an empty string",
            got=value,
            expected="strings of at least one character",
            fix="leave it out",
        )
