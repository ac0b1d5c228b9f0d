"""What Prometheus may ask: how long callers wait, what the engine does, whether the drafter earns its keep.

Times are observed as they pass; what the engine counts itself is read when somebody asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dflash_trt.runtime.generator import Call
from dflash_trt.runtime.statistics import Statistics

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Bounds in seconds, from what a Blackwell node does in a step to what a CPU needs for a long prompt.
_SHORT = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
_LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Reading:
    """What an engine loop counts, at one moment."""

    up: bool  # are requests taken?
    waiting: int  # requests without a slot
    running: int  # requests with one
    slots: int
    steps: int
    statistics: Statistics


class Metrics:
    """The metrics of one server, in a registry of their own; `read` is called when somebody asks. Thread-safe."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"dflash_{name}", text, labels, buckets=buckets, registry=registry)

        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token", _LONG)
        self._between = histogram("inter_token_seconds", "Between tokens of a stream, averaged over a step's", _SHORT)
        self._request = histogram("request_seconds", "From a request's arrival to its end", _LONG)
        self._queue = histogram("queue_seconds", "From a request's arrival to its slot", _LONG)
        self._step = histogram("step_seconds", "One call of the engine", _SHORT, ("kind",))
        self._rows = histogram("batch_size", "Rows of a decode call", _ROWS)
        self._finished = Counter("dflash_requests", "Ended requests", ("finish_reason",), registry=registry)
        self._refused = Counter("dflash_refused", "Refused requests", ("reason",), registry=registry)
        registry.register(_Reader(read, time.time()))

    def text(self) -> bytes:
        """All of it in Prometheus' exposition format."""
        return generate_latest(self._registry)

    def refuse(self, reason: str) -> None:
        """A request was refused; `reason` is one of a few words."""
        self._refused.labels(reason).inc()

    def admitted(self, seconds: float) -> None:
        """A request got its slot so long after it came."""
        self._queue.observe(seconds)

    def began(self, seconds: float) -> None:
        """A request got its first token so long after it came."""
        self._first.observe(seconds)

    def went_on(self, seconds: float, tokens: int) -> None:
        """A request got `tokens` more, `seconds` a token."""
        for _ in range(tokens):
            self._between.observe(seconds)

    def finished(self, reason: str, seconds: float) -> None:
        """A request ended so long after it came."""
        self._finished.labels(reason).inc()
        self._request.observe(seconds)

    def called(self, call: Call) -> None:
        """The engine made a call."""
        self._step.labels("prefill" if call.prefill else "decode").observe(call.seconds)
        if not call.prefill:
            self._rows.observe(call.rows)


class _Reader(Collector):
    """A reading as metrics."""

    def __init__(self, read: Callable[[], Reading], start: float):
        self._read, self._start = read, start

    def collect(self) -> Iterator[Metric]:
        now = self._read()
        statistics = now.statistics

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"dflash_{name}", text, value=value)

        yield gauge("start_time_seconds", "When this process began to count, in seconds since 1970", self._start)
        yield gauge("up", "1 while requests are taken", now.up)
        yield gauge("requests_waiting", "Requests without a slot", now.waiting)
        yield gauge("requests_running", "Requests with a slot", now.running)
        yield gauge("kv_slots", "Slots of the KV caches", now.slots)
        yield gauge("kv_slots_used", "Slots of the KV caches that are taken", now.running)
        yield CounterMetricFamily("dflash_steps", "Calls of the engine", value=now.steps)
        yield CounterMetricFamily("dflash_prompt_tokens", "Prompt tokens", value=statistics.prompt_tokens)
        yield CounterMetricFamily("dflash_generated_tokens", "New tokens", value=statistics.new_tokens)
        if statistics.block_size == 1:
            return
        if not math.isnan(statistics.tau):
            yield gauge("acceptance_length", "Tokens a decode row yields (tau)", statistics.tau)
        drafts = CounterMetricFamily("dflash_drafts", "Drafts verified", labels=["position"])
        accepted = CounterMetricFamily("dflash_accepted", "Drafts accepted", labels=["position"])
        share = GaugeMetricFamily("dflash_acceptance", "Share of the drafts that counted", labels=["position"])
        for position, (held, counted) in enumerate(statistics.drafts, 1):
            drafts.add_metric([str(position)], held)
            accepted.add_metric([str(position)], counted)
            if held:
                share.add_metric([str(position)], counted / held)
        yield from (drafts, accepted, share)
