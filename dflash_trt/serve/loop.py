"""Runs an engine for many callers at once: requests in from any thread, tokens and text out to each.

    loop = EngineLoop(generator)
    loop.start()
    loop.submit(request, sink)      # sink(Output) … until one is finished; sink(DflashError) if that is how it ends
    loop.close()

Two threads. `engine` alone touches the scheduler and the session: between two calls it takes in what callers asked for.
`deliver` makes text of what a call brought and hands it out, while the next call runs.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Literal

from dflash_trt.engine import Limits
from dflash_trt.errors import DflashError, Failure, UserError, explain
from dflash_trt.runtime.generator import Generator
from dflash_trt.runtime.request import Output, Request
from dflash_trt.runtime.scheduler import Event
from dflash_trt.runtime.slots import Sequence
from dflash_trt.runtime.statistics import Statistics, Timing
from dflash_trt.serve.metrics import Metrics, Reading

State = Literal["starting", "ready", "draining", "broken"]
Sink = Callable[[Output | DflashError], None]  # must not block; the last call is a finished output or an error

STOPPED = "the server was stopped before the answer was complete — server — ask again"
_WARM_UP = "warm-up"  # id of the request that nobody asked for


class Refused(DflashError):
    """The server takes no request now, whatever it asks for. `retry_after`: seconds after which to try again."""

    def __init__(self, message: str, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class Starting(Refused):
    """The engine is not warm yet."""


class QueueFull(Refused):
    """As many requests wait as may."""


class Draining(Refused):
    """The server is about to end."""


class Stopped(Refused):
    """The server ended before the answer was complete."""


class Broken(Refused):
    """The engine cannot go on."""


@dataclass
class _Client:
    """One request on its way, as its caller sees it."""

    sink: Sink
    submitted: float  # perf_counter when it arrived
    latest: float | None = None  # when its latest tokens were there


class EngineLoop:
    """Owns `generator` from `start` on. All methods may be called from any thread.

    At most `max_waiting` requests wait beside those that have a slot. A failed call fails the requests that ran in it;
    the engine counts as broken after `patience` further failures in a row, and then `fault` says why.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        max_waiting: int = 256,
        patience: int = 1,
    ):
        self.limits: Limits = generator.session.limits
        self.state: State = "starting"
        self.fault: DflashError | None = None  # why the engine is broken
        self.steps = 0  # calls of the session since the warm-up
        self.metrics = Metrics(self.counts)
        self._generator = generator
        self.capacity = self.limits.max_batch + max_waiting  # requests that run and wait
        self._patience, self._failures = patience, 0  # failures: calls in a row
        self._lock = threading.Lock()  # guards what follows, and `state` and `fault`
        self._clients: dict[str, _Client] = {}
        self._asked: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # for the thread `engine`
        self._brought: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()  # for the thread `deliver`
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name="engine", daemon=True),
            threading.Thread(target=self._deliver, name="deliver", daemon=True),
        ]

    # -- callers -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Warm up and begin; `state` becomes "ready", or "broken"."""
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request, sink: Sink, *, arrived: float | None = None) -> str:
        """Queue a request and return its id. It counts as waiting since `arrived` (perf_counter), by default now.

        Raises UserError (PromptTooLong among them) if the engine cannot serve this request, Refused if it takes none.
        """
        self.check_open()
        client = _Client(sink, arrived or perf_counter())
        sequence = self._generator.prepare(request)
        with self._lock:
            self.check_open()
            if self._clients.setdefault(request.id, client) is not client:
                what = f"request id {request.id!r} is in use"
                raise UserError(what, where="request", fix="give each request its own")
        self._asked.put(partial(self._enqueue, sequence))
        return request.id

    def cancel(self, request_id: str) -> None:
        """Stop a request before the next call; its sink gets a cancelled output, unless it has just finished."""
        self._asked.put(partial(self._generator.cancel, request_id))

    def drain(self) -> None:
        """Refuse requests from now on; those that were accepted go on."""
        with self._lock:
            if self.state in ("starting", "ready"):
                self.state = "draining"

    def fail(self, fault: DflashError) -> None:
        """End every request with `fault`, and refuse all others with it."""
        with self._lock:
            if self.state == "broken":
                return
            self.state, self.fault = "broken", fault
        self._end_all(fault)

    def close(self, timeout: float | None = None) -> bool:
        """End both threads, after the call that may run now. False if the engine's has not ended after `timeout` s.

        Whoever still waits is told that the server stopped.
        """
        self.drain()
        self._closing = True
        self._asked.put(lambda: None)
        self._threads[0].join(timeout)
        self._end_all(Stopped(STOPPED))
        self._brought.put(None)
        self._threads[1].join(timeout)
        return not self._threads[0].is_alive()

    @property
    def idle(self) -> bool:
        """Has every caller got all there was?"""
        return not self._clients

    @property
    def statistics(self) -> Statistics:
        """Of all requests since the warm-up."""
        return self._generator.statistics

    def counts(self) -> Reading:
        """How things stand now."""
        running = len(self._generator.scheduler.slots.tenant)
        return Reading(
            up=self.state == "ready",
            waiting=max(len(self._clients) - running, 0),
            running=running,
            slots=self.limits.max_batch,
            steps=self.steps,
            statistics=self.statistics,
        )

    def check_open(self) -> None:
        """Raise Refused if no request is taken now: cheaper to know before one is read than from `submit`."""
        match self.state:
            case "starting":
                raise Starting("the engine is starting — server — try again in a few seconds", retry_after=5)
            case "draining":
                raise Draining("the server is shutting down — server — try again, it may be restarted", retry_after=5)
            case "broken":
                if isinstance(self.fault, Stopped):
                    raise self.fault
                raise Broken(f"the engine failed: {self.fault}", retry_after=30)
        if len(self._clients) >= self.capacity:
            waiting = self.capacity - self.limits.max_batch
            raise QueueFull(f"{waiting} requests wait already — server — try again later", retry_after=1)

    # -- thread `engine` -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._warm_up()
            while not self._closing and self.state != "broken":
                self._take()
                if self._generator.busy:
                    self._advance()
        except BaseException as error:  # whatever it is, callers must hear of it
            self._break(error)

    def _warm_up(self) -> None:
        """Answer a request as large as one chunk and a few steps, so that the first caller does not pay for it."""
        limits, generator = self.limits, self._generator
        prompt = min(limits.max_query, limits.max_seq_len // 2)
        new = min(2 * limits.block_size + 1, limits.max_seq_len - prompt)
        generator.add(Request([0] * prompt, new, ignore_eos=True, id=_WARM_UP))
        while generator.busy and not self._closing:
            generator.advance()
        generator.scheduler.statistics, generator.timing = Statistics(limits.block_size), Timing()
        with self._lock:
            if self.state == "starting":
                self.state = "ready"

    def _enqueue(self, sequence: Sequence) -> None:
        try:
            self._generator.enqueue(sequence)
        except UserError as error:  # its id belongs to a request that ends with the next call
            self._end(sequence.request.id, error)

    def _take(self) -> None:
        """Do what callers asked for; without any work, wait for it."""
        block = not self._generator.busy
        while not self._closing:
            try:
                self._asked.get(block)()
            except queue.Empty:
                return
            block = False

    def _advance(self) -> None:
        generator = self._generator
        try:
            events = generator.advance()
        except Exception as error:
            self._failures += 1
            blamed = generator.abandon()
            if self._failures > self._patience or not blamed:
                raise
            for sequence in blamed:
                self._brought.put(partial(self._end, sequence.request.id, _failure(error)))
            return
        if call := generator.last_call:
            self._failures = 0
            self.steps += 1
            self.metrics.called(call)
        if events:
            self._brought.put(partial(self._hand_out, events, perf_counter()))

    def _break(self, error: BaseException) -> None:
        if os.environ.get("DFLASH_TRT_TRACEBACK"):
            traceback.print_exception(error)
        self.fail(_failure(error))

    # -- thread `deliver` ----------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        while hand_out := self._brought.get():
            hand_out()

    def _hand_out(self, events: list[Event], at: float) -> None:
        """Give callers what their requests got at the time `at`."""
        for event in events:
            self._hand_over(event, at)

    def _hand_over(self, event: Event, at: float) -> None:
        request_id = event.sequence.request.id
        client = self._clients.get(request_id)
        if client is None:
            return  # it has failed, or is the end behind a stop string
        try:
            out = self._generator.render(event)
        except Exception as error:  # e.g. a tokenizer's, on this text alone
            self.cancel(request_id)
            self._end(request_id, _failure(error))
            return
        if out is None:
            return
        self._measure(client, event.sequence, out, at)
        if out.finished:
            with self._lock:
                client = self._clients.pop(request_id, None)
            if client is None:
                return
            self.metrics.finished(out.finish_reason or "", at - client.submitted)
            if not event.finish_reason:  # a stop string ended it: the slot is not free yet
                self.cancel(request_id)
        if not self._tell(client, out) and not out.finished:
            self.cancel(request_id)

    def _measure(self, client: _Client, sequence: Sequence, out: Output, at: float) -> None:
        if out.token_ids:
            if client.latest is None:
                self.metrics.admitted(sequence.admitted - client.submitted)
                self.metrics.began(at - client.submitted)
            else:
                self.metrics.went_on((at - client.latest) / len(out.token_ids), len(out.token_ids))
            client.latest = at

    def _end(self, request_id: str, fault: DflashError) -> None:
        with self._lock:
            client = self._clients.pop(request_id, None)
        if client:
            self._tell_end(client, fault)

    def _end_all(self, fault: DflashError) -> None:
        """From any thread; `deliver` tells them, behind what it may be handing out."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            self._brought.put(partial(self._tell_end, client, fault))

    def _tell_end(self, client: _Client, fault: DflashError) -> None:
        reason = "stopped" if isinstance(fault, Stopped) else "failed"
        self.metrics.finished(reason, perf_counter() - client.submitted)
        self._tell(client, fault)

    def _tell(self, client: _Client, what: Output | DflashError) -> bool:
        """Call a sink. One that fails belongs to a caller that is gone."""
        try:
            client.sink(what)
        except Exception:
            if os.environ.get("DFLASH_TRT_TRACEBACK"):
                traceback.print_exc()
            return False
        return True


def _failure(error: BaseException) -> DflashError:
    return error if isinstance(error, DflashError) else Failure(explain(error)[0].removeprefix("error: "))
