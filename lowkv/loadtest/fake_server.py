"""A server whose timing is known: Triton's generate_stream and lowkv's metrics, without a model.

A request is admitted when one of `slots` is free, its first token leaves `ttft` seconds after that, the
others `gap` seconds apart. It is the truth that the load test's measurements are held against.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import deque
from dataclasses import dataclass, field


@dataclass
class FakeServer:
    ttft: float = 0.05
    gap: float = 0.02
    slots: int = 4
    fail_with: str | None = None
    cut_after: int | None = None
    """Closes the connection after so many events."""
    miscount: int = 0
    """Says so many input tokens too many."""
    running: int = 0
    peak: int = 0
    tokens_out: int = 0
    requests: list[dict[str, object]] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        async def start() -> asyncio.Server:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            self._ready.set()
            return server

        server = self._loop.run_until_complete(start())
        self._loop.run_forever()
        server.close()

        async def finish() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.run_until_complete(finish())
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if head.startswith(b"GET /metrics"):
                    _plain(writer, 200, self.metrics().encode())
                elif self.fail_with:
                    _plain(writer, 400, json.dumps({"error": self.fail_with}).encode())
                else:
                    await self._stream(json.loads(body), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _stream(self, request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        self.requests.append(request)
        await self._admit()
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            total = int(str(request["max_tokens"]))
            clock = asyncio.get_running_loop().time
            due = clock() + self.ttft
            for n in range(1, total + 1):
                await asyncio.sleep(max(0.0, due - clock()))
                due += self.gap
                event = {
                    "model_name": "fake",
                    "text_output": " word",
                    "num_input_tokens": len(str(request["text_input"]).split()) + self.miscount,
                    "num_output_tokens": n,
                }
                data = f"data: {json.dumps(event)}\n\n".encode()
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
                self.tokens_out += 1
                if n == self.cut_after:
                    raise ConnectionError
            writer.write(b"0\r\n\r\n")
        finally:
            self._leave()

    async def _admit(self) -> None:
        if self.running >= self.slots or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._enter()

    def _enter(self) -> None:
        self.running += 1
        self.peak = max(self.peak, self.running)

    def _leave(self) -> None:
        self.running -= 1
        while self._waiting and self.running < self.slots:
            turn = self._waiting.popleft()
            if not turn.done():
                self._enter()
                turn.set_result(None)

    def metrics(self) -> str:
        label = 'model="fake",version="1"'
        waiting = sum(not turn.done() for turn in self._waiting)
        return f"""# HELP lowkv_requests requests
# TYPE lowkv_requests gauge
lowkv_requests{{{label},state="running"}} {self.running}
lowkv_requests{{{label},state="waiting"}} {waiting}
lowkv_running_peak{{{label}}} {self.peak}
lowkv_preemptions_total{{{label}}} 0
lowkv_kv_bytes{{{label},state="used"}} {self.running * 1000}
lowkv_kv_bytes{{{label},state="total"}} {self.slots * 1000 + 10}
lowkv_kv_blocks{{{label},kind="hot"}} {self.running}
lowkv_kv_blocks{{{label},kind="cold"}} {self.running * 3}
lowkv_tokens_total{{{label},direction="in"}} 0
lowkv_tokens_total{{{label},direction="out"}} {self.tokens_out}
lowkv_kv_effective_bits{{{label}}} 3.25
lowkv_step_seconds_bucket{{{label},le="+Inf"}} 7
nv_inference_count{{model="fake",version="1"}} 3
"""


def _plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
