"""A small client of a served model: `generate` over HTTP, with the standard library only.

    client = GenerateClient("http://127.0.0.1:8000", "smollm2-kivi2")
    for piece in client.stream("The sky is", max_tokens=32):
        print(piece.text, end="", flush=True)

Types are checked before sending: Triton's own JSON reader refuses `"max_tokens": "many"` too, but with a message that
does not say which field it means.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowkv.errors import LowkvError
from lowkv.triton.fields import INPUT_BY_NAME, Field


@dataclass(frozen=True)
class Piece:
    """One response. `finish_reason` is set on the last one; `raw` is its whole JSON object."""

    text: str
    finish_reason: str | None
    raw: Mapping[str, Any]


class GenerateClient:
    """Talks to one model. Each call opens its own connection, which closing the iterator ends (and cancels).

    Args:
        url: the server, `http://HOST:PORT`.
        model: its name there.
        timeout: seconds of silence after which a call fails.
    """

    def __init__(self, url: str, model: str, *, timeout: float = 300.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise LowkvError("not a server address", got=url, expected="http://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or 80
        self._model = model
        self._timeout = timeout

    def generate(self, text: str, max_tokens: int, **fields: Any) -> Piece:
        """The whole answer in one response (`exclude_input_in_output` unless said otherwise).

        Raises:
            LowkvError: a field has the wrong type, the server refused the request or cannot be reached.
        """
        body = _body(text, max_tokens, {"exclude_input_in_output": True, **fields, "stream": False})
        connection = self._connection()
        try:
            response = self._post(connection, "generate", body)
            return _piece(response.read(), response.status)
        finally:
            connection.close()

    def stream(self, text: str, max_tokens: int, **fields: Any) -> Iterator[Piece]:
        """The answer piece by piece, each as soon as its line has arrived. Raises as `generate`."""
        body = _body(text, max_tokens, {**fields, "stream": True})
        connection = self._connection()
        finished = False
        try:
            response = self._post(connection, "generate_stream", body)
            # readline returns at the line's end; read(n) would wait for n bytes and spoil the timing.
            while line := response.readline():
                if line.startswith(b"data:"):
                    piece = _piece(line[5:], response.status)
                    finished = piece.finish_reason is not None
                    yield piece
                elif line.strip() and response.status != 200:
                    _piece(line, response.status)
            if not finished:
                raise LowkvError(f"the stream from {self._host}:{self._port} ended before its answer did")
        except (OSError, http.client.HTTPException) as error:
            raise LowkvError(f"the stream from {self._host}:{self._port} broke off: {error}") from error
        finally:
            connection.close()

    def config(self) -> dict[str, Any]:
        """The model's configuration; its `parameters` say which KV format is served."""
        connection = self._connection()
        try:
            connection.request("GET", f"/v2/models/{urllib.parse.quote(self._model)}/config")
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        if response.status != 200:
            raise LowkvError(f"no configuration of {self._model}: {data.decode(errors='replace')}")
        return dict(json.loads(data))

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)

    def _post(self, connection: http.client.HTTPConnection, verb: str, body: bytes) -> http.client.HTTPResponse:
        path = f"/v2/models/{urllib.parse.quote(self._model)}/{verb}"
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> LowkvError:
        return LowkvError(f"no answer from {self._host}:{self._port}: {error}", fix="is the server running?")


def _body(text: str, max_tokens: int, fields: Mapping[str, Any]) -> bytes:
    values = {"text_input": text, "max_tokens": max_tokens, **fields}
    for name, value in values.items():
        if name not in INPUT_BY_NAME:
            raise LowkvError(f"{name} is not a field of a request", expected=", ".join(INPUT_BY_NAME))
        field = INPUT_BY_NAME[name]
        items = [value] if field.scalar else value
        if not isinstance(items, list | tuple) or not all(_fits(field, item) for item in items):
            kind = {"STRING": "text", "BOOL": "true or false", "FP32": "a number"}.get(
                field.dtype.removeprefix("TYPE_"), "a whole number"
            )
            raise LowkvError(
                f"{name} has the wrong type", got=value, expected=kind if field.scalar else f"a list of {kind}"
            )
    return json.dumps(values).encode()


def _fits(field: Field, value: object) -> bool:
    if field.dtype == "TYPE_STRING":
        return isinstance(value, str)
    if isinstance(value, bool) or field.dtype == "TYPE_BOOL":
        return isinstance(value, bool) and field.dtype == "TYPE_BOOL"
    if field.dtype == "TYPE_FP32":
        return isinstance(value, int | float)
    low, high = (0, 2**64 - 1) if field.dtype == "TYPE_UINT64" else (-(2**31), 2**31 - 1)
    return isinstance(value, int) and low <= value <= high


def _piece(data: bytes, status: int) -> Piece:
    try:
        raw = json.loads(data)
    except ValueError as error:
        raise LowkvError("the server's answer is not JSON", got=data[:200].decode(errors="replace")) from error
    # Triton reports some errors with status 200.
    if "error" in raw or status != 200:
        raise LowkvError(str(raw.get("error", f"HTTP status {status}")))
    return Piece(raw.get("text_output", ""), raw.get("finish_reason") or None, raw)
