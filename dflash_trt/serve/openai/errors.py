"""Everything that can go wrong, as status, body and headers that OpenAI's clients understand.

    {"error": {"message": "what — where — what to do", "type": "…", "param": "messages[0].role", "code": "…"}}

What went wrong inside the server is logged, without what a request said.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import Response
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from dflash_trt.errors import DflashError, UserError
from dflash_trt.runtime.request import PromptTooLong
from dflash_trt.serve.loop import Broken, Draining, QueueFull, Refused, Starting, Stopped

_log = logging.getLogger("dflash_trt.serve")

_FRAMES = 8  # of a traceback that the log shows
_TYPES = {429: "rate_limit_error"}  # others: by the hundreds
_CODES: dict[type[Refused], tuple[int, str]] = {
    QueueFull: (429, "queue_full"),
    Draining: (503, "draining"),
    Starting: (503, "starting"),
    Stopped: (503, "stopped"),
    Broken: (500, "engine_broken"),
}


class ErrorObject(TypedDict):
    """`code` is for programs, `message` for people."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """The body of every answer that is not 200."""

    error: ErrorObject


class Problem(Exception):
    """A request that gets an error for an answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        """The JSON object. ASCII, whatever the message quotes from a request."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error: ErrorObject = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps(ErrorBody(error=error)).encode()

    @property
    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body, self.status, self.headers, media_type="application/json")


class Gone(Exception):
    """The client has left; nobody hears what we say."""


def as_problem(error: Exception, param: str | None = None) -> Problem:
    """What to answer when handling a request raised `error`, of its field `param`. An unexpected one is logged."""
    match error:
        case Problem():
            return error
        case PromptTooLong():
            return Problem(400, "context_length_exceeded", str(error), param=param)
        case UserError():
            return Problem(400, "invalid_value", str(error), param=param)
        case Refused():
            status, code = _CODES.get(type(error), (503, "unavailable"))
            return Problem(status, code, str(error), headers={"Retry-After": str(error.retry_after)})
        case DflashError():
            return Problem(500, "engine_failed", str(error))
        case HTTPException(status_code=404):
            message = "there is no such address — URL — /openapi.json lists those that exist"
            return Problem(404, "not_found", message)
        case HTTPException(status_code=405):
            allowed = (error.headers or {}).get("Allow", "another one")
            message = f"this address does not take the method — URL — use {allowed}"
            return Problem(405, "method_not_allowed", message, headers=error.headers)
        case HTTPException():
            return Problem(error.status_code, "refused", f"{error.detail} — request", headers=error.headers)
    # Where it happened, but not its message, which may quote a prompt.
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    place = ", ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames)
    _log.error("%s in %s", type(error).__name__, place)
    message = "an error inside the server — request — this is a bug; its log says where"
    return Problem(500, "internal_error", message)


@contextmanager
def concerning(param: str) -> Iterator[None]:
    """What goes wrong inside is the fault of the request's field `param`."""
    try:
        yield
    except DflashError as error:
        raise as_problem(error, param) from error


_MEANINGS = {
    400: "The request is at fault.",
    401: "No API key, or a wrong one.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too many requests, of this key or altogether.",
    500: "The engine or the server failed.",
    503: "The server is starting or shutting down.",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document: errors a route may answer with."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[status]} for status in statuses}
