"""How Triton's model starts an engine, attaches to one, and notices what becomes of it."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.triton.dflash_triton import engine as module
from deploy.triton.dflash_triton import unix_http
from deploy.triton.dflash_triton.engine import Engine, EngineFailed
from deploy.triton.dflash_triton.mirror import Mirror
from deploy.triton.dflash_triton.pulse import SILENCE, STANDSTILL, Pulse
from deploy.triton.dflash_triton.settings import Settings
from deploy.triton.dflash_triton.unix_http import Another, Connection, answer, fetch
from dflash_trt.engine import convert
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.serve.identity import identity
from tests.runtime.mpi import CLI
from tests.waiting import until

BODY = {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}


def settings(engine: Path, *command: str, socket: object = "", name: str = "") -> Settings:
    return Settings(str(engine), 1, command, (), str(socket), 1.0, 1, name)


def test_an_engine_that_does_not_start_says_why(tmp_path):
    logged: list[str] = []
    for command, words in {CLI[0]: "exit code 2, after saying: ", "/no/such": "No such file or directory — /n"}.items():
        engine = Engine(settings(tmp_path, command), logged.append)
        with pytest.raises(EngineFailed, match=words):
            engine.start()
        assert not Path(engine.socket).parent.exists()
    engine = Engine(settings(tmp_path, *CLI), logged.append)
    with pytest.raises(EngineFailed, match=r"not an engine directory: it has no manifest\.json — "):
        engine.start()
    assert any(line.startswith("error: not an engine directory") for line in logged)


# Answers /health as long as a file is there; without it says a word and fails, as a damaged engine would.
STAND_IN = """
import pathlib, socket, sys
path, good = sys.argv[sys.argv.index("--socket") + 1], pathlib.Path(sys.argv[1])
if not good.exists():
    print("2026-11-30 03:57:26,217 INFO id: ['a secret prompt']")
    sys.exit(good.with_name("words").read_text())
pathlib.Path(path).unlink(missing_ok=True)
listening = socket.socket(socket.AF_UNIX)
listening.bind(path)
listening.listen()
while True:
    caller, _ = listening.accept()
    with caller:
        caller.recv(4096)
        caller.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
"""


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("error: the file is gone — /w — convert again", "(the file is gone, /w, convert again)"),
        ("Segmentation fault\n-----", "(the engine ended with exit code 1, after saying: Segmentation fault, "),
    ],
)
def test_callers_are_told_why_an_engine_does_not_come_back(tmp_path, monkeypatch, said, heard):
    monkeypatch.setattr(module, "_WAIT", 0.01)
    good, program = tmp_path / "good", tmp_path / "stand_in.py"
    good.touch()
    program.write_text(STAND_IN)
    (tmp_path / "words").write_text(said)
    logged: list[str] = []
    engine = Engine(settings(tmp_path, sys.executable, str(program), str(good)), logged.append)
    engine.start()
    try:
        good.unlink()
        assert engine._process
        os.kill(engine._process.pid, signal.SIGKILL)
        until(lambda: heard in engine.trouble)
        what, where, fix = engine.trouble.split(" — ")
        assert "is being started again" in what and (where, fix) == (str(tmp_path), "send it again soon")
        assert any("a secret prompt" in line for line in logged) and "secret" not in engine.trouble
        good.touch()
        until(lambda: not engine._fault and fetch(engine.socket, "/health") is not None)
        assert "(" not in engine.trouble, "what was, is forgotten"
    finally:
        engine.stop(0)


def test_a_server_says_which_engine_it_has_in_every_answer(server, engine):
    name = identity(read_manifest(engine))
    with server.connect() as connection:
        for path in ("/health", "/v1/models", "/nowhere"):
            response = connection.get(path)
            assert response.headers["X-Dflash-Engine"] == name and response.read()


def test_engines_are_the_same_by_what_they_hold_and_not_by_where_they_lie(pair, engine, tmp_path):
    limits = {"max_batch": 4, "max_seq_len": 2048}
    same = convert(*pair, tmp_path / "same", **limits)
    smaller = convert(*pair, tmp_path / "smaller", **limits | {"max_batch": 2})
    there = read_manifest(engine)
    assert identity(same.manifest) == identity(there) != identity(smaller.manifest)
    other = dataclasses.replace(there, target=dataclasses.replace(there.target, name="ä b" * 50))
    assert re.fullmatch(r"[\w.%-]+@[0-9a-f]{16}", identity(other), re.ASCII)


def test_a_model_attaches_only_to_the_engine_it_was_made_for(server, engine):
    name = identity(read_manifest(engine))
    Engine(settings(engine, socket=server.socket, name=name), print).start()
    with pytest.raises(EngineFailed) as refusal:
        Engine(settings(engine, socket=server.socket, name="other@0123"), print).start()
    what, where, fix = str(refusal.value).split(" — ")
    assert name in what and "other@0123" in what and where == str(server.socket) and "dflash-trt serve" in fix
    with pytest.raises(Another, match=name):
        list(answer(Connection(str(server.socket)), BODY, "other@0123"))
    assert list(answer(Connection(str(server.socket)), BODY, name))
    assert fetch(str(server.socket), "/metrics", name) and fetch(str(server.socket), "/metrics", "other@0123") is None


def test_a_server_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0)
    monkeypatch.setattr(unix_http, "_ANSWER", 0.01)
    attached = settings(tmp_path, socket=tmp_path / "s", name="a@1")
    with pytest.raises(EngineFailed, match="no engine answers — "):
        Engine(attached, print).start()
    with socket.socket(socket.AF_UNIX) as listening:  # the kernel takes the connection, and nobody answers
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        with pytest.raises(
            EngineFailed, match=r"the engine takes no requests — .*/s — if it is not just being started"
        ):
            Engine(attached, print).start()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_engine_that_is_silent_or_stands_still_is_noticed():
    clock = Clock()
    pulse = Pulse(clock)

    def after(seconds: float, steps: int | None, running: int = 1) -> str:
        clock.now += seconds
        text = f"# TYPE\ndflash_steps_total {steps}.0\ndflash_requests_running {running}.0\n"
        pulse.hear(None if steps is None else text)
        return pulse.trouble

    assert after(SILENCE, None) == "" and "has not answered" in after(1, None)
    assert after(1, 5) == "" and after(1000, 6) == ""
    assert after(STANDSTILL, 6) == "" and "has made no step" in after(1, 6)
    assert after(1, 7) == ""
    for _ in range(3):
        assert after(1000, 7, running=0) == "", "nothing to do"


class Family:
    """Triton's MetricFamily, as far as the mirror needs it; all values by name."""

    COUNTER, GAUGE = range(2)
    values: dict[str, float]

    def __init__(self, name: str, description: str, kind: int):
        self.name = name

    def Metric(self, labels: dict[str, str]) -> Any:
        return Metric(self.name)


class Metric:
    def __init__(self, name: str):
        self.name = name
        Family.values[name] = 0.0

    def set(self, value: float) -> None:
        Family.values[self.name] = value

    def increment(self, value: float) -> None:
        assert value >= 0
        Family.values[self.name] += value


@pytest.mark.parametrize(("second", "total"), [(3, 8), (5, 10), (9, 14)], ids=["less", "as much", "more"])
def test_counts_go_on_whatever_a_new_process_has_counted_meanwhile(second, total):
    Family.values = {}
    mirror = Mirror(Family, "m")

    def exposition(start: float, count: int) -> str:
        types = "# TYPE dflash_start_time_seconds gauge\n# TYPE dflash_steps_total counter\n"
        return f"{types}dflash_start_time_seconds {start}\ndflash_steps_total {count}.0\n"

    for start, count in [(1.5e9, 4), (1.5e9, 5)]:
        mirror.show(exposition(start, count))
    assert Family.values["dflash_steps_total"] == 5
    mirror.down()
    assert Family.values == {"dflash_steps_total": 5, "dflash_start_time_seconds": 0}
    for _ in range(2):
        mirror.show(exposition(1.6e9, second))
    assert Family.values["dflash_steps_total"] == total
