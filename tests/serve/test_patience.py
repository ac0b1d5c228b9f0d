"""Callers who take their time, ask for too much or do not speak HTTP; and a server that is told to end meanwhile."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dflash_trt.errors import UserError
from dflash_trt.serve.address import bind
from tests.runtime.mpi import CLI, ROOT
from tests.serve.live import Server
from tests.waiting import until

LENGTH = 1900  # tokens of an answer; the engine's slots have 2,048
ANSWERS, NAME = 64, "x" * 100_000  # at least so many events with the model's name: more megabytes than sockets hold
BODY = {"prompt": "a", "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}


def connect(server: Server) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    connection.settimeout(30)
    return connection


def request(body: dict[str, object] | None = None) -> bytes:
    content = json.dumps(BODY if body is None else body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


def read(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture
def draining(engine):
    """A server told to end while a caller has read nothing of 64 finished answers. Grace: 4 seconds."""
    options = ["--threads", 1, "--grace", 4, "--max-n", ANSWERS, "--model-name", NAME]
    with Server(engine, *options) as server, connect(server) as caller:
        caller.sendall(request(BODY | {"n": ANSWERS, "stream": True, "max_tokens": 2}))
        until(lambda: server.metrics().get('dflash_requests_total{finish_reason="length"}') == ANSWERS, 60)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "finishing 1 requests" in server.errors())
        yield server, caller


def test_a_slow_reader_gets_all_of_what_was_accepted_before_the_end(draining):
    server, caller = draining
    assert b"data: [DONE]" in read(caller)
    assert server.process.wait(timeout=20) == 0


def test_an_answer_that_nobody_read_in_time_shows_in_the_exit_code(draining):
    server, _ = draining
    assert server.process.wait(timeout=20) == 1
    assert server.errors().endswith("the server was stopped before the answer was complete — server — ask again\n")
    assert "Traceback" not in server.errors()


def test_a_request_whose_body_does_not_come_holds_up_no_end(engine):
    with Server(engine, "--threads", 1, "--grace", 60) as server, connect(server) as caller:
        caller.sendall(request()[:-5])
        time.sleep(0.3)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0 and time.monotonic() - begin < 15
        status, _, body = read(caller).partition(b"\r\n")
        assert status == b"HTTP/1.1 503 Service Unavailable"
        assert json.loads(body.rpartition(b"\r\n")[2])["error"]["code"] in ("draining", "stopped")


@pytest.mark.parametrize("stream", [True, False])
def test_who_sends_the_next_request_too_early_and_leaves_frees_the_slot(server, stream):
    before = server.metrics().get('dflash_requests_total{finish_reason="cancelled"}', 0)
    with connect(server) as caller:
        caller.sendall(request(BODY | {"stream": stream}) + request())
        until(lambda: server.running() == 1)
    until(lambda: server.running() == 0)
    assert server.metrics()['dflash_requests_total{finish_reason="cancelled"}'] == before + 1


def test_a_connection_answers_one_request_at_a_time(server):
    with connect(server) as caller:
        caller.sendall(request(BODY | {"max_tokens": 3}) + request())
        answer = read(caller)  # to the end: the connection is closed
    assert answer.count(b"HTTP/1.1 200") == 1 and server.running() == 0


@pytest.mark.parametrize(
    "garbage", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"\x16\x03\x01\0"]
)
def test_what_is_not_http_is_refused_like_everything_else(server, garbage):
    with connect(server) as caller:
        caller.sendall(garbage)
        head, _, body = read(caller).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_http"


def test_what_can_never_fit_is_not_called_a_full_queue(engine):
    with Server(engine, "--threads", 1, "--batch", 1, "--max-waiting", 0) as server:
        status, reply = server.post("/v1/completions", BODY | {"max_tokens": 2, "n": 2})
        assert status == 400 and "1 answers at most" in reply["error"]["message"]
        assert server.post("/v1/completions", BODY | {"max_tokens": 2})[0] == 200
        assert not any("cancelled" in name for name in server.metrics())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_server_that_is_still_loading_ends_with_nothing_to_finish(engine, number):
    process = subprocess.Popen([*CLI, "serve", engine, "--port", "0"], cwd=ROOT, stderr=subprocess.PIPE)
    status = Path(f"/proc/{process.pid}/status")
    mask = 1 << (signal.SIGUSR1 - 1)
    until(lambda: int(status.read_text().partition("SigCgt:\t")[2].split()[0], 16) & mask)  # it has a handler
    process.send_signal(number)
    assert process.wait(timeout=20) == 0 and process.communicate()[1] == b""


def test_nobody_need_read_where_it_serves(engine):
    with bind("127.0.0.1", 0, None)[0] as free:
        port = free.getsockname()[1]
    command = " ".join([*map(str, CLI[:-1]), f"'{CLI[-1]}'", f"serve {engine} --port {port} --threads 1 >&-"])
    process = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=ROOT, stderr=subprocess.PIPE)
    until(lambda: _answers(port))
    process.terminate()
    assert process.wait(timeout=20) == 0 and process.communicate()[1] == b""


def _answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_a_folder_is_no_socket(tmp_path):
    with pytest.raises(UserError, match="this is a folder"):
        bind(None, 0, tmp_path)
