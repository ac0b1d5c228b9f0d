"""The answers to one HTTP request: asked for together, ended together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from dflash_trt.errors import DflashError
from dflash_trt.runtime.request import Output, Request
from dflash_trt.runtime.statistics import Statistics
from dflash_trt.serve.loop import STOPPED, EngineLoop, Stopped
from dflash_trt.serve.openai.channel import Channel


@dataclass
class Piece:
    """Some of an answer: what is new of it, or all."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, text: str, token_ids: Iterable[int], finish_reason: str | None) -> None:
        """Append what came next."""
        self.texts.append(text)
        self.token_ids += token_ids
        self.finish_reason = finish_reason


class Answers:
    """Some requests in an engine loop. `start`, read `pieces`, and `stop` in any case."""

    def __init__(self, loop: EngineLoop, requests: list[Request]):
        self._loop, self._requests = loop, requests
        self._channel = Channel()
        self._running: dict[int, str] = {}  # ids of requests that have not ended
        self.tokens = 0  # that have been delivered
        self.statistics: list[Statistics] = []  # of answers that have ended

    def start(self, arrived: float) -> None:
        """All of them, or none: raises UserError or Refused. `arrived`: when the HTTP request came (perf_counter)."""
        try:
            for index, request in enumerate(self._requests):
                self._running[index] = self._loop.submit(request, self._channel.sink(index), arrived=arrived)
        except Exception:
            self.stop()
            raise

    def stop(self) -> None:
        """Have the engine drop those that have not ended."""
        for request_id in self._running.values():
            self._loop.cancel(request_id)
        self._running.clear()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What came since the last time, one piece an answer, until all have ended. Raises DflashError."""
        fault: Exception | None = None
        while self._running and not fault:
            pieces: dict[int, Piece] = {}
            for index, out in await self._channel.take():
                if isinstance(out, Output) and out.finish_reason != "cancelled":
                    pieces.setdefault(index, Piece(index)).add(out.text, out.token_ids, out.finish_reason)
                    self._count(index, out)
                    continue
                del self._running[index]  # if it was cancelled, then not by us: `stop` comes after the reading
                fault = out if isinstance(out, DflashError) else Stopped(STOPPED)
                break
            if pieces:
                yield list(pieces.values())
        if fault:
            raise fault

    def _count(self, index: int, out: Output) -> None:
        self.tokens += len(out.token_ids)
        if out.finished:
            del self._running[index]
            self.statistics.append(out.statistics)
