"""Speaks to `dflash-trt serve` over its Unix socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ENGINE = "X-Dflash-Engine"  # a header of every answer: which engine the server has
_ANSWER = 2.0  # seconds for what the server says of itself
_CONNECT = 10.0  # seconds until the kernel takes a connection: more are waiting than it holds, and nobody takes them


class Refused(Exception):
    """The server answered with an error. The message is its own."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Another(Exception):
    """The server has another engine, `found`, than it should have."""

    def __init__(self, found: str):
        super().__init__(found)
        self.found = found


class Lost(Exception):
    """There is nobody at the socket, or no more: the answer has no end."""


@dataclass(frozen=True)
class Part:
    """What came at once; the last part of an answer has a reason and the server's `usage`."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class Connection(http.client.HTTPConnection):
    """One request each."""

    def __init__(self, path: str, timeout: float | None = None):
        super().__init__("localhost", timeout=timeout)
        self._path = path.encode(errors="surrogateescape")  # Triton's interpreter may take paths for ASCII
        self._raw: socket.socket | None = None
        self._cut = False

    def connect(self) -> None:
        self.sock = self._raw = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout or _CONNECT)
        self.sock.connect(self._path)
        self.sock.settimeout(self.timeout)
        if self._cut:
            self.cut()

    def cut(self) -> None:
        """End it from another thread: the server sees that the caller has gone, and whoever reads here gets Lost."""
        self._cut = True
        if self._raw:
            with contextlib.suppress(OSError):
                self._raw.shutdown(socket.SHUT_RDWR)


def answer(connection: Connection, body: dict[str, Any], engine: str = "") -> Iterator[Part]:
    """The parts of the answer to POST /v1/completions, as they come. Raises Refused or Lost.

    `engine`, if given, is the one that the server must have; else Another is raised.
    """
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body, allow_nan=False), headers)
        response = connection.getresponse()
        if engine and (found := response.headers.get(ENGINE, "")) != engine:
            raise Another(found)
        if response.status != 200:
            raise Refused(response.status, _message(response.read()))
        yield from _parts(response)
    except (OSError, http.client.HTTPException) as error:
        raise Lost(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()


def fetch(path: str, url: str, engine: str = "") -> bytes | None:
    """The body of GET `url`; None if there is no server, or none of `engine`, or it does not answer 200 in time."""
    found = _get(path, url)
    return found[0] if found and engine in ("", found[1]) else None


def engine_at(path: str) -> str | None:
    """Which engine the server has that takes requests at `path`; None if there is none, "" if it does not say."""
    found = _get(path, "/health")
    return found[1] if found else None


def listens(path: str) -> bool:
    """Is there a process that has the socket, whether it answers or not?"""
    connection = Connection(path, 1.0)
    try:
        connection.connect()
        return True
    except OSError as error:
        return isinstance(error, TimeoutError)
    finally:
        connection.close()


def _get(path: str, url: str) -> tuple[bytes, str] | None:
    """The body, and which engine the server has."""
    connection = Connection(path, _ANSWER)
    try:
        connection.request("GET", url)
        response = connection.getresponse()
        body = response.read()
        return (body, response.headers.get(ENGINE, "")) if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _parts(response: http.client.HTTPResponse) -> Iterator[Part]:
    """The end of an answer says its reason, then its usage; both go into one part."""
    prompt_tokens, last = 0, None
    for event in _events(response):
        if "error" in event:
            raise Refused(500, event["error"]["message"])
        for choice in event["choices"]:
            if choice.get("prompt_token_ids") is not None:
                prompt_tokens = len(choice["prompt_token_ids"])
            part = Part(choice["text"], choice.get("token_ids") or [], prompt_tokens, choice["finish_reason"])
            if part.finish_reason:
                last = part
            elif part.text or part.token_ids:
                yield part
        if last and event.get("usage"):
            usage = event["usage"]
            yield Part(last.text, last.token_ids, usage["prompt_tokens"], last.finish_reason, usage)
            response.read()  # the end of the stream, so that the server does not think the caller has left early
            return
    raise Lost("the answer has no end")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a text/event-stream."""
    for line in response:
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            yield json.loads(line[5:])


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
