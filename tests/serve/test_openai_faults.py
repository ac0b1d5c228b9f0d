"""Callers that leave, do not read, ask too much or have no key, and what the others notice of them."""

from __future__ import annotations

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
from tests.serve.caller import CHAT, COMPLETION, Connection, text_of
from tests.serve.live import Server
from tests.waiting import until

LONG = {"prompt": "one", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
KEYS = ("first-Key-0123456789", "second-Key-0123456789")
CANCELLED = 'dflash_requests_total{finish_reason="cancelled"}'


SLOW = 4  # answers, of which each has a slot


def answer(server: Server, body: dict[str, Any]) -> str:
    status, reply = server.post(COMPLETION, body)
    assert status == 200, reply
    return reply["choices"][0]["text"]


def say(generator: Generator, prompt: str, tokens: int) -> str:
    return "".join(out.text for out in generator.generate([Request(prompt, tokens, ignore_eos=True)]))


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_leaves_frees_the_slots_at_once(server, stream):
    before, said = server.metrics(), len(server.errors())
    callers = [server.ask(COMPLETION, LONG | {"stream": stream, "n": 8}) for _ in range(2)]  # most answers wait
    until(lambda: server.running() == 16)
    for caller in callers:
        caller.close()
    until(lambda: server.running() == 0)
    after, new = server.metrics(), "dflash_generated_tokens_total"
    assert after[CANCELLED] - before.get(CANCELLED, 0) == 16
    assert after[new] - before[new] < 16 * 2000 / 2
    assert server.post(COMPLETION, LONG | {"max_tokens": 2})[0] == 200
    assert "the client left" in server.errors()[said:] and "ERROR" not in server.errors()[said:]


def test_a_caller_who_leaves_before_the_body_is_complete_harms_nobody(server):
    address, said = urlsplit(server.url), len(server.errors())
    for _ in range(5):
        with socket.create_connection((address.hostname, address.port)) as to:
            to.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            to.sendall(b'Content-Length: 100\r\n\r\n{"prompt"')
    assert server.post(COMPLETION, LONG | {"max_tokens": 2})[0] == 200
    assert "ERROR" not in server.errors()[said:]


def test_a_slow_reader_blocks_nobody_and_gets_all_in_the_end(server, generator):
    body = LONG | {"stream": True, "return_token_ids": True, "prompt": [f"slow {n}" for n in range(SLOW)]}
    quick = LONG | {"max_tokens": 20}, say(generator, "one", 20)
    with server.ask(COMPLETION, body, narrow=True) as slow:
        until(lambda: server.running() == SLOW)
        assert answer(server, quick[0]) == quick[1]
        assert server.running(), "the quick one has not waited for the slow ones"
        until(lambda: server.running() == 0)  # their answers are complete, read or not
        assert answer(server, quick[0]) == quick[1]
        *chunks, _ = slow.events()
    texts, pieces = [""] * SLOW, []
    for (choice,) in (chunk["choices"] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
        pieces.append(len(choice["token_ids"]))
    assert texts == [say(generator, f"slow {n}", 2000) for n in range(SLOW)]
    assert max(pieces) > 1000, "half of an answer piled up: the server could not send, and did other things"


def test_a_huge_prompt_holds_up_no_stream(server):
    """It is tokenized beside the event loop and the engine, and then refused: the stream goes on all the while."""
    during: list[float] = []  # when it came and when it had been refused

    def ask() -> None:
        during.append(time.monotonic())
        assert server.post(COMPLETION, {"prompt": "x " * 500_000})[0] == 400
        during.append(time.monotonic())

    with server.ask(COMPLETION, LONG | {"stream": True, "n": 8}) as stream:
        pieces = stream.events()
        times = [time.monotonic() for _, _ in zip(range(10), pieces, strict=False)]
        caller = threading.Thread(target=ask)
        caller.start()
        times += [time.monotonic() for _ in pieces]
        caller.join(20)
    came, refused = during
    assert refused < times[-1], "the stream was not long enough to tell"
    held = max(min(b, refused) - max(a, came) for a, b in itertools.pairwise(times))
    assert held < (refused - came) / 2


def test_small_answers_are_sent_at_once(guarded):
    """Without TCP_NODELAY a body waits 40 ms for the acknowledgement of its headers; a Unix socket has no such wait."""
    more: list[float] = []  # seconds
    with guarded.connect() as tcp, Connection(guarded.socket) as unix:
        for _ in range(60):
            began = time.monotonic()
            unix.get("/health").read()
            between = time.monotonic()
            tcp.get("/health").read()
            more.append((time.monotonic() - between) - (between - began))
    assert statistics.median(more[30:]) < 0.02


def test_a_prompt_that_fails_in_the_template_fails_alone(server, generator):
    with server.ask(COMPLETION, LONG | {"stream": True, "max_tokens": 300}) as stream:
        for word, status, code in [("refuse", 400, "invalid_value"), ("fail", 500, "internal_error")]:
            assert (reply := server.post(CHAT, {"messages": [{"role": "user", "content": word}]}))[0] == status
            assert reply[1]["error"]["code"] == code
        assert text_of(stream.events()) == say(generator, "one", 300)
    assert "ZeroDivisionError in" in server.errors(), "the log says where"


def test_logs_hold_no_text_of_requests(server):
    prompt, said = "a very private prompt", len(server.errors())
    server.post(COMPLETION, LONG | {"prompt": prompt, "max_tokens": 5})
    server.post(COMPLETION, LONG | {"prompt": prompt, "max_tokens": 5000})
    server.post(CHAT, {"messages": [{"role": "user", "content": prompt}], "max_tokens": 5, "ignore_eos": True})
    until(lambda: server.errors()[said:].count("length") >= 2)
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
    with guarded.connect() as connection:
        for method, path in [("POST", CHAT), ("POST", COMPLETION), ("GET", "/v1/models"), ("GET", "/v1/models/x")]:
            connection.request(method, path, "not even JSON" if method == "POST" else None, headers)
            response = connection.getresponse()
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert json.load(response)["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/metrics", "/openapi.json"):
            response = connection.get(path, **headers)
            assert response.status == 200 and response.read()


def test_each_key_opens_and_a_unix_socket_needs_none(guarded):
    for key in (*KEYS, f" {KEYS[0]}"):
        assert guarded.post(COMPLETION, LONG | {"max_tokens": 2}, **by(key))[0] == 200
    with Connection(guarded.socket) as connection:
        assert json.load(connection.get("/v1/models"))["data"][0]["id"] == "org/tiny"
        assert json.load(connection.get("/v1/models/org/tiny"))["id"] == "org/tiny"


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
    with guarded.ask(COMPLETION, body | {"n": 2}, **by(KEYS[0])):
        until(lambda: guarded.running() == 2)
        for key, n, code in [(KEYS[0], 1, "rate_limit_exceeded"), (KEYS[1], 2, "queue_full")]:
            with guarded.ask(COMPLETION, body | {"n": n}, **by(key)) as asked:
                response = asked.getresponse()
                error = json.load(response)["error"]
            assert (response.status, error["code"], error["type"]) == (429, code, "rate_limit_error")
            assert int(response.headers["Retry-After"]) >= 1
    until(lambda: guarded.running() == 0)
    before = guarded.metrics()[CANCELLED]
    with guarded.ask(COMPLETION, body | {"stream": True, "n": 2}, **by(KEYS[1])):
        until(lambda: guarded.running() == 2)
        assert guarded.post(COMPLETION, body | {"n": 2}, **by(KEYS[0]))[1]["error"]["code"] == "queue_full"
        # there was a place for one of both, and it is free again
        until(lambda: guarded.metrics()[CANCELLED] == before + 1)
    until(lambda: guarded.running() == 0)
    assert guarded.post(COMPLETION, body | {"n": 2, "max_tokens": 3}, **by(KEYS[0]))[0] == 200, "its share is whole"


def test_logs_may_hold_text_but_never_keys(guarded):
    guarded.post(COMPLETION, LONG | {"prompt": "a public prompt", "max_tokens": 5}, **by(KEYS[1]))
    until(lambda: "a public prompt" in guarded.errors())
    assert "key 2" in guarded.errors()
    assert not any(key in guarded.errors() for key in KEYS)
