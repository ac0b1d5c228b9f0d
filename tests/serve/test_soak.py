"""Two thousand requests of every kind, good and bad, patient and not: nothing leaks and nobody gets another's text."""

from __future__ import annotations

import http.client
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dflash_trt.engine import convert, open_engine
from dflash_trt.runtime import Request
from dflash_trt.runtime.open import open_generator
from tests.serve.live import Server
from tests.tiny import make_pair

REQUESTS, SETTLED = 2000, 600
PROMPTS = [f"prompt {n}" for n in range(20)]
TOKENS = 12
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("soak")
    return convert(*make_pair(root, words=4), root / "engine", max_batch=8, max_seq_len=256).path


@pytest.fixture(scope="module")
def texts(engine) -> list[str]:
    generator = open_generator(open_engine(engine), threads=1)
    answers = dict.fromkeys(PROMPTS, "")
    for out in generator.generate([Request(prompt, TOKENS, id=prompt) for prompt in PROMPTS]):
        answers[out.request_id] += out.text
    return list(answers.values())


def test_slots_memory_and_texts_are_in_order_after_2000_mixed_requests(engine, texts):
    with Server(engine, "--threads", 1, "--max-waiting", 64) as server:
        rng = random.Random(6)
        jobs = [(rng.choice(KINDS), rng.randrange(len(PROMPTS)), rng.random()) for _ in range(REQUESTS)]

        def run(job: tuple[Any, int, float]) -> None:
            kind, number, chance = job
            kind(server, PROMPTS[number], texts[number], chance)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(run, jobs[:SETTLED]))
            settled = resident(server)
            list(pool.map(run, jobs[SETTLED:]))
        deadline = time.monotonic() + 10
        while (now := gauges(server))["requests_running"] + now["requests_waiting"]:
            assert time.monotonic() < deadline, now
        assert now["kv_slots_used"] == 0 and now["up"] == 1
        assert resident(server) < 1.05 * settled


def whole(server: Server, prompt: str, text: str, chance: float) -> None:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    assert answer(server, body)["choices"][0]["text"] == text


def streamed(server: Server, prompt: str, text: str, chance: float) -> None:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    with Connection(server) as to:
        to.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        events = [line[6:] for line in to.getresponse().read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == text


def stopped(server: Server, prompt: str, text: str, chance: float) -> None:
    stop = text[(at := int(chance * 9)) : at + 3]
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stop": [stop]}
    choice = answer(server, body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.find(stop)], "stop")


def sampled(server: Server, prompt: str, text: str, chance: float) -> None:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 1, "seed": 5, "n": 2}
    first, second = answer(server, body), answer(server, body)
    assert [c["text"] for c in first["choices"]] == [c["text"] for c in second["choices"]]


def chat(server: Server, prompt: str, text: str, chance: float) -> None:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": int(1 + chance * TOKENS)}
    assert answer(server, body, "/v1/chat/completions")["usage"]["completion_tokens"] <= 1 + chance * TOKENS


def leaving(server: Server, prompt: str, text: str, chance: float) -> None:
    """Goes while the answer is on its way."""
    body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": chance < 0.7}
    with Connection(server) as to:
        to.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        if chance < 0.5:
            to.getresponse().read(20)


def refused(server: Server, prompt: str, text: str, chance: float) -> None:
    bodies: list[bytes | dict[str, Any]] = [
        b"{", b"\xff", b"", {"prompt": ""}, {"prompt": prompt * 100}, {"prompt": prompt, "model": "another"},
        {"prompt": prompt, "temperature": -1}, {"prompt": [999_999]}, {"prompt": prompt, "logprobs": 3},
    ]  # fmt: skip
    body = bodies[int(chance * len(bodies))]
    with Connection(server) as to:
        to.request("POST", "/v1/completions", body if isinstance(body, bytes) else json.dumps(body), HEADERS)
        response = to.getresponse()
        error = json.loads(response.read())["error"]
    assert response.status in (400, 404, 413, 422) and error["message"] and error["code"]


KINDS = [whole, streamed, stopped, sampled, chat, leaving, refused]


class Connection:
    def __init__(self, server: Server):
        self._to = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)

    def __enter__(self) -> http.client.HTTPConnection:
        return self._to

    def __exit__(self, *_: object) -> None:
        self._to.close()


def answer(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    with Connection(server) as to:
        to.request("POST", path, json.dumps(body), HEADERS)
        response = to.getresponse()
        content = response.read().decode()
    assert response.status == 200, content
    return json.loads(content)


def gauges(server: Server) -> dict[str, float]:
    with Connection(server) as to:
        to.request("GET", "/metrics")
        text = to.getresponse().read().decode()
    return {name: float(value) for name, value in re.findall(r"^dflash_(\w+) ([\d.e+-]+)$", text, re.MULTILINE)}


def resident(server: Server) -> int:
    """Bytes of the server's memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
