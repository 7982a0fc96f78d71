"""The engine's figures as Prometheus metrics, through Triton's custom-metric API.

Every call into that API is a message to the server process (some 50 us), so that they are made a few times a second
by one thread, never in a step. Step times are collected meanwhile and observed one by one: a histogram of means
would hide the slow steps that it is there to show.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowkv.serving import EngineStats

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Seconds."""


@dataclass(frozen=True)
class _Series:
    """One line of /metrics: which `EngineStats` attribute it shows under which name and label."""

    name: str
    description: str
    kind: str
    attribute: str
    labels: tuple[tuple[str, str], ...] = ()


SERIES: tuple[_Series, ...] = (
    _Series("lowkv_requests", "Requests in the engine", "GAUGE", "running", (("state", "running"),)),
    _Series("lowkv_requests", "Requests in the engine", "GAUGE", "waiting", (("state", "waiting"),)),
    _Series("lowkv_running_peak", "Most sequences resident at once since start", "GAUGE", "running_peak"),
    _Series("lowkv_preemptions_total", "Sequences preempted", "COUNTER", "preempted_total"),
    _Series("lowkv_kv_bytes", "Bytes of the KV arena", "GAUGE", "kv_bytes_used", (("state", "used"),)),
    _Series("lowkv_kv_bytes", "Bytes of the KV arena", "GAUGE", "kv_bytes_total", (("state", "total"),)),
    _Series("lowkv_kv_blocks", "KV blocks in use", "GAUGE", "hot_blocks", (("kind", "hot"),)),
    _Series("lowkv_kv_blocks", "KV blocks in use", "GAUGE", "cold_blocks", (("kind", "cold"),)),
    _Series("lowkv_tokens_total", "Tokens processed", "COUNTER", "tokens_in_total", (("direction", "in"),)),
    _Series("lowkv_tokens_total", "Tokens processed", "COUNTER", "tokens_out_total", (("direction", "out"),)),
)


class EngineMetrics:
    """Publishes `EngineStats`. `record_step` may be called from any thread, `publish` from one.

    `pb_utils` is Triton's `triton_python_backend_utils`, which exists only inside the server.
    """

    def __init__(self, pb_utils: Any, labels: Mapping[str, str], effective_bits: float) -> None:
        self._lock = threading.Lock()
        self._steps: deque[float] = deque(maxlen=4096)
        # Triton drops a family that Python has forgotten.
        self._families: dict[str, Any] = {}
        self._metrics: list[tuple[_Series, Any]] = []
        self._published: dict[_Series, float] = {}
        for series in SERIES:
            family = self._family(pb_utils, series.name, series.description, series.kind)
            self._metrics.append((series, family.Metric(labels={**labels, **dict(series.labels)})))
        steps = self._family(pb_utils, "lowkv_step_seconds", "Duration of engine steps", "HISTOGRAM")
        self._step_metric = steps.Metric(labels=dict(labels), buckets=list(STEP_BUCKETS))
        bits = self._family(
            pb_utils,
            "lowkv_kv_effective_bits",
            "Bits per cached value at the longest context, all included",
            "GAUGE",
        )
        self._bits_metric = bits.Metric(labels=dict(labels))
        self._bits_metric.set(effective_bits)

    def record_step(self, seconds: float) -> None:
        with self._lock:
            self._steps.append(seconds)

    def publish(self, stats: EngineStats) -> None:
        for series, metric in self._metrics:
            value = float(getattr(stats, series.attribute))
            before = self._published.get(series, 0.0 if series.kind == "COUNTER" else None)
            if value == before:
                continue
            if series.kind == "COUNTER":
                metric.increment(value - (before or 0.0))
            else:
                metric.set(value)
            self._published[series] = value
        with self._lock:
            steps, self._steps = self._steps, deque(maxlen=self._steps.maxlen)
        for seconds in steps:
            self._step_metric.observe(seconds)

    def release(self) -> None:
        """Takes the metrics out of Triton; nothing may be published afterwards.

        Left to the interpreter's end, they would speak to a server that is no longer connected, and crash the stub.
        """
        del self._step_metric, self._bits_metric
        self._metrics.clear()
        self._families.clear()

    def _family(self, pb_utils: Any, name: str, description: str, kind: str) -> Any:
        if name not in self._families:
            kind_value = getattr(pb_utils.MetricFamily, kind)
            self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=kind_value)
        return self._families[name]
