"""From the bytes of a request to its fields, whoever sent them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.types import Message, Receive

from dflash_trt.serve.openai.errors import Gone, Problem
from dflash_trt.serve.openai.fields import Known

_PATIENCE = 30  # seconds for more of a body to come
_SHOWN = 100  # characters of a name that a message repeats

T = TypeVar("T", bound=Known)


async def receive(http: Request, limit: int, check: Callable[[], None]) -> bytes:
    """The body. Raises Problem if it is no JSON, stops coming, or has more than `limit` bytes.

    No more than that are read. `check` is called while nothing comes, and ends the wait with what it raises.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Nothing else: a browser sends other types across origins without asking, and so on behalf of any page.
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"the body is {kind[:_SHOWN] or 'of no known type'} — Content-Type — send application/json"
        raise Problem(400, "unsupported_content_type", message)
    message = f"the body has more than {limit} bytes — body — send less, or start the server with --max-body-bytes"
    too_large = Problem(413, "body_too_large", message)
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    chunks, size, more = [], 0, True
    while more:
        came = await _next(http.receive, check)
        if came["type"] == "http.disconnect":
            raise Gone
        chunks.append(came.get("body", b""))
        size, more = size + len(chunks[-1]), came.get("more_body", False)
        if size > limit:
            raise too_large
    return b"".join(chunks)


async def _next(receive: Receive, check: Callable[[], None]) -> Message:
    waiting = asyncio.ensure_future(receive())
    try:
        for _ in range(_PATIENCE):
            await asyncio.wait({waiting}, timeout=1.0)
            if waiting.done():
                return waiting.result()
            check()
    finally:
        waiting.cancel()
    raise Problem(408, "body_timeout", f"nothing came for {_PATIENCE} seconds — body — send the request again")


def read(body: bytes, model: type[T]) -> T:
    """The request in `body`. Raises Problem."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        message = f"the body is not valid JSON in UTF-8: {error} — body — send one JSON object"
        raise Problem(400, "invalid_json", message) from None
    if not isinstance(value, dict):
        raise Problem(400, "invalid_json", "the body is not an object — body — send one JSON object")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> Problem:
    first: Any = error.errors(include_url=False, include_input=False)[0]  # one after the other: the rest may follow
    context = first.get("ctx", {})
    place = [*first["loc"], context["field"]] if context.get("field") else list(first["loc"])
    param = _name(place)
    match first["type"]:
        case "missing":
            code, what = "missing_required_parameter", "it is missing"
        case "unknown_parameter" | "unsupported_parameter" | "invalid_value" | "invalid_type" as code:
            what = context["message"]
        case kind:
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            what = re.sub(r"^(Input|List|String|Dictionary) ", "it ", first["msg"]).replace(" after validation", "")
    what, _, fix = what.partition("; ")
    message = f"{param}: {what} — request — {fix or '/openapi.json says what is taken'}"
    return Problem(400, code, message, param=param)


def _name(place: list[str | int]) -> str:
    """messages[0].content"""
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:_SHOWN]}" for step in place)
    return name.removeprefix(".") or "body"
