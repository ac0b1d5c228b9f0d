"""DFlash engines as a model of Triton Inference Server: the Python backend's side of `dflash-trt serve`.

Requests go to the engine's process over a Unix socket, one thread each, and come back as they are made. This process
must not die, for Triton does not start it again; so the engine, which may, is another one (`dflash_triton/engine.py`).
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import triton_python_backend_utils as pb
from dflash_triton.engine import Engine, EngineFailed
from dflash_triton.mirror import Mirror
from dflash_triton.pulse import Pulse
from dflash_triton.question import INPUTS, BadRequest, Question, read_question
from dflash_triton.reply import Reply, plain
from dflash_triton.settings import Settings
from dflash_triton.unix_http import Another, Connection, Lost, Refused, answer, fetch

CODES = {400: "INVALID_ARG", 404: "NOT_FOUND", 413: "INVALID_ARG", 422: "INVALID_ARG",
         429: "UNAVAILABLE", 503: "UNAVAILABLE"}  # fmt: skip
SLOTS = 256  # requests beyond the engine's queue that may be here at once: more than any engine runs
POLL = 0.05  # seconds between two looks whether callers are still there …
POLL_EACH = 0.001  # … and what is added for each of them, as every look costs a message to the server
SCRAPE = 1.0  # seconds
STOPPED = "the server was stopped before the answer was complete — server — ask again"


@dataclass(eq=False)
class Call:
    """One request on its way."""

    question: Question
    reply: Reply
    connection: Connection
    cancelled: bool = False
    verdict: str = ""  # why, where the caller has not left but waits to hear it

    def cancel(self, verdict: str = "") -> None:
        self.verdict, self.cancelled = verdict, True
        self.connection.cut()


class TritonPythonModel:
    """One instance, whose engine batches by itself."""

    def initialize(self, args: dict[str, str]) -> None:
        """Returns when the engine is ready."""
        self._name = args["model_name"]
        parameters = json.loads(args["model_config"])["parameters"]
        self._settings = Settings.read(parameters, os.environ)
        self._engine = Engine(self._settings, lambda line: pb.Logger.log_info(f"[{self._name}] {line}"))
        try:
            self._engine.start()
        except EngineFailed as error:
            raise pb.TritonModelException(str(error)) from None
        self._pulse = Pulse()
        self._most = self._settings.max_waiting + SLOTS
        self._calls: set[Call] = set()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._ended = threading.Event()
        works = (self._look_for_cancelled, self._scrape)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def is_ready(self) -> bool:
        """Asked for by later versions of Triton than 2.51."""
        return fetch(self._engine.socket, "/health", self._engine.expected) is not None

    def execute(self, requests: list[Any]) -> None:
        """Answers come from other threads."""
        for request in requests:
            reply = Reply(request)
            try:
                self._accept(request, reply)
            except Exception as error:  # whatever it is, others go on
                self._fail(reply, error)

    def finalize(self) -> None:
        """Triton calls it when no request runs any more."""
        with self._idle:
            self._idle.wait_for(lambda: not self._calls, self._settings.grace)
        self._engine.stop(0)
        self._ended.set()
        for thread in self._threads:
            thread.join(5)

    def _accept(self, request: Any, reply: Reply) -> None:
        found = {name: pb.get_input_tensor_by_name(request, name) for name in INPUTS}
        tensors = {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}
        call = Call(read_question(tensors, request.parameters()), reply, Connection(self._engine.socket))
        with self._lock:
            full = len(self._calls) >= self._most
            if not full:
                self._calls.add(call)
        if full:
            reply.fail(f"{self._most} requests are here already — {self._name} — try again later", "UNAVAILABLE")
            return
        try:
            threading.Thread(target=self._serve, args=(call,), daemon=True).start()
        except RuntimeError:  # the system has no more threads
            self._forget(call)
            raise

    def _serve(self, call: Call) -> None:
        reply = call.reply
        try:
            reply.repeat(call.question.echo)
            for part in answer(call.connection, call.question.body, self._engine.expected):
                reply.add(part, call.question)
        except Lost as error:
            if call.cancelled and not call.verdict:
                reply.close()
            else:
                self._fail(reply, error, call.verdict)
        except Exception as error:
            self._fail(reply, error)
        finally:
            self._forget(call)

    def _fail(self, reply: Reply, error: Exception, verdict: str = "") -> None:
        """End an answer with what `error` means, or with `verdict`. Whatever happens here, others go on."""
        try:
            match error:
                case BadRequest():
                    reply.fail(str(error), "INVALID_ARG")
                case Refused():
                    reply.fail(str(error), CODES.get(error.status, "INTERNAL"))
                case Another():
                    reply.fail(self._engine.another(error.found), "UNAVAILABLE")
                case Lost():
                    reply.fail(verdict or self._engine.trouble, "UNAVAILABLE")
                case _:
                    reply.fail(self._unexpected(error))
        except Exception as worse:
            self._unexpected(worse)

    def _forget(self, call: Call) -> None:
        with self._idle:
            self._calls.discard(call)
            self._idle.notify_all()

    def _look_for_cancelled(self) -> None:
        """Cut what its caller has left.

        And all there is when the grace of a server that ends is over, or if the engine does not get on.
        """
        deadline = math.inf
        while not self._ended.wait(POLL + POLL_EACH * len(self._calls)):
            if deadline == math.inf and self._engine.told_to_end:
                deadline = time.monotonic() + self._settings.grace
            with self._lock:
                calls = [call for call in self._calls if not call.cancelled]
            stuck = self._pulse.trouble
            for call in calls:
                if time.monotonic() > deadline:
                    call.cancel(STOPPED)
                elif stuck:
                    call.cancel(self._engine.hangs(stuck))
                elif call.reply.gone():
                    call.cancel()

    def _scrape(self) -> None:
        mirror = Mirror(pb.MetricFamily, self._name)
        while not self._ended.wait(SCRAPE):
            try:
                found = fetch(self._engine.socket, "/metrics", self._engine.expected)
                text = found.decode() if found else None
                self._pulse.hear(text)
                mirror.show(text) if text else mirror.down()
            except Exception as error:
                self._unexpected(error)

    def _unexpected(self, error: Exception) -> str:
        message = plain(f"{type(error).__name__}: {error} — the Triton model — this is a bug")
        pb.Logger.log_error(f"[{self._name}] {message}")
        return message
