"""What runs inside Triton: one `ServingEngine` behind Triton's decoupled Python-backend interface.

Four threads share the work, because every call into Triton (sending a response, asking whether a request was
cancelled, setting a metric) is a message to another process and costs 50 to 400 us:

    execute    Triton's: checks a request, tokenizes it, hands it to the engine; returns at once
    engine     steps the engine (`EngineLoop`); its output goes into a queue
    responder  takes output from the queue and sends it
    watcher    asks for cancelled requests, publishes metrics

Nothing is raised out of `execute`: that leaks the request inside Triton. Every request is answered with exactly one
FINAL flag, whatever happens.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from lowkv.errors import LowkvError
from lowkv.triton.fields import INPUTS
from lowkv.triton.metrics import EngineMetrics
from lowkv.triton.parameters import ModelParameters
from lowkv.triton.request import GenerateRequest, Limits, parse_request

if TYPE_CHECKING:
    from lowkv.serving import Delta, ServingEngine

_METRICS_INTERVAL = 0.25  # seconds
_WATCH_INTERVAL = 0.05
_WATCH_COST = 0.002  # seconds between two looks at the same request, per live request: at most 3 % of a core
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass(eq=False)
class _Exchange:
    """One request that has not been answered in full."""

    id: str
    request: GenerateRequest
    sender: Any
    text: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cum_logprob: float = 0.0
    closed: bool = False
    # Triton 2.51 crashes when it is asked whether a request is cancelled while, or after, its FINAL flag is sent.
    lock: threading.Lock = field(default_factory=threading.Lock)


class TritonPythonModel:
    """Triton's interface: `initialize`, `execute`, `finalize`."""

    def initialize(self, args: dict[str, str]) -> None:
        from lowkv.serving import EngineLoop, ServingEngine

        self._log = pb_utils.Logger
        settings = ModelParameters.from_config(json.loads(args["model_config"]))
        path = settings.find_engine(Path(args["model_repository"]))
        started = time.monotonic()
        device = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        engine = ServingEngine.load(
            path, budget=settings.budget, threads=settings.threads, device_id=0 if device is None else device
        )
        plan = engine.cache.plan
        self._limits = Limits(engine.max_model_len, engine.vocab, engine.tokenizer.eos_ids)
        self._max_waiting = settings.max_waiting
        self._lock = threading.Lock()
        self._live: dict[str, _Exchange] = {}
        self._in_engine = 0  # requests that the engine has not ended; those in _live may still wait to be answered
        self._ids = itertools.count()
        self._deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._metrics = EngineMetrics(
            pb_utils,
            {"model": args["model_name"], "version": args["model_version"]}
            | ({} if device is None else {"gpu": str(device)}),
            plan.effective_bits(engine.max_model_len),
        )
        self._stats = engine.stats()
        self._loop = EngineLoop(engine, self._produced, self._stepped)
        self._metrics.publish(self._stats)
        # Started by the first request: until then Triton is spoken to by its own thread alone.
        self._threads: list[threading.Thread] = []
        self._log.log_info(f"lowkv: {path.name} loaded in {time.monotonic() - started:.1f} s: {plan.summary()}")
        self._log.log_info(f"lowkv: {engine.executor.description}, attention {engine.cache.attention.name}")

    def execute(self, requests: list[Any]) -> None:
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._respond, name="lowkv-responder"),
                threading.Thread(target=self._watch, name="lowkv-watcher"),
            ]
            for thread in self._threads:
                thread.start()
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._accept(request, sender)
            except LowkvError as error:
                self._refuse(sender, str(error), pb_utils.TritonError.INVALID_ARG)
            except _BusyError as error:
                self._refuse(sender, str(error), pb_utils.TritonError.UNAVAILABLE)
            except Exception as error:  # must not leave execute
                self._log.log_error(f"lowkv: {type(error).__name__}: {error}")
                self._refuse(sender, f"internal error: {type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)

    def finalize(self) -> None:
        self._stopping.set()
        self._loop.stop()
        self._deltas.put(None)
        for thread in self._threads:
            thread.join()
        for exchange in list(self._live.values()):
            self._close(exchange, _error("the server is shutting down", pb_utils.TritonError.UNAVAILABLE))
        self._metrics.release()
        del self._loop  # and with it the engine, its weights and its arena

    # -- in ----------------------------------------------------------------------------------------------

    def _accept(self, request: Any, sender: Any) -> None:
        from lowkv.serving import Request

        if self._stopping.is_set():
            raise _BusyError("the server is shutting down")
        with self._lock:
            waiting = self._in_engine - self._stats.running
        if waiting >= self._max_waiting:
            raise _BusyError(
                f"queue full: {waiting} requests are waiting, at most {self._max_waiting} may; try again later "
                "(max_waiting of the model repository)"
            )
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        arrays = {f.name: tensors[f.name].as_numpy() if f.name in tensors else None for f in INPUTS}
        parsed = parse_request(arrays, json.loads(request.parameters() or "{}"), self._limits)
        exchange = _Exchange(str(next(self._ids)), parsed, sender)
        if parsed.echoes_input:
            exchange.text.append(parsed.text)
        with self._lock:
            self._live[exchange.id] = exchange
            self._in_engine += 1
        try:
            self._loop.submit(Request(exchange.id, parsed.text, parsed.params))
        except BaseException:
            with self._lock:
                del self._live[exchange.id]
                self._in_engine -= 1
            raise

    def _refuse(self, sender: Any, message: str, code: int) -> None:
        try:
            sender.send(_error(message, code), flags=_FINAL)
        except Exception as error:  # must not leave execute
            self._log.log_error(f"lowkv: cannot refuse a request: {type(error).__name__}: {error}")

    # -- out ---------------------------------------------------------------------------------------------

    def _produced(self, delta: Delta) -> None:
        """On the engine's thread: must be quick."""
        if delta.finished:
            with self._lock:
                self._in_engine -= 1
        self._deltas.put(delta)

    def _stepped(self, engine: ServingEngine) -> None:
        """On the engine's thread, after each step."""
        stats = engine.stats()
        if stats.steps_total != self._stats.steps_total:
            self._metrics.record_step(stats.step_seconds)
        self._stats = stats

    def _respond(self) -> None:
        while (delta := self._deltas.get()) is not None:
            exchange = self._live.get(delta.request_id)
            if exchange is None:  # cancelled, and answered already
                continue
            try:
                self._send(exchange, delta)
            except Exception as error:  # one request's trouble must not stop the others' answers
                self._log.log_error(f"lowkv: cannot answer a request: {type(error).__name__}: {error}")
                self._loop.cancel(exchange.id)
                self._close(exchange, _error(f"internal error: {error}", pb_utils.TritonError.INTERNAL))

    def _send(self, exchange: _Exchange, delta: Delta) -> None:
        exchange.cum_logprob += sum(delta.logprobs)
        if delta.error is not None:
            # What is wrong with a request is said when it comes in; this is the engine's trouble.
            busy = self._stopping.is_set()
            code = pb_utils.TritonError.UNAVAILABLE if busy else pb_utils.TritonError.INTERNAL
            self._close(exchange, _error(str(delta.error), code))
        elif delta.finish_reason == "cancelled":
            self._close(exchange, _error("the request was cancelled", pb_utils.TritonError.CANCELLED))
        elif exchange.request.stream:
            response = self._response(exchange, delta, delta.text, list(delta.logprobs))
            if delta.finished:
                self._close(exchange, response)
            else:
                exchange.sender.send(response)
        else:
            exchange.text.append(delta.text)
            exchange.logprobs += delta.logprobs
            if delta.finished:
                self._close(exchange, self._response(exchange, delta, "".join(exchange.text), exchange.logprobs))

    def _response(self, exchange: _Exchange, delta: Delta, text: str, logprobs: list[float]) -> Any:
        request = exchange.request
        tensors = [
            _tensor("text_output", [[text.encode()]], np.object_),
            _tensor("finish_reason", [[(delta.finish_reason or "").encode()]], np.object_),
            _tensor("sequence_index", [[0]], np.int32),
        ]
        if request.return_log_probs:
            tensors.append(_tensor("output_log_probs", [[logprobs]], np.float32))
            tensors.append(_tensor("cum_log_probs", [[exchange.cum_logprob]], np.float32))
        if request.return_num_input_tokens:
            tensors.append(_tensor("num_input_tokens", [[delta.num_input_tokens]], np.int32))
        if request.return_num_output_tokens:
            tensors.append(_tensor("num_output_tokens", [[delta.num_output_tokens]], np.int32))
        return pb_utils.InferenceResponse(tensors)

    def _close(self, exchange: _Exchange, response: Any) -> None:
        """Sends the last response with the FINAL flag; once per request."""
        with exchange.lock:
            if exchange.closed:
                return
            exchange.closed = True
            try:
                exchange.sender.send(response, flags=_FINAL)
            except Exception as error:
                self._log.log_error(f"lowkv: cannot end a request: {type(error).__name__}: {error}")
        with self._lock:
            self._live.pop(exchange.id, None)

    # -- beside ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Cancels what its client has given up, and publishes metrics."""
        next_look = next_metrics = 0.0
        while not self._stopping.wait(_WATCH_INTERVAL):
            now = time.monotonic()
            try:
                if now >= next_look:
                    with self._lock:
                        live = list(self._live.values())
                    next_look = now + _WATCH_COST * len(live)
                    for exchange in live:
                        if self._given_up(exchange):
                            self._loop.cancel(exchange.id)
                if now >= next_metrics:
                    next_metrics = now + _METRICS_INTERVAL
                    self._metrics.publish(self._stats)
            except Exception as error:  # the server must go on serving
                self._log.log_error(f"lowkv: watcher: {type(error).__name__}: {error}")

    @staticmethod
    def _given_up(exchange: _Exchange) -> bool:
        with exchange.lock:
            return not exchange.closed and bool(exchange.sender.is_cancelled())


class _BusyError(Exception):
    """The request is good, but not now."""


def _tensor(name: str, values: list[Any], dtype: Any) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=dtype))


def _error(message: str, code: int) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
