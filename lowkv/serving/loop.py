"""A thread that steps the engine, and a thread-safe way in and out of it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowkv.serving.engine import Delta, Request, ServingEngine
    from lowkv.serving.sequence import Sequence

log = logging.getLogger(__name__)


class EngineLoop:
    """Runs a `ServingEngine` until `stop`.

    `on_delta` gets every delta, `on_step` is called after every step and whenever the queue changed; both run on
    the loop's thread, between steps, and should be quick.
    """

    def __init__(
        self,
        engine: ServingEngine,
        on_delta: Callable[[Delta], None],
        on_step: Callable[[ServingEngine], None] | None = None,
    ) -> None:
        self.engine = engine
        self._on_delta = on_delta
        self._on_step = on_step
        self._wake = threading.Condition()
        self._arrived: list[Sequence] = []
        self._cancelled: list[str] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lowkv-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queues a request, tokenized and checked on the caller's thread.

        Raises `LowkvError` for a bad request, or when the loop is stopping.
        """
        sequence = self.engine.sequence(request)
        with self._wake:
            if self._stopping:
                raise LowkvError("the server is shutting down", fix="send the request to another replica")
            self._arrived.append(sequence)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Ends a request before the next step; its last delta says `cancelled`. Unknown ids are ignored."""
        with self._wake:
            self._cancelled.append(request_id)
            self._wake.notify()

    def stop(self) -> None:
        """Ends every request with an error delta and joins the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._take_in():
            try:
                self._deliver(self.engine.step())
            except Exception:
                # A bug of ours: nobody may hang on it, and the next request must work.
                log.exception("a step failed; all running requests end with an error")
                self._deliver(self.engine.abort_all(LowkvError("the engine failed inside a step", fix="see its log")))
            self._report()
        self._deliver(self.engine.abort_all(LowkvError("the server is shutting down")))
        self._report()

    def _take_in(self) -> bool:
        """Waits for work, then moves what came in to the engine. False when it is time to stop."""
        with self._wake:
            while not (self._arrived or self._cancelled or self._stopping or self.engine.has_work):
                self._wake.wait()
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            stopping = self._stopping
        for sequence in arrived:
            self.engine.submit(sequence)
        self._deliver([delta for name in cancelled if (delta := self.engine.cancel(name)) is not None])
        if cancelled and not self.engine.has_work:
            self._report()
        return not stopping

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._on_delta(delta)

    def _report(self) -> None:
        if self._on_step is not None:
            self._on_step(self.engine)
