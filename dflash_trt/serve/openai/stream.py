"""Sending while watching whether anybody is left to read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from dflash_trt.serve.openai.errors import Gone

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter is nginx's


def render(data: object) -> bytes:
    """JSON."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def event(data: object) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % render(data)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises Gone as soon as the client leaves; the work is cancelled then.

    The request's body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, until they end or the client leaves; `close` is called in either case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], headers: dict[str, str]):
        self.status_code, self.background = 200, None
        self._events, self._close = events, close
        self.init_headers(_HEADERS | headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(Gone):
                await while_connected(receive, self._send(send))
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:  # a reader who is slow holds up `send`, and what comes meanwhile is one chunk
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
