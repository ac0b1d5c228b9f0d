"""How a serving process begins and ends, and what its callers see of that."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import UserError
from dflash_trt.serve.address import UnixFiles, bind
from dflash_trt.serve.server import find_parent
from tests.runtime.mpi import CLI, run_alone
from tests.serve.caller import COMPLETION, DONE, events
from tests.serve.live import Server
from tests.waiting import until

SOME = {"prompt": "one", "max_tokens": 600, "return_token_ids": True}
MANY = 100
FOREVER = {"prompt": ["one"] * MANY, "max_tokens": 2000}  # minutes of work for the fastest machine


class Caller(threading.Thread):
    """Reads an answer to its end."""

    def __init__(self, server: Server, body: dict[str, Any], stream: bool = True):
        super().__init__(daemon=True)
        self._server = server
        self._body = body | {"temperature": 0, "ignore_eos": True, "stream": stream}
        self.begun = threading.Event()
        self.events: list[Any] = []  # or one: an error, or a whole answer
        self.status = 0
        self.done = False  # the answer is complete
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError, HTTPException), self._server.ask(COMPLETION, self._body) as to:
            response = to.getresponse()
            self.status, self.retry_after = response.status, response.headers["Retry-After"]
            if response.headers["Content-Type"] == "application/json":
                self.events.append(json.load(response))
                self.done = self.status == 200
            for event in events(response):
                self.done = event == DONE
                if not self.done:
                    self.events.append(event)
                    self.begun.set()

    @property
    def tokens(self) -> int:
        """How many the answer has: its text is any bytes, which may be more or fewer characters."""
        return sum(len(event["choices"][0]["token_ids"]) for event in self.events)


def end(process: subprocess.Popen[str], seconds: float = 20) -> int:
    return process.wait(timeout=seconds)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_finishes_what_was_accepted_and_refuses_the_rest(engine, number):
    with Server(engine, "--threads", 1, "--batch", 2, "--no-draft") as server:
        callers = [Caller(server, SOME) for _ in range(3)]  # one waits
        until(lambda: sum(caller.begun.is_set() for caller in callers) == 2 and server.running() == 3)
        server.process.send_signal(number)
        until(lambda: "finishing 3 requests" in server.errors())  # the one that waited has all of its tokens to come
        late = Caller(server, SOME)
        late.join(20)
        assert (late.status, late.retry_after) == (503, "5")
        assert late.events[0]["error"]["code"] and "shutting down" in late.events[0]["error"]["message"]
        for caller in callers:
            caller.join(20)
            assert caller.done and caller.tokens == SOME["max_tokens"]
        assert end(server.process) == 0


def test_what_outlasts_the_grace_is_told_so_and_the_exit_code_says_it(engine):
    with Server(engine, "--threads", 1, "--grace", 0.3) as server:
        caller = Caller(server, FOREVER)
        assert caller.begun.wait(20)
        server.process.send_signal(signal.SIGTERM)
        caller.join(20)
        assert not caller.done and "stopped before the answer was complete" in caller.events[-1]["error"]["message"]
        assert end(server.process) == 1
        assert "stopped before the answer was complete" in server.errors()


def test_a_second_signal_ends_at_once(engine):
    with Server(engine, "--threads", 1, "--grace", 1000) as server:
        caller = Caller(server, FOREVER)
        assert caller.begun.wait(20)
        server.process.send_signal(signal.SIGINT)
        until(lambda: "finishing " in server.errors())
        server.process.send_signal(signal.SIGINT)
        assert end(server.process) == 1
        caller.join(20)
        assert "error" in caller.events[-1]


def test_ranks_drain_on_sigusr1_of_mpirun(parallel):
    with Server(parallel, "--threads", 1, ranks=2) as server:
        caller = Caller(server, SOME | {"max_tokens": 400})
        assert caller.begun.wait(20)
        server.process.send_signal(signal.SIGUSR1)
        caller.join(20)
        assert caller.done and caller.tokens == 400
        assert end(server.process) == 0
        assert "finishing 1 requests" in server.errors()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_callers_hear_of_it(parallel, rank):
    with Server(parallel, "--threads", 1, ranks=2) as server:
        streaming = Caller(server, FOREVER)
        assert streaming.begun.wait(20)
        waiting = Caller(server, FOREVER, stream=False)
        until(lambda: server.running() > MANY)
        pids = ranks_of(server.process.pid)
        os.kill(pids[rank], signal.SIGKILL)
        assert end(server.process) != 0
        for caller in (streaming, waiting):
            caller.join(20)
            assert not caller.done
        if rank:  # rank 0 is the server itself
            assert "rank 1" in streaming.events[-1]["error"]["message"]
            assert waiting.status == 500 and "rank 1" in waiting.events[-1]["error"]["message"]
        until(lambda: not Path(f"/proc/{pids[1 - rank]}").exists())


def test_a_server_ends_with_the_process_it_serves(engine):
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with Server(engine, "--threads", 1, "--parent", parent.pid) as server:
        parent.communicate(b"\n")
        assert end(server.process) == 1
        assert f"process {parent.pid}, which this one served, is gone" in server.errors()


def test_a_unix_socket_serves_its_owner_alone_and_is_gone_afterwards(engine, tmp_path):
    path = tmp_path / "s"
    with Server(engine, "--threads", 1, "--no-http", "--socket", path) as server:
        assert path.stat().st_mode & 0o777 == 0o600 and server.url is None
        with pytest.raises(UserError, match="somebody serves on this socket"):
            bind(None, 0, path)
        server.process.send_signal(signal.SIGTERM)
        assert end(server.process) == 0 and not path.exists()


@pytest.mark.parametrize(
    ("host", "port", "path", "words"),
    [
        (None, 0, None, "nothing to listen on"),
        ("192.0.2.1", 0, None, "cannot listen on 192.0.2.1 port 0"),
        ("no such host", 0, None, "cannot listen on no such host"),
        ("n" * 300, 0, None, "cannot listen on nnn"),
        ("\udcff", 0, None, r"cannot listen on \\udcff port 0"),
        ("a..b", 0, None, "cannot listen on a..b"),
        (None, 0, Path("/nowhere/s"), "/nowhere/s"),
        (None, 0, Path("x" * 200), "more than 107 bytes"),
        (None, 0, Path("README.md"), "Address already in use"),
    ],
)
def test_an_address_that_cannot_be_had_is_refused(host, port, path, words):
    with pytest.raises(UserError, match=words):
        bind(host, port, path)


def test_a_socket_that_a_killed_server_left_behind_is_replaced(tmp_path):
    dead, *_ = bind(None, 0, tmp_path / "s")
    dead.close()
    alive, *_ = bind(None, 0, tmp_path / "s")
    with alive, pytest.raises(UserError, match="somebody serves on this socket"):
        bind(None, 0, tmp_path / "s")


def test_a_server_removes_its_own_socket_and_not_its_successors(tmp_path):
    own, *_ = bind(None, 0, tmp_path / "s")
    files = UnixFiles([own])
    own.close()
    successor, *_ = bind(None, 0, tmp_path / "s")
    files.remove()
    assert (tmp_path / "s").exists()
    UnixFiles([successor]).remove()
    assert not (tmp_path / "s").exists()
    successor.close()


def test_a_parent_must_be_there():
    with pytest.raises(UserError, match="there is no process 4194305"):
        find_parent(4194305)


def test_a_port_in_use_is_refused(engine):
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = run_alone(*CLI, "serve", engine, "--port", other.getsockname()[1])
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "cannot listen on 127.0.0.1 port" in done.stderr


def test_an_engine_of_two_ranks_is_not_served_by_one(parallel):
    done = run_alone(*CLI, "serve", parallel)
    assert done.returncode == 2 and "-n 2 dflash-trt" in done.stderr


def ranks_of(launcher: int) -> list[int]:
    """Pids of the ranks that `launcher` started, by rank."""
    found = {}
    for pid in descendants(launcher):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for entry in environment:
            name, _, value = entry.partition(b"=")
            if name == b"OMPI_COMM_WORLD_RANK":
                found[int(value)] = pid
    return [found[rank] for rank in sorted(found)]


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))
