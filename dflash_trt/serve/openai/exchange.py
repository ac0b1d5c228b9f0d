"""One HTTP request from its arrival to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response

from dflash_trt import __version__
from dflash_trt.serve.openai.answers import Answers, Piece
from dflash_trt.serve.openai.body import receive
from dflash_trt.serve.openai.errors import as_problem, concerning
from dflash_trt.serve.openai.front import Front
from dflash_trt.serve.openai.prepare import Prepare, Prepared
from dflash_trt.serve.openai.replies import Usage, make_usage
from dflash_trt.serve.openai.stream import DONE, EventStream, event, render, while_connected

_log = logging.getLogger("dflash_trt.serve")

_LARGE = 1 << 16  # bytes of a body


async def respond(front: Front, http: HttpRequest, key: str, prepare: Prepare) -> Response:
    """The response to a request of the caller with that key. Raises Problem, DflashError or Gone."""
    arrived = time.perf_counter()
    front.loop.check_open()
    body = await receive(http, front.settings.max_body_bytes, front.loop.check_open)
    pool = front.large if len(body) > _LARGE else None
    asked = await asyncio.get_running_loop().run_in_executor(pool, prepare, front, body)
    exchange = Exchange(front, asked, key, arrived)
    headers = {"X-Request-Id": exchange.asked.id}
    if exchange.asked.stream:
        return EventStream(exchange.events(), exchange.close, headers)
    try:
        reply = await while_connected(http.receive, exchange.whole())
    finally:
        exchange.close()
    return Response(render(reply), headers=headers, media_type="application/json")


class Exchange:
    """A request whose answers are under way from the beginning; `close` ends them, if they have not ended."""

    def __init__(self, front: Front, asked: Prepared, key: str, arrived: float):
        """`arrived`: perf_counter. Raises Problem or DflashError if it is not taken; nothing is left of it then."""
        self.asked = asked
        self._front, self._key, self._began, self._created = front, key, time.monotonic(), int(time.time())
        self._answers = Answers(front.loop, asked.requests)
        self._ends: list[str] = []  # why answers ended, for the log
        self._texts: list[list[str]] = [[] for _ in asked.requests]  # what was said, if the log is to have it
        front.gate.enter(key, len(asked.requests))
        try:
            with concerning(asked.param):
                self._answers.start(arrived)
        except Exception:
            front.gate.leave(key, len(asked.requests))
            raise
        front.exchanges.add(self)

    def close(self) -> None:
        """To be called once."""
        self._answers.stop()
        self._front.exchanges.discard(self)
        self._front.gate.leave(self._key, len(self.asked.requests))
        said = f"{sum(map(len, self.asked.prompts))} prompt tokens, {self._answers.tokens} new"
        end, seconds = ", ".join(sorted(set(self._ends))) or "the client left", time.monotonic() - self._began
        _log.info("%s %s: %s, %s, %.2f s", self.asked.id, self._key or "without key", said, end, seconds)
        if self._front.settings.log_requests:
            prompts = [self._show(prompt) for prompt in self.asked.prompts]
            _log.info("%s: %s: %s", self.asked.id, prompts, ["".join(texts) for texts in self._texts])

    async def whole(self) -> dict[str, Any]:
        """The reply, once all answers are complete."""
        answers = [Piece(index) for index in range(len(self.asked.requests))]
        try:
            async for pieces in self._answers.pieces():
                for piece in pieces:
                    answers[piece.index].add(piece.text, piece.token_ids, piece.finish_reason)
        except Exception as error:
            problem = as_problem(error)
            self._ends.append(problem.code)
            raise problem from error
        choices = []
        for piece in answers:
            choices.append(self._with_ids(self.asked.form.whole(piece), piece.token_ids, piece.index))
            self._note(piece)
        return self._reply(self.asked.form.whole_object, choices, {"usage": self._usage()})

    async def events(self) -> AsyncIterator[bytes]:
        """The chunks of a stream."""
        form, asked = self.asked.form, self.asked
        usage: dict[str, Any] = {"usage": None} if asked.include_usage else {}
        begun: set[int] = set()

        def chunk(choice: Any, token_ids: list[int]) -> bytes:
            first = choice["index"] not in begun
            begun.add(choice["index"])
            choice = self._with_ids(choice, token_ids, choice["index"] if first else None)
            return event(self._reply(form.chunk_object, [choice], usage))

        if openings := [chunk(choice, []) for index in range(len(asked.requests)) if (choice := form.opening(index))]:
            yield b"".join(openings)
        try:
            async for pieces in self._answers.pieces():
                data = []
                for piece in pieces:
                    choice = form.chunk(piece)
                    says = piece.finish_reason or choice.get("text") or choice.get("delta")
                    if says or (asked.return_token_ids and piece.token_ids):
                        data.append(chunk(choice, piece.token_ids))
                    self._note(piece)
                if data:
                    yield b"".join(data)
        except Exception as error:  # the status is out: a stream without [DONE] is one that failed
            problem = as_problem(error)
            self._ends.append(problem.code)
            yield b"data: %b\n\n" % problem.body
            return
        if asked.include_usage:
            yield event(self._reply(form.chunk_object, [], {"usage": self._usage()}))
        yield DONE

    def _reply(self, kind: str, choices: list[Any], more: dict[str, Any]) -> dict[str, Any]:
        fingerprint = f"dflash-trt-{__version__}"
        head = {"id": self.asked.id, "object": kind, "created": self._created, "model": self._front.settings.model}
        return head | {"system_fingerprint": fingerprint, "choices": choices} | more

    def _with_ids(self, choice: Any, token_ids: list[int], first: int | None) -> Any:
        """With token ids, if they are asked for; those of the prompt, too, if it is the answer's `first` choice."""
        if self.asked.return_token_ids:
            choice["token_ids"] = token_ids
            if first is not None:
                each = len(self.asked.requests) // len(self.asked.prompts)
                choice["prompt_token_ids"] = self.asked.prompts[first // each]
        return choice

    def _usage(self) -> Usage:
        return make_usage(sum(map(len, self.asked.prompts)), self._answers.tokens, self._answers.statistics)

    def _note(self, piece: Piece) -> None:
        if piece.finish_reason:
            self._ends.append(piece.finish_reason)
        if self._front.settings.log_requests:
            self._texts[piece.index].append(piece.text)

    def _show(self, prompt: list[int]) -> object:
        return self._front.tokenizer.decode(prompt) if self._front.tokenizer else prompt
