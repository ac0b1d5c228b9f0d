"""An HTTP client whose answers are read as tests like: at once, event by event, slowly, or never."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
DONE = "[DONE]"
# Bytes. A receiver that takes so little makes the sender's buffer in the kernel small, too.
_WINDOW, _SEGMENT = 2048, 536


class Connection(http.client.HTTPConnection):
    """To the server at a URL or a Unix socket; closed when its block is left.

    `narrow`: next to nothing fits between both ends, so that a server soon waits for whoever does not read.
    """

    def __init__(self, to: str | Path, *, narrow: bool = False):
        self._path = to if isinstance(to, Path) else None
        self._narrow = narrow
        super().__init__("localhost" if isinstance(to, Path) else urlsplit(to).netloc, timeout=60)

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        if not self._path and not self._narrow:
            return super().connect()
        self.sock = socket.socket(socket.AF_UNIX if self._path else socket.AF_INET)
        self.sock.settimeout(self.timeout)
        if self._narrow:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT)
        self.sock.connect(str(self._path) if self._path else (self.host, self.port))

    def post(self, path: str, body: Any, **headers: str) -> None:
        """Send a JSON value, or bytes as they are. The answer is left to be read."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.request("POST", path, data, {"Content-Type": "application/json"} | headers)

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        self.request("GET", path, headers=headers)
        return self.getresponse()

    def events(self) -> Iterator[Any]:
        """Of the answer, as they come."""
        return events(self.getresponse())


def events(lines: Iterable[bytes]) -> Iterator[Any]:
    """The data of server-sent events: JSON values, and DONE."""
    for line in lines:
        if line.startswith(b"data:"):
            data = line[5:].strip().decode()
            yield data if data == DONE else json.loads(data)


def text_of(stream: Iterable[Any]) -> str:
    """What the events of a completion say, if they are complete."""
    *chunks, last = stream
    assert last == DONE, last
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)
