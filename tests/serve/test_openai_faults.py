"""Callers that leave, do not read, ask too much or have no key, and what the others notice of them."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash_trt.runtime import Generator, Request
from tests.serve.live import Server, until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "one", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
KEYS = ("first-Key-0123456789", "second-Key-0123456789")


class Caller:
    """A connection that has asked something, and may or may not read the answer."""

    def __init__(self, server: Server, body: Any, *, path: str = COMPLETION, key: str = "", buffer: int = 0):
        address = urlsplit(server.url)
        self._socket = socket.socket()
        if buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.settimeout(30)
        self._socket.connect((address.hostname, address.port))
        content = json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: x",
            "Content-Type: application/json",
            f"Content-Length: {len(content)}",
        ]
        lines += [f"Authorization: Bearer {key}"] if key else []
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + content)

    def leave(self) -> None:
        self._socket.close()

    def response(self) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(self._socket)
        response.begin()
        return response

    def text(self) -> str:
        """Of a stream, read to its end."""
        events = [line[6:] for line in self.response().read().decode().splitlines() if line]
        assert events.pop() == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def say(generator: Generator, prompt: str, tokens: int) -> str:
    return "".join(out.text for out in generator.generate([Request(prompt, tokens, ignore_eos=True)]))


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_leaves_frees_the_slots_at_once(server, stream):
    before = server.metrics()
    callers = [Caller(server, LONG | {"stream": stream, "n": 3}) for _ in range(2)]  # the last two answers wait
    until(lambda: server.running() == 6)
    for caller in callers:
        caller.leave()
    until(lambda: server.running() == 0, 2)
    after = server.metrics()
    cancelled, new = 'dflash_requests_total{finish_reason="cancelled"}', "dflash_generated_tokens_total"
    assert after[cancelled] - before.get(cancelled, 0) == 6
    assert after[new] - before[new] < 6 * 2000 / 2
    assert server.post(COMPLETION, LONG | {"max_tokens": 2})[0] == 200
    assert "the client left" in server.errors() and "ERROR" not in server.errors()


def test_a_caller_who_leaves_before_the_body_is_complete_harms_nobody(server):
    address = urlsplit(server.url)
    for _ in range(5):
        with socket.create_connection((address.hostname, address.port)) as to:
            to.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            to.sendall(b'Content-Length: 100\r\n\r\n{"prompt"')
    assert server.post(COMPLETION, LONG | {"max_tokens": 2})[0] == 200
    assert "ERROR" not in server.errors()


def test_a_slow_reader_blocks_nobody_and_gets_all_in_the_end(server, generator):
    slow = [Caller(server, LONG | {"stream": True, "prompt": f"slow {n}"}, buffer=2048) for n in range(3)]
    until(lambda: server.running() == 3)
    status, quick = server.post(COMPLETION, LONG | {"max_tokens": 20})
    assert (status, quick["choices"][0]["text"]) == (200, say(generator, "one", 20))
    assert server.running() == 3, "the quick one has not waited for them"
    until(lambda: server.running() == 0, 20)  # their answers are complete, read or not
    for number, caller in enumerate(slow):
        assert caller.text() == say(generator, f"slow {number}", 2000)


def test_a_huge_prompt_holds_up_no_stream(server):
    """It is tokenized beside the event loop and the engine, and then refused."""
    stream = Caller(server, LONG | {"stream": True}).response()
    huge: list[int] = []
    caller = threading.Thread(target=lambda: huge.append(server.post(COMPLETION, {"prompt": "x " * 500_000})[0]))
    caller.start()
    times = [time.monotonic() for line in stream if line.startswith(b"data:")]
    caller.join(20)
    assert huge == [400] and max(b - a for a, b in itertools.pairwise(times)) < 0.3


def test_small_answers_are_sent_at_once(server):
    """Without TCP_NODELAY a body waits for the acknowledgement of its headers, 40 ms."""
    connection, times = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20), []
    for _ in range(60):
        began = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        times.append(time.monotonic() - began)
    assert statistics.median(times[30:]) < 0.02


def test_a_prompt_that_fails_in_the_template_fails_alone(server, generator):
    stream = Caller(server, LONG | {"stream": True, "max_tokens": 300})
    for word, status, code in [("refuse", 400, "invalid_value"), ("fail", 500, "internal_error")]:
        assert (reply := server.post(CHAT, {"messages": [{"role": "user", "content": word}]}))[0] == status
        assert reply[1]["error"]["code"] == code
    assert stream.text() == say(generator, "one", 300)
    assert "ZeroDivisionError in" in server.errors(), "the log says where"


def test_logs_hold_no_text_of_requests(server):
    prompt = "a very private prompt"
    server.post(COMPLETION, LONG | {"prompt": prompt, "max_tokens": 5})
    server.post(COMPLETION, LONG | {"prompt": prompt, "max_tokens": 5000})
    server.post(CHAT, {"messages": [{"role": "user", "content": prompt}], "max_tokens": 5})
    until(lambda: "length" in server.errors())
    assert "private" not in server.errors()


@pytest.fixture(scope="module")
def guarded(engine, tmp_path_factory) -> Iterator[Server]:
    """Two slots, and one may wait; keys, and narrow limits."""
    root = tmp_path_factory.mktemp("guarded")
    (root / "keys").write_text("# keys\n" + "\n".join(KEYS) + "\n")
    (root / "keys").chmod(0o600)
    limits = ["--max-concurrent-per-key", 2, "--max-n", 3, "--max-prompt-tokens", 50, "--max-body-bytes", 1000]
    options = ["--threads", 1, "--batch", 2, "--max-waiting", 1, "--model-name", "org/tiny", "--socket", root / "s"]
    with Server(engine, *options, *limits, "--api-keys", root / "keys", "--log-requests") as server:
        yield server


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "given", ["", "Bearer ", "Bearer wrong", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x", "\xff"]
)
def test_without_a_right_key_nothing_is_answered_but_health_and_metrics(guarded, given):
    headers = {"Authorization": given} if given else {}
    for method, path in [("POST", CHAT), ("POST", COMPLETION), ("GET", "/v1/models"), ("GET", "/v1/models/x")]:
        connection = http.client.HTTPConnection(urlsplit(guarded.url).netloc, timeout=20)
        connection.request(method, path, "not even JSON" if method == "POST" else None, headers)
        response = connection.getresponse()
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert json.load(response)["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/metrics", "/openapi.json"):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        assert response.status == 200 and response.read()


def test_each_key_opens_and_a_unix_socket_needs_none(guarded):
    for key in (*KEYS, f" {KEYS[0]}"):
        assert guarded.post(COMPLETION, LONG | {"max_tokens": 2}, **by(key))[0] == 200
    connection = http.client.HTTPConnection("unix")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(guarded.socket)
    connection.request("GET", "/v1/models")
    assert json.load(connection.getresponse())["data"][0]["id"] == "org/tiny"
    connection.request("GET", "/v1/models/org/tiny")
    assert json.load(connection.getresponse())["id"] == "org/tiny"


def test_limits_hold(guarded):
    for body, status, code in [
        ({"prompt": "x", "n": 4}, 400, "invalid_value"),
        ({"prompt": "x", "n": 3}, 400, "invalid_value"),  # a key may have two
        ({"prompt": "x" * 51}, 400, "context_length_exceeded"),
        ({"prompt": "x" * 1000}, 413, "body_too_large"),
        ({"prompt": "x", "model": "tiny"}, 404, "model_not_found"),
    ]:
        assert (reply := guarded.post(COMPLETION, body, **by(KEYS[0])))[0] == status
        assert reply[1]["error"]["code"] == code


def test_a_key_and_the_queue_have_room_for_so_many(guarded):
    body = LONG | {"max_tokens": 1900}
    with contextlib.closing(Caller(guarded, body | {"n": 2}, key=KEYS[0])._socket):
        until(lambda: guarded.running() == 2)
        for key, n, code in [(KEYS[0], 1, "rate_limit_exceeded"), (KEYS[1], 2, "queue_full")]:
            response = Caller(guarded, body | {"n": n}, key=key).response()
            error = json.load(response)["error"]
            assert (response.status, error["code"], error["type"]) == (429, code, "rate_limit_error")
            assert int(response.headers["Retry-After"]) >= 1
    until(lambda: guarded.running() == 0, 2)
    with contextlib.closing(Caller(guarded, body | {"stream": True, "n": 2}, key=KEYS[1])._socket):
        until(lambda: guarded.running() == 2)
        assert guarded.post(COMPLETION, body | {"n": 2}, **by(KEYS[0]))[1]["error"]["code"] == "queue_full"
        until(lambda: guarded.running() == 2, 2)  # there was a slot for one of both, and it is free again
    until(lambda: guarded.running() == 0, 2)
    assert guarded.post(COMPLETION, body | {"n": 2, "max_tokens": 3}, **by(KEYS[0]))[0] == 200, "its share is whole"


def test_logs_may_hold_text_but_never_keys(guarded):
    guarded.post(COMPLETION, LONG | {"prompt": "a public prompt", "max_tokens": 5}, **by(KEYS[1]))
    until(lambda: "a public prompt" in guarded.errors())
    assert "key 2" in guarded.errors()
    assert not any(key in guarded.errors() for key in KEYS)
