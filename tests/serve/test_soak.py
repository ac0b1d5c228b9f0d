"""Two thousand requests of every kind, good and bad, patient and not: nothing leaks and nobody gets another's text."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.engine import convert, open_engine
from dflash_trt.runtime import Request
from dflash_trt.runtime.open import open_generator
from tests.serve.caller import CHAT, COMPLETION, text_of
from tests.serve.live import Server
from tests.tiny import make_pair
from tests.waiting import until

REQUESTS, SETTLED = 2000, 600
PROMPTS = [f"prompt {n}" for n in range(20)]
TOKENS = 8
GREEDY = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("soak")
    return convert(*make_pair(root, words=4), root / "engine", max_batch=8, max_seq_len=256).path


@pytest.fixture(scope="module")
def texts(engine) -> list[str]:
    generator = open_generator(open_engine(engine), threads=1)
    answers = dict.fromkeys(PROMPTS, "")
    for out in generator.generate([Request(prompt, TOKENS, id=prompt, ignore_eos=True) for prompt in PROMPTS]):
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
        until(lambda: server.running() == 0)
        now = server.metrics()
        assert now["dflash_kv_slots_used"] == 0 and now["dflash_up"] == 1
        assert resident(server) < 1.05 * settled


def whole(server: Server, prompt: str, text: str, chance: float) -> None:
    body = GREEDY | {"prompt": prompt}
    assert answer(server, body)["choices"][0]["text"] == text


def streamed(server: Server, prompt: str, text: str, chance: float) -> None:
    body = GREEDY | {"prompt": prompt, "stream": True}
    with server.ask(COMPLETION, body) as asked:
        assert text_of(asked.events()) == text


def stopped(server: Server, prompt: str, text: str, chance: float) -> None:
    stop = text[(at := int(chance * (len(text) - 2))) : at + 3]
    body = GREEDY | {"prompt": prompt, "stop": [stop]}
    choice = answer(server, body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.find(stop)], "stop")


def sampled(server: Server, prompt: str, text: str, chance: float) -> None:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 1, "seed": 5, "n": 2}
    first, second = answer(server, body), answer(server, body)
    assert [c["text"] for c in first["choices"]] == [c["text"] for c in second["choices"]]


def chat(server: Server, prompt: str, text: str, chance: float) -> None:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": int(1 + chance * TOKENS)}
    assert answer(server, body, CHAT)["usage"]["completion_tokens"] <= 1 + chance * TOKENS


def leaving(server: Server, prompt: str, text: str, chance: float) -> None:
    """Goes while the answer is on its way."""
    body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": chance < 0.7}
    with server.ask(COMPLETION, body) as asked:
        if chance < 0.5:
            asked.getresponse().read(20)


def refused(server: Server, prompt: str, text: str, chance: float) -> None:
    bodies: list[bytes | dict[str, Any]] = [
        b"{", b"\xff", b"", {"prompt": ""}, {"prompt": prompt * 100}, {"prompt": prompt, "model": "another"},
        {"prompt": prompt, "temperature": -1}, {"prompt": [999_999]}, {"prompt": prompt, "logprobs": 3},
    ]  # fmt: skip
    body = bodies[int(chance * len(bodies))]
    status, reply = server.post(COMPLETION, body)
    assert status in (400, 404, 413, 422) and reply["error"]["message"] and reply["error"]["code"]


KINDS = [whole, streamed, stopped, sampled, chat, leaving, refused]


def answer(server: Server, body: dict[str, Any], path: str = COMPLETION) -> dict[str, Any]:
    status, reply = server.post(path, body)
    assert status == 200, reply
    return reply


def resident(server: Server) -> int:
    """Bytes of the server's memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
