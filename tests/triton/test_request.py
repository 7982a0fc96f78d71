from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from lowkv.errors import LowkvError
from lowkv.triton.client import _body
from lowkv.triton.fields import INPUT_BY_NAME
from lowkv.triton.request import Limits, parse_request

LIMITS = Limits(context=512, vocabulary=257, eos=(256,))
TYPES: dict[str, Any] = {
    "TYPE_STRING": object,
    "TYPE_INT32": np.int32,
    "TYPE_UINT64": np.uint64,
    "TYPE_FP32": np.float32,
    "TYPE_BOOL": np.bool_,
}


def tensors(**fields: Any) -> dict[str, Any]:
    """Arrays as Triton hands them over, from plain values; arrays are passed on as they are, None leaves out."""
    values = {"text_input": b"hello", "max_tokens": 8, **fields}
    made = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            made[name] = value
        elif value is not None:
            items = value if isinstance(value, list) else [value]
            made[name] = np.array([items], dtype=TYPES[INPUT_BY_NAME[name].dtype])
    return made


def parse(**fields: Any) -> Any:
    return parse_request(tensors(**fields), {}, LIMITS)


def test_least_request_is_greedy_and_echoes_its_input() -> None:
    request = parse()
    assert request.text == "hello"
    assert request.params.max_tokens == 8
    assert request.params.greedy
    assert request.echoes_input


def test_every_field_arrives() -> None:
    request = parse(
        stream=True,
        min_tokens=2,
        temperature=0.5,
        top_k=40,
        top_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=0.125,
        seed=2**64 - 1,
        stop_words=[b"END", "é".encode()],
        bad_words=[b"no"],
        ignore_eos=True,
        exclude_input_in_output=True,
        return_log_probs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    params = request.params
    assert (params.min_tokens, params.temperature, params.top_k, params.top_p) == (2, 0.5, 40, 0.5)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.25, 0.125)
    assert params.seed == 2**64 - 1
    assert params.stop == ("END", "é")
    assert params.bad_words == ("no",)
    assert params.ignore_eos
    assert params.logprobs
    assert request.stream
    assert request.exclude_input
    assert not request.echoes_input
    assert request.return_log_probs
    assert request.return_num_input_tokens
    assert request.return_num_output_tokens


def test_streams_never_echo() -> None:
    assert not parse(stream=True).echoes_input


def test_older_names() -> None:
    params = parse(random_seed=7, min_length=3).params
    assert (params.seed, params.min_tokens) == (7, 3)
    with pytest.raises(LowkvError, match="random_seed and seed are two names"):
        parse(random_seed=7, seed=8)


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.0}, {"temperature": 0.0}])
def test_neutral_sampling_values_stay_greedy(fields: dict[str, Any]) -> None:
    assert parse(**fields).params.greedy


@pytest.mark.parametrize("fields", [{"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.1}])
def test_asking_for_sampling_samples(fields: dict[str, Any]) -> None:
    assert not parse(**fields).params.greedy


def test_end_id_replaces_the_models_own() -> None:
    params = parse(end_id=10).params
    assert params.stop_token_ids == (10,)
    assert params.ignore_eos
    assert parse(end_id=256).params.stop_token_ids == ()
    assert not parse(end_id=256).params.ignore_eos
    assert parse(end_id=-1).params.ignore_eos


def test_empty_strings_in_word_lists_mean_none() -> None:
    assert parse(stop_words=[b""], bad_words=[b"", b"x"]).params.stop == ()
    assert parse(stop_words=np.empty((1, 0), dtype=object)).params.stop == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"length_penalty": 1.0, "beam_width": 1, "num_return_sequences": 1},
        {"return_context_logits": False, "return_generation_logits": False, "return_perf_metrics": False},
        {"pad_id": 0, "length_penalty": 0.0},
    ],
)
def test_switched_off_features_are_accepted(fields: dict[str, Any]) -> None:
    assert parse(**fields).text == "hello"


INT, FLOAT, TEXT = np.int32, np.float32, object
BAD: list[tuple[str, Any]] = [
    ("text_input", None),
    ("text_input", b""),
    ("text_input", b"ab\xff"),
    ("text_input", b"x" * (512 * 256 + 1)),
    ("text_input", np.array([[1]], INT)),
    ("text_input", np.array([[b"a", b"b"]], TEXT)),
    ("text_input", np.array([[5]], TEXT)),
    ("max_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 513),
    ("max_tokens", 2**31 - 1),
    ("max_tokens", np.array([[8.0]], FLOAT)),
    ("max_tokens", np.array([[8]], np.int64)),
    ("max_tokens", np.array([[8, 8]], INT)),
    ("max_tokens", np.empty((1, 0), INT)),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.5),
    ("temperature", np.array([[1]], INT)),
    ("top_k", -1),
    ("top_p", 1.5),
    ("top_p", -0.1),
    ("top_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.nan),
    ("presence_penalty", 3.0),
    ("frequency_penalty", math.inf),
    ("seed", np.array([[-1]], np.int64)),
    ("stop_words", np.array([[1]], INT)),
    ("stop_words", [b"ok", b"\xc3"]),
    ("stop_words", np.array([[b"a"], [b"b"]], TEXT)),
    ("stop_words", np.array([[3]], TEXT)),
    ("stop_words", [b"a"] * 257),
    ("stop_words", [b"a" * 1025]),
    ("bad_words", [b"\xff"]),
    ("end_id", 257),
    ("end_id", -2),
    ("pad_id", 300),
    ("stream", np.array([[1]], INT)),
    ("ignore_eos", np.array([[b"yes"]], TEXT)),
    ("length_penalty", 0.5),
    ("length_penalty", math.nan),
    ("beam_width", 2),
    ("num_return_sequences", 0),
    ("return_context_logits", True),
    ("return_generation_logits", True),
    ("return_perf_metrics", True),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_field_is_named(name: str, value: Any) -> None:
    with pytest.raises(LowkvError) as caught:
        parse(**{name: value})
    assert str(caught.value).startswith(name)


def test_misspelt_and_misplaced_fields_are_named() -> None:
    with pytest.raises(LowkvError, match=r"temprature is not a field.*did you mean temperature\?"):
        parse_request(tensors(), {"temprature": 0.5}, LIMITS)
    with pytest.raises(LowkvError, match="temperature came as a request parameter"):
        parse_request(tensors(), {"temperature": 0.5}, LIMITS)
    assert parse_request(tensors(), {"id": "7", "triton_enable_empty_final_response": True}, LIMITS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", "many"), ("max_tokens", True), ("max_tokens", 2**31), ("temperature", "hot"), ("stop_words", "END"),
     ("stop_words", [1]), ("seed", -1), ("ignore_eos", 1), ("text_input", b"bytes"), ("wishes", 3)],
)  # fmt: skip
def test_the_client_names_what_json_cannot_carry(name: str, value: Any) -> None:
    fields = {"text_input": "hi", "max_tokens": 3, name: value}
    with pytest.raises(LowkvError) as caught:
        _body(fields.pop("text_input"), fields.pop("max_tokens"), fields)
    assert str(caught.value).startswith(name)


def test_the_client_sends_what_it_was_given() -> None:
    assert json.loads(_body("é", 3, {"stop_words": ["a"]})) == {"text_input": "é", "max_tokens": 3, "stop_words": ["a"]}
