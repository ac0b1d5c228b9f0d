"""Our server as a process of its own, and answers as they stream out of it."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash_trt.errors import Failure

COMMAND = [sys.executable, "-c", "from dflash_trt.cli import main; main()", "serve"]
_GRACE = 30  # seconds, of a server that is told to end


@dataclass(frozen=True)
class Server:
    """Where one listens, and what it calls its model."""

    url: str
    model: str

    def metric(self, name: str) -> float | None:
        """The value of a series without labels, None if there is none."""
        with closing(self._connect()) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)

    def stream(self, prompt: Sequence[int], max_new_tokens: int, **fields: Any) -> Iterator[Piece]:
        """Yield a greedy answer as it comes. Raises Failure if there is none, or only half of one."""
        body = {"prompt": list(prompt), "max_tokens": max_new_tokens, "temperature": 0, "return_token_ids": True}
        with closing(self._connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True} | fields), _JSON)
            response = connection.getresponse()
            if response.status != 200:
                raise Failure(f"the server refused a request: {response.read().decode()}")
            for line in response:
                at, data = time.perf_counter(), line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise Failure(f"the server ended a stream: {chunk['error']['message']}")
                    if chunk["choices"] and (ids := chunk["choices"][0].get("token_ids")):
                        yield Piece(at, tuple(ids))
            raise Failure("a stream has no end")

    def _connect(self) -> http.client.HTTPConnection:
        where = urlsplit(self.url)
        return http.client.HTTPConnection(where.hostname or "", where.port, timeout=120)


_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Piece:
    """Tokens that came together."""

    at: float  # perf_counter
    token_ids: tuple[int, ...]


@contextmanager
def serving(engine: Path, *options: str) -> Iterator[Server]:
    """Serve an engine on a free port as long as the context lasts. Raises Failure if it does not start or end well."""
    with tempfile.TemporaryFile("w+") as log:
        command = [*COMMAND, str(engine), "--port", "0", "--json", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None

        def failure(what: str) -> Failure:
            log.seek(0)
            return Failure(f"{what} — {' '.join(command[3:])} — {log.read()[-2000:].strip() or 'it said nothing'}")

        try:
            try:
                ready = json.loads(process.stdout.readline())
            except ValueError:
                raise failure("the server did not start") from None
            yield Server(ready["url"], ready["model"])
            process.send_signal(signal.SIGTERM)
            if code := process.wait(_GRACE):
                raise failure(f"the server ended with exit code {code}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
