"""A real Triton server on a tiny random Llama: what clients see, good and bad."""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from lowkv.errors import LowkvError
from lowkv.triton.client import GenerateClient
from lowkv.triton.server import TritonServer

pytestmark = pytest.mark.triton

IDLE = {
    'lowkv_requests{state="running"}': 0.0,
    'lowkv_requests{state="waiting"}': 0.0,
    'lowkv_kv_bytes{state="used"}': 0.0,
    'lowkv_kv_blocks{kind="hot"}': 0.0,
    'lowkv_kv_blocks{kind="cold"}': 0.0,
}


def metrics(server: TritonServer) -> dict[str, float]:
    """Our metrics, by name and the label that is not the model's name or version."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith("lowkv_"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.rstrip("}").partition("{")
            own = [label for label in labels.split(",") if label.split("=")[0] not in ("model", "version")]
            assert f'model="{server.model_name}"' in labels
            found[name + ("{" + ",".join(own) + "}" if own else "")] = float(value)
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def wait_until_idle(server: TritonServer, seconds: float = 10.0) -> None:
    wait_until(lambda: IDLE.items() <= metrics(server).items(), seconds)


def settled_metrics(server: TritonServer, seconds: float = 10.0) -> dict[str, float]:
    """The metrics once nothing runs and a whole second has changed none: they are published now and then, one by one,
    so that those of earlier requests may still be on their way while the server is idle.
    """
    deadline = time.monotonic() + seconds
    now = metrics(server)
    while True:
        before = now
        time.sleep(1)
        now = metrics(server)
        if now == before and IDLE.items() <= now.items():
            return now
        assert time.monotonic() < deadline, "the metrics did not settle in time"


# -- good requests ---------------------------------------------------------------------------------------


def test_stream_and_whole_answer_are_the_same_text(client: GenerateClient) -> None:
    pieces = list(client.stream("hello", 24, ignore_eos=True, return_num_output_tokens=True))
    whole = client.generate("hello", 24, ignore_eos=True)
    assert len(pieces) == 24
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason for piece in pieces] == [None] * 23 + ["length"]
    assert [piece.raw["num_output_tokens"] for piece in pieces] == list(range(1, 25))
    assert whole.finish_reason == "length"


def test_what_was_asked_for_is_returned(client: GenerateClient) -> None:
    flags = dict.fromkeys(("return_log_probs", "return_num_input_tokens", "return_num_output_tokens"), True)
    raw = client.generate("hello", 6, ignore_eos=True, **flags).raw
    assert raw["num_input_tokens"] == 5
    assert raw["num_output_tokens"] == 6
    assert raw["sequence_index"] == 0
    assert len(raw["output_log_probs"]) == 6
    assert all(logprob < 0 for logprob in raw["output_log_probs"])
    assert raw["cum_log_probs"] == pytest.approx(sum(raw["output_log_probs"]), abs=1e-4)
    plain = client.generate("hello", 6).raw
    assert not {"output_log_probs", "cum_log_probs", "num_input_tokens", "num_output_tokens"} & set(plain)


def test_input_is_echoed_as_tensorrt_llm_does(client: GenerateClient) -> None:
    answer = client.generate("hello", 6).text
    assert client.generate("hello", 6, exclude_input_in_output=False).text == "hello" + answer
    assert "".join(p.text for p in client.stream("hello", 6, exclude_input_in_output=False)) == answer


def test_stop_words_and_seeds(client: GenerateClient) -> None:
    text = client.generate("hello", 40, ignore_eos=True, temperature=1.5, seed=3).text
    assert client.generate("hello", 40, ignore_eos=True, temperature=1.5, random_seed=3).text == text
    assert client.generate("hello", 40, ignore_eos=True, temperature=1.5, seed=4).text != text
    word = next(char for char in text[3:] if char.isascii())
    stopped = client.generate("hello", 40, ignore_eos=True, temperature=1.5, seed=3, stop_words=[word, ""])
    assert stopped.text == text[: text.index(word)]
    assert stopped.finish_reason == "stop"


def test_configuration_says_what_is_served(client: GenerateClient) -> None:
    config = client.config()
    assert config["model_transaction_policy"]["decoupled"] is True
    said = {key: value["string_value"] for key, value in config["parameters"].items()}
    assert said["kv_cache.layers"] == "k4v2 x1 + kivi2 x1"
    assert said["kv_cache.budget_bytes"] == str(8 * 2**20)
    assert said["serving.policy"] == "guaranteed_no_evict"


def test_metrics_are_there_and_move(server: TritonServer, client: GenerateClient) -> None:
    before = settled_metrics(server)
    list(client.stream("x" * 300, 20, ignore_eos=True))
    after = settled_metrics(server)
    assert after['lowkv_tokens_total{direction="in"}'] == before['lowkv_tokens_total{direction="in"}'] + 300
    assert after['lowkv_tokens_total{direction="out"}'] == before['lowkv_tokens_total{direction="out"}'] + 20
    assert after["lowkv_step_seconds_count"] >= before["lowkv_step_seconds_count"] + 20
    assert after["lowkv_step_seconds_sum"] > before["lowkv_step_seconds_sum"]
    assert 0 < after['lowkv_kv_bytes{state="total"}'] <= 8 * 2**20
    assert after["lowkv_running_peak"] >= 1
    assert 2 < after["lowkv_kv_effective_bits"] < 8
    assert after["lowkv_preemptions_total"] == 0


# -- gRPC ------------------------------------------------------------------------------------------------


class GrpcStream:
    """One bidirectional stream: `send` a request, `next` response or error."""

    def __init__(self, server: TritonServer) -> None:
        import tritonclient.grpc as grpc

        self.grpc = grpc
        self.model = server.model_name
        self.client = grpc.InferenceServerClient(server.grpc_address)
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))

    def send(self, request_id: str = "", **arrays: Any) -> None:
        names = {"O": "BYTES", "i": "INT32", "f": "FP32", "b": "BOOL", "u": "UINT64"}
        inputs = []
        for name, array in arrays.items():
            tensor = self.grpc.InferInput(name, list(array.shape), names[array.dtype.kind])
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        self.client.async_stream_infer(self.model, inputs, request_id=request_id, enable_empty_final_response=True)

    def next(self) -> tuple[Any, Any]:
        return self.answers.get(timeout=30)

    def close(self, *, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


@pytest.fixture
def grpc_stream(server: TritonServer) -> Iterator[GrpcStream]:
    stream = GrpcStream(server)
    yield stream
    stream.close()


def text(value: str | bytes) -> Any:
    return np.array([[value.encode() if isinstance(value, str) else value]], dtype=object)


def int32(*values: int) -> Any:
    return np.array([values], dtype=np.int32)


YES = np.array([[True]])


def test_grpc_streams(grpc_stream: GrpcStream, client: GenerateClient) -> None:
    grpc_stream.send(text_input=text("hello"), max_tokens=int32(8), stream=YES, ignore_eos=YES, return_log_probs=YES)
    pieces = []
    while True:
        result, error = grpc_stream.next()
        assert error is None
        response = result.get_response()
        if response.outputs:
            pieces.append(result)
        if response.parameters["triton_final_response"].bool_param:
            break
    assert b"".join(p.as_numpy("text_output")[0, 0] for p in pieces).decode() == client.generate(
        "hello", 8, ignore_eos=True
    ).text  # fmt: skip
    assert pieces[-1].as_numpy("finish_reason").tolist() == [[b"length"]]
    assert pieces[-1].as_numpy("output_log_probs").shape == (1, 1, 1)
    assert pieces[-1].as_numpy("cum_log_probs").shape == (1, 1)


# -- bad requests ----------------------------------------------------------------------------------------

HTTP_BAD: list[tuple[str, bytes]] = [
    ("text_input", b'{"max_tokens": 4}'),
    ("text_input", b'{"text_input": "", "max_tokens": 4}'),
    ("text_input", b'{"text_input": "a\xff\xfe", "max_tokens": 4}'),
    ("text_input", b'{"text_input": ["a", "b"], "max_tokens": 4}'),
    ("text_input", json.dumps({"text_input": "x" * 3000, "max_tokens": 4}).encode()),
    ("max_tokens", b'{"text_input": "hi"}'),
    ("max_tokens", b'{"text_input": "hi", "max_tokens": 0}'),
    ("max_tokens", b'{"text_input": "hi", "max_tokens": -3}'),
    ("max_tokens", b'{"text_input": "hi", "max_tokens": 100000}'),
    ("max_tokens", b'{"text_input": "hi", "max_tokens": 2047}'),
    ("max_tokens", b'{"text_input": "hi", "max_tokens": []}'),
    ("temperature", b'{"text_input": "hi", "max_tokens": 4, "temperature": NaN}'),
    ("temperature", b'{"text_input": "hi", "max_tokens": 4, "temperature": -1}'),
    ("top_p", b'{"text_input": "hi", "max_tokens": 4, "top_p": 1.5}'),
    ("top_k", b'{"text_input": "hi", "max_tokens": 4, "top_k": -1}'),
    ("min_tokens", b'{"text_input": "hi", "max_tokens": 4, "min_tokens": 5}'),
    ("repetition_penalty", b'{"text_input": "hi", "max_tokens": 4, "repetition_penalty": 0}'),
    ("stop_words", b'{"text_input": "hi", "max_tokens": 4, "stop_words": ["\xff"]}'),
    ("end_id", b'{"text_input": "hi", "max_tokens": 4, "end_id": 9999}'),
    ("beam_width", b'{"text_input": "hi", "max_tokens": 4, "beam_width": 4}'),
    ("length_penalty", b'{"text_input": "hi", "max_tokens": 4, "length_penalty": 0.5}'),
    ("return_context_logits", b'{"text_input": "hi", "max_tokens": 4, "return_context_logits": true}'),
    ("temprature", b'{"text_input": "hi", "max_tokens": 4, "temprature": 0.5}'),
    # Refused by Triton's own JSON reader, before the model sees them; it does not say which field it means.
    ("", b'{"text_input": "hi", "max_tokens": "many"}'),
    ("", b'{"text_input": 5, "max_tokens": 4}'),
    ("", b'{"text_input": "hi", "max_tokens": 4, "stop_words": [1]}'),
    ("", b'{"text_input": "hi", "max_tokens": 4, "seed": -1}'),
    ("", b"{"),
]


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_bad_http_requests_are_answered_by_name(server: TritonServer, client: GenerateClient, verb: str) -> None:
    expected = client.generate("good", 4, ignore_eos=True).text
    for field, body in HTTP_BAD:
        with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)) as connection:
            connection.request("POST", f"/v2/models/{server.model_name}/{verb}", body)
            response = connection.getresponse()
            message = json.loads(response.read().removeprefix(b"data: "))["error"]
        assert response.status >= 400, body
        assert field in message, body
        assert client.generate("good", 4, ignore_eos=True).text == expected
    wait_until_idle(server)


GRPC_BAD: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": np.array([[4.0]], np.float32)}),
    ("max_tokens", {"max_tokens": int32(4, 4)}),
    ("max_tokens", {"max_tokens": np.array([4], np.int32)}),
    ("max_tokens", {"max_tokens": int32(0)}),
    ("batch-size", {"max_tokens": np.array([[4], [4]], np.int32), "text_input": np.array([[b"a"], [b"b"]], object)}),
    ("text_input", {"text_input": text(b"\xff\xfe")}),
    ("text_input", {"text_input": int32(1)}),
    ("text_input", {"text_input": text("")}),
    ("temperature", {"temperature": np.array([[np.nan]], np.float32)}),
    ("stop_words", {"stop_words": int32(1)}),
    ("stop_words", {"stop_words": np.array([[b"a", b"\xc3"]], object)}),
    ("stream", {"stream": int32(1)}),
    ("seed", {"seed": int32(1)}),
    ("lora_task_id", {"lora_task_id": np.array([[1]], np.uint64)}),
]


def test_bad_grpc_requests_are_answered_by_name(server: TritonServer) -> None:
    # Triton answers a request that its core refuses without a final response, so each gets its own stream.
    for field, wrong in GRPC_BAD:
        with closing(GrpcStream(server)) as stream:
            stream.send(**{"text_input": text("hi"), "max_tokens": int32(4), **wrong})
            _, error = stream.next()
            assert error is not None, field
            assert field in str(error)
        with closing(GrpcStream(server)) as stream:
            stream.send(text_input=text("good"), max_tokens=int32(4))
            result, error = stream.next()
            assert error is None
            assert result.as_numpy("finish_reason")[0, 0] in (b"length", b"stop")
    wait_until_idle(server)


# -- cancellation ----------------------------------------------------------------------------------------


def test_a_dropped_http_client_frees_its_blocks(server: TritonServer, client: GenerateClient) -> None:
    wait_until_idle(server)
    stream = client.stream("x" * 200, 1800, ignore_eos=True)
    for _ in range(3):
        next(stream)
    wait_until(lambda: metrics(server)['lowkv_kv_bytes{state="used"}'] > 0)
    before = metrics(server)['lowkv_tokens_total{direction="out"}']
    stream.close()  # type: ignore[attr-defined]
    wait_until_idle(server, 3)
    assert metrics(server)['lowkv_tokens_total{direction="out"}'] < before + 1000


def test_a_cancelled_grpc_stream_frees_its_blocks(server: TritonServer) -> None:
    wait_until_idle(server)
    stream = GrpcStream(server)
    for _ in range(3):
        stream.send(text_input=text("x" * 100), max_tokens=int32(1800), ignore_eos=YES, stream=YES)
    assert stream.next()[1] is None
    wait_until(lambda: metrics(server)['lowkv_requests{state="running"}'] == 3)
    stream.close(cancel=True)
    wait_until_idle(server, 3)


def test_a_full_queue_says_so_and_the_rest_goes_on(server: TritonServer, client: GenerateClient) -> None:
    wait_until_idle(server)
    stream = GrpcStream(server)

    def send(count: int) -> None:
        for _ in range(count):
            stream.send(text_input=text("x" * 100), max_tokens=int32(1900), ignore_eos=YES, stream=YES)

    send(16)
    wait_until(lambda: metrics(server)['lowkv_requests{state="running"}'] == 16, 30)
    send(40)
    wait_until(lambda: metrics(server)['lowkv_requests{state="waiting"}'] == 40, 30)
    with pytest.raises(LowkvError, match=r"queue full: .* at most 40"):
        client.generate("hi", 4)
    stream.close(cancel=True)
    wait_until_idle(server)
    assert client.generate("hi", 4).finish_reason is not None


# -- endurance -------------------------------------------------------------------------------------------


def test_a_thousand_random_requests_with_random_cancellation(server: TritonServer, client: GenerateClient) -> None:
    expected = client.generate("steady", 12, ignore_eos=True).text
    outcomes: dict[str, int] = dict.fromkeys(("whole", "streamed", "dropped", "refused"), 0)
    lock = threading.Lock()
    memory: list[int] = []

    def one(number: int) -> None:
        draw = random.Random(number)
        prompt = "".join(chr(draw.randrange(32, 0x250)) for _ in range(draw.randrange(1, 150)))
        tokens = draw.randrange(1, 32)
        options = {"temperature": draw.choice([0.0, 0.8]), "seed": number, "ignore_eos": draw.random() < 0.5}
        kind = draw.choices(("whole", "streamed", "dropped", "refused"), (20, 30, 40, 10))[0]
        if kind == "whole":
            assert client.generate(prompt, tokens, **options).finish_reason in ("stop", "length")
        elif kind == "streamed":
            assert list(client.stream(prompt, tokens, **options))[-1].finish_reason in ("stop", "length")
        elif kind == "dropped":
            stream = client.stream(prompt, 1000, **options)
            for _ in zip(range(draw.randrange(4)), stream, strict=False):
                pass
            stream.close()  # type: ignore[attr-defined]
        else:
            with pytest.raises(LowkvError, match="max_tokens"):
                client.generate(prompt, draw.choice([0, -1, 5000]))
        with lock:
            outcomes[kind] += 1
            if sum(outcomes.values()) % 250 == 0:
                memory.append(server.model_memory())

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(one, range(1000)))

    assert sum(outcomes.values()) == 1000
    assert min(outcomes.values()) > 50
    wait_until_idle(server)
    assert server.running
    assert client.generate("steady", 12, ignore_eos=True).text == expected
    # The first quarter fills caches and pools; after that nothing may pile up (1 MiB is Triton's own step).
    assert memory[-1] - memory[0] < 48 * 2**20, [size >> 20 for size in memory]
    assert "cannot answer" not in server.log_text()
    assert "cannot end" not in server.log_text()
    assert "Traceback" not in server.log_text()
