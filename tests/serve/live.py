"""`dflash-trt serve` as a process of its own, on a free port.

    with Server(engine, "--threads", 1) as server:
        status, reply = server.post("/v1/completions", {"prompt": "one"})

It is asked to end when the block is left, and killed if it does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.runtime.mpi import CLI, ENVIRONMENT, MPIRUN, ROOT
from tests.serve.caller import Connection


class Server:
    """Ready once entered, ended once left. With several `ranks` the process is mpirun's."""

    def __init__(self, engine: Path, *options: object, ranks: int = 1, environment: Mapping[str, str] = {}):
        words = [*CLI, "serve", engine, *options, "--json"]
        if "--no-http" not in options and "--port" not in options:
            words += ["--port", 0]
        if ranks > 1:
            words = [*MPIRUN, "-n", ranks, *words]
        self._words = list(map(str, words))
        self._environment = os.environ | ENVIRONMENT | dict(environment)
        self.process: subprocess.Popen[str]
        self.url: str | None = None  # None with --no-http
        self.socket: Path | None = None
        self.model = ""

    def __enter__(self) -> Server:
        self._errors = tempfile.NamedTemporaryFile("w+", prefix="serve-", suffix=".log")
        self.process = subprocess.Popen(
            self._words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=self._environment,
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(timeout=20)
            raise AssertionError(f"the server ended with {self.process.returncode}: {self.errors()}")
        ready = json.loads(line)
        self.url, self.model = ready.get("url"), ready["model"]
        self.socket = Path(ready["socket"]) if "socket" in ready else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
        assert self.process.stdout
        self.process.stdout.close()
        self._errors.close()

    def errors(self) -> str:
        """What it has written to stderr."""
        return Path(self._errors.name).read_text()

    def connect(self, *, narrow: bool = False) -> Connection:
        """A connection that has asked nothing yet."""
        assert self.url
        return Connection(self.url, narrow=narrow)

    def ask(self, path: str, body: Any, *, narrow: bool = False, **headers: str) -> Connection:
        """A connection that has asked something, and may or may not read the answer."""
        connection = self.connect(narrow=narrow)
        connection.post(path, body, **headers)
        return connection

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON of the whole answer."""
        with self.ask(path, body, **headers) as connection:
            response = connection.getresponse()
            return response.status, json.load(response)

    def metrics(self) -> dict[str, float]:
        """By name, with labels if there are any: {'dflash_refused_total{reason="queue_full"}': 1.0, …}."""
        with self.connect() as connection:
            lines = connection.get("/metrics").read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def running(self) -> int:
        """Requests that have a slot or wait for one."""
        metrics = self.metrics()
        return int(metrics["dflash_requests_running"] + metrics["dflash_requests_waiting"])
