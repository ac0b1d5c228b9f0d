"""`dflash-trt serve` as a process of its own, on a free port.

    with Server(engine, "--threads", 1) as server:
        urllib.request.urlopen(f"{server.url}/health")

It is asked to end when the block is left, and killed if it does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.runtime.mpi import CLI, ENVIRONMENT, MPIRUN, ROOT


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
        self.socket: str | None = None
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
        self.url, self.socket, self.model = ready.get("url"), ready.get("socket"), ready["model"]
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

    def metrics(self) -> dict[str, float]:
        """By name, with labels if there are any: {'dflash_refused_total{reason="queue_full"}': 1.0, …}."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as response:
            lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def running(self) -> int:
        """Requests that have a slot or wait for one."""
        metrics = self.metrics()
        return int(metrics["dflash_requests_running"] + metrics["dflash_requests_waiting"])

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON of the answer to a JSON value, or to bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"} | headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


def until(holds: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something holds. Raises AssertionError if it does not come to hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.01)
