"""From the tensors of one request to a `GenerateRequest`, or to an error that names the field.

Triton checks declared types and shapes itself for gRPC and for binary HTTP, but not everything reaches it in that
form, and nothing it checks is about values; so every field is checked here again. No Triton in it: arrays in,
plain values out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowkv.errors import LowkvError
from lowkv.serving.params import SamplingParams
from lowkv.triton.fields import ALIASES, INPUT_BY_NAME, INPUTS, NEUTRAL, Field

_NUMPY_TYPES = {
    "TYPE_INT32": np.dtype(np.int32),
    "TYPE_UINT64": np.dtype(np.uint64),
    "TYPE_FP32": np.dtype(np.float32),
    "TYPE_BOOL": np.dtype(np.bool_),
}
# A request must not be able to stop the others: tokenizing megabytes takes seconds, and every word is looked for at
# every token. No tokenizer has tokens of this many bytes on average.
MOST_BYTES_PER_TOKEN = 256
MOST_WORDS = 256
LONGEST_WORD = 1024  # characters


@dataclass(frozen=True)
class Limits:
    """What a request's values are checked against.

    `context`: most tokens of a prompt and its answer together; `vocabulary`: number of token ids; `eos`: the
    model's own end tokens. How long a prompt is in tokens, and whether the KV cache can hold it, is the engine's to
    check.
    """

    context: int
    vocabulary: int
    eos: tuple[int, ...] = ()


@dataclass(frozen=True)
class GenerateRequest:
    """One checked request."""

    text: str
    params: SamplingParams
    stream: bool = False
    exclude_input: bool = False
    return_log_probs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False

    @property
    def echoes_input(self) -> bool:
        """The answer starts with the prompt: TensorRT-LLM's default, except in streams."""
        return not self.stream and not self.exclude_input


def parse_request(
    tensors: Mapping[str, NDArray[Any] | None], parameters: Mapping[str, object], limits: Limits
) -> GenerateRequest:
    """The request in `tensors`, whose shapes include the batch dimension ([1, 1] or [1, n]).

    `parameters` are the request's parameters: everything that a JSON body holds beside the declared inputs. A
    misspelt `temprature` arrives there, so that unknown ones are refused.

    Raises:
        LowkvError: the message starts with the name of the field.
    """
    _check_parameters(parameters)
    values = {field.name: _value(field, tensors.get(field.name)) for field in INPUTS}
    for old, new in ALIASES.items():
        if values[new] is None:
            values[new] = values[old]
        elif values[old] is not None and values[old] != values[new]:
            raise LowkvError(
                f"{old} and {new} are two names of one setting", got=(values[old], values[new]), fix=f"send {new} only"
            )
    for name, neutral in NEUTRAL.items():
        if values[name] is not None and values[name] not in neutral:
            raise LowkvError(
                f"{name} is not supported",
                got=values[name],
                expected=" or ".join(str(value) for value in neutral),
                fix=f"leave {name} out",
            )
    text = values["text_input"]
    if not text:
        raise LowkvError("text_input is empty", got=text, expected="a prompt of at least one character")
    if len(text) > limits.context * MOST_BYTES_PER_TOKEN:
        raise LowkvError(
            "text_input is too long",
            got=f"{len(text)} characters",
            expected=f"at most {limits.context} tokens, the answer included",
            fix="shorten the prompt",
        )
    for name in ("end_id", "pad_id"):
        _check_token(name, values[name], limits.vocabulary)
    return GenerateRequest(
        text=text,
        params=_sampling(values, limits),
        stream=bool(values["stream"]),
        exclude_input=bool(values["exclude_input_in_output"]),
        return_log_probs=bool(values["return_log_probs"]),
        return_num_input_tokens=bool(values["return_num_input_tokens"]),
        return_num_output_tokens=bool(values["return_num_output_tokens"]),
    )


def _check_parameters(parameters: Mapping[str, object]) -> None:
    for name in parameters:
        if name == "id" or name.startswith("triton_"):
            continue
        if name in INPUT_BY_NAME:
            raise LowkvError(f"{name} came as a request parameter", fix="send it as an input tensor")
        close = difflib.get_close_matches(name, INPUT_BY_NAME, n=1)
        raise LowkvError(
            f"{name} is not a field of this model",
            got=parameters[name],
            fix=f"did you mean {close[0]}?" if close else "see /v2/models/NAME/config for its inputs",
        )


def _value(field: Field, array: NDArray[Any] | None) -> Any:
    """The field's Python value: None when absent, a tuple of strings for a list, else one scalar."""
    name = field.name
    if array is None:
        if not field.optional:
            raise LowkvError(f"{name} is missing", expected=_described(field), fix=f"send {name}")
        return None
    if field.dtype == "TYPE_STRING":
        if array.dtype.kind not in "OSU":
            raise LowkvError(f"{name} has the wrong type", got=str(array.dtype), expected=_described(field))
    elif array.dtype != _NUMPY_TYPES[field.dtype]:
        raise LowkvError(f"{name} has the wrong type", got=str(array.dtype), expected=_described(field))
    if field.scalar and array.size != 1:
        raise LowkvError(f"{name} has the wrong shape", got=list(array.shape), expected=_described(field))
    if not field.scalar:
        if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
            raise LowkvError(f"{name} has the wrong shape", got=list(array.shape), expected=_described(field))
        return _words(name, array)
    return _text(name, array.item()) if field.dtype == "TYPE_STRING" else array.item()


def _words(name: str, array: NDArray[Any]) -> tuple[str, ...]:
    if array.size > MOST_WORDS:
        raise LowkvError(f"{name} has too many entries", got=array.size, expected=f"at most {MOST_WORDS}")
    # TensorRT-LLM's clients send [""] for "none".
    words = tuple(word for word in (_text(name, item) for item in array.ravel()) if word)
    if any(len(word) > LONGEST_WORD for word in words):
        raise LowkvError(f"{name} has an entry that is too long", expected=f"at most {LONGEST_WORD} characters")
    return words


def _text(name: str, item: object) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, bytes):
        raise LowkvError(f"{name} has the wrong type", got=type(item).__name__, expected="a string")
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LowkvError(
            f"{name} is not valid UTF-8",
            got=item[error.start : error.end],
            expected=f"UTF-8 (byte {error.start} of {len(item)} is not)",
            fix="encode the text as UTF-8",
        ) from None


def _described(field: Field) -> str:
    kind = field.dtype.removeprefix("TYPE_")
    return f"{kind} of shape [1, 1]" if field.scalar else f"{kind} of shape [1, n]"


def _check_token(name: str, token: int | None, vocabulary: int) -> None:
    if token is not None and not -1 <= token < vocabulary:
        raise LowkvError(f"{name} is out of range", got=token, expected=f"-1 (none) or 0 to {vocabulary - 1}")


def _sampling(values: Mapping[str, Any], limits: Limits) -> SamplingParams:
    """TensorRT-LLM's sampling inputs as SamplingParams.

    Greedy unless something asks for sampling, as there. Theirs stays greedy when only `temperature` is given;
    here a temperature above 0 samples, which is what everybody means by it.
    """
    max_tokens = values["max_tokens"]
    if max_tokens < 1 or max_tokens > limits.context:
        raise LowkvError("max_tokens is out of range", got=max_tokens, expected=f"1 to {limits.context}")
    top_k = values["top_k"] or 0
    top_p = values["top_p"]
    if top_p is None or top_p == 0.0:  # 0 is TensorRT-LLM's "not set"
        top_p = 1.0
    temperature = values["temperature"]
    if temperature is None:
        temperature = 1.0 if top_k > 1 or top_p < 1.0 else 0.0
    end_id = values["end_id"]
    replaces_eos = end_id is not None and end_id not in limits.eos
    seed = values["seed"]
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_given(values["min_tokens"], 0),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=_given(values["repetition_penalty"], 1.0),
        presence_penalty=_given(values["presence_penalty"], 0.0),
        frequency_penalty=_given(values["frequency_penalty"], 0.0),
        seed=seed,
        stop=values["stop_words"] or (),
        stop_token_ids=(end_id,) if replaces_eos and end_id >= 0 else (),
        bad_words=values["bad_words"] or (),
        ignore_eos=bool(values["ignore_eos"]) or replaces_eos,
        logprobs=bool(values["return_log_probs"]),
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
