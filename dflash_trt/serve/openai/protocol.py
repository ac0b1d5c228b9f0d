"""HTTP between uvicorn and callers that need not be well-behaved."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dflash_trt.serve.openai.errors import Problem

_PATIENCE = 30.0  # seconds for the head of a request to arrive, from a connection's begin or its latest answer


class Protocol(HttpToolsProtocol):
    """Uvicorn's, with three differences.

    A connection that brings no request is closed in time. One request is under way at a time: uvicorn would stop
    reading at a pipelined one, and so not notice that the client leaves; here the connection closes after the answer,
    and the client asks again, as HTTP has it. What is not HTTP is refused in OpenAI's form.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._ahead = False  # has the client sent a request before the answer to the one before?
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_request()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._ahead:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        self._have_request()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self._ahead = True
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._ahead:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ahead:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def send_400_response(self, msg: str) -> None:
        problem = Problem(400, "invalid_http", "the request is not valid HTTP — request — check the client, or a proxy")
        head = f"content-type: application/json\r\ncontent-length: {len(problem.body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head.encode() + problem.body)
        self.transport.close()

    def _expect_request(self) -> None:
        self._have_request()
        if not self.transport.is_closing():
            self._timer = self.loop.call_later(_PATIENCE, self.transport.close)

    def _have_request(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
