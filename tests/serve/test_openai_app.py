"""The application by itself: engines that fail or are not there, tokenizers that fail or take their time, harmony."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from dflash_trt.engine import open_engine
from dflash_trt.errors import Failure, UserError
from dflash_trt.runtime import Generator, Limits, Request, Sampling, Tokenizer
from dflash_trt.runtime.open import open_session
from dflash_trt.serve.harmony import Splitter
from dflash_trt.serve.loop import EngineLoop
from dflash_trt.serve.openai.answers import Answers
from dflash_trt.serve.openai.app import make_app
from dflash_trt.serve.openai.front import Settings
from tests.runtime.toy import ToySession, continuation
from tests.serve.caller import CHAT, COMPLETION, DONE, events
from tests.waiting import until

SAID = 100  # tokens of a message, of which every other is a marker or two
IDS = {"prompt": [1, 2, 3], "max_tokens": 40, "temperature": 0, "return_token_ids": True}


class Session(ToySession):
    """Fails once, after so many calls."""

    good_for = 10**9

    def step(self, inputs):
        self.good_for -= 1
        if self.good_for == 0:
            raise Failure("the device is on fire — GPU 0 — leave")
        return super().step(inputs)


class Server:
    """An engine of the toy language and its application."""

    def __init__(self, tokenizer: Tokenizer | None = None, *, settings: Settings = Settings("toy"), start: bool = True):
        self.session = Session(Limits(2, 200, 4, 16))
        self.loop = EngineLoop(Generator(self.session, tokenizer, vocab=256))
        self.client = TestClient(make_app(self.loop, tokenizer, settings, None))
        if start:
            self.loop.start()
            until(lambda: self.loop.state == "ready")

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        response = self.client.post(path, json=body)
        return response.status_code, response.json()

    def events(self, path: str, body: Any) -> list[Any]:
        return list(events(self.client.post(path, json=body | {"stream": True}).content.splitlines()))


@pytest.fixture
def toy() -> Iterator[Server]:
    server = Server()
    yield server
    server.loop.close()


@pytest.fixture(scope="module")
def tokenizer(pair) -> Tokenizer:
    return Tokenizer(pair[0])


def test_an_engine_without_a_tokenizer_takes_and_gives_token_ids(toy):
    status, reply = toy.post(COMPLETION, IDS)
    assert (status, reply["choices"][0]["token_ids"]) == (200, continuation([1, 2, 3], 40))
    streamed = [event["choices"][0]["token_ids"] for event in toy.events(COMPLETION, IDS)[:-1]]
    assert [token for ids in streamed for token in ids] == continuation([1, 2, 3], 40)
    for path, body, param in [
        (COMPLETION, IDS | {"prompt": "x"}, "prompt"),
        (COMPLETION, IDS | {"stop": "x"}, "stop"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ]:
        status, reply = toy.post(path, body)
        assert (status, reply["error"]["param"]) == (400, param)


def test_a_stream_that_the_engine_cuts_ends_with_an_error_and_not_with_done(toy):
    toy.session.good_for = 5
    *begun, last = toy.events(COMPLETION, IDS)
    said = [token for event in begun for token in event["choices"][0]["token_ids"]]
    assert said and said == continuation([1, 2, 3], len(said))
    assert last["error"]["code"] == "engine_failed" and "on fire" in last["error"]["message"]
    assert toy.post(COMPLETION, IDS)[0] == 200, "one failed call is not the end"
    toy.session.good_for = 5
    status, reply = toy.post(COMPLETION, IDS)
    assert (status, reply["error"]["code"], reply["error"]["type"]) == (500, "engine_failed", "server_error")


def test_before_and_after_its_time_a_server_says_when_to_come_back():
    server = Server(start=False)
    for state, status, code in [
        ("starting", 503, "starting"),
        ("draining", 503, "draining"),
        ("broken", 500, "engine_broken"),
    ]:
        if state == "draining":
            server.loop.drain()
        if state == "broken":
            server.loop.fail(Failure("the device is on fire"))
        for response in (server.client.get("/health"), server.client.post(COMPLETION, json=IDS)):
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
            assert status == 500 or int(response.headers["Retry-After"]) > 0
    assert "on fire" in server.client.get("/health").json()["error"]["message"]


def test_a_limit_for_keys_needs_keys():
    with pytest.raises(UserError, match="--max-concurrent-per-key — give --api-keys"):
        Server(settings=Settings("toy", max_concurrent_per_key=1), start=False)


def test_what_piled_up_for_a_slow_reader_comes_as_one_piece(toy):
    async def read() -> list[list[Any]]:
        answers = Answers(toy.loop, [Request([1, 2, 3], 100), Request([4], 50)])
        answers.start(0.0)
        until(lambda: toy.loop.idle)  # without a turn for the event loop: nobody reads
        return [pieces async for pieces in answers.pieces()]

    (pieces,) = asyncio.run(read())
    assert [(piece.token_ids, piece.finish_reason) for piece in pieces] == [
        (continuation([1, 2, 3], 100), "length"),
        (continuation([4], 50), "length"),
    ]


class Difficult(Tokenizer):
    """Waits at one prompt and fails at another."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def encode(self, text: str, **options: Any) -> list[int]:
        if text == "slow":
            self.reached.set()
            assert self.go_on.wait(20)
        if text == "fail":
            raise RuntimeError(f"cannot encode {text} 🤯")
        return super().encode(text, **options)


def test_others_are_served_while_a_prompt_is_tokenized(pair):
    tokenizer = Difficult(pair[0])
    server = Server(tokenizer)
    with server.client:  # one event loop for all requests
        slow: list[Any] = []
        caller = threading.Thread(target=lambda: slow.append(server.post(COMPLETION, IDS | {"prompt": "slow"})))
        caller.start()
        assert tokenizer.reached.wait(20)
        assert server.post(COMPLETION, IDS | {"prompt": "quick"})[0] == 200 and not slow
        tokenizer.go_on.set()
        caller.join(20)
    assert slow[0][0] == 200
    server.loop.close()


def test_a_tokenizer_that_fails_fails_one_request_and_shows_no_text(pair, caplog):
    server = Server(Difficult(pair[0]))
    with caplog.at_level("INFO", "dflash_trt.serve"):
        status, reply = server.post(COMPLETION, IDS | {"prompt": ["x", "fail"]})
        assert (status, reply["error"]["code"]) == (500, "internal_error")
        assert server.post(COMPLETION, IDS | {"prompt": "x"})[0] == 200
    assert "RuntimeError in" in caplog.text and "cannot encode" not in caplog.text
    server.loop.close()


@pytest.fixture(scope="module")
def speaker(engine, pair, tmp_path_factory) -> Iterator[tuple[TestClient, Generator]]:
    """The tiny model with other words for bytes that are not ASCII: the markers of gpt-oss's messages."""
    directory = tmp_path_factory.mktemp("harmony")
    tokenizer = json.loads((pair[0] / "tokenizer.json").read_text())
    markers = ("<|channel|>analysis<|message|>t", "<|end|><|start|>assistant<|channel|>final<|message|>a")
    vocabulary, flags = (
        tokenizer["model"]["vocab"],
        dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    )
    for letter, number in list(vocabulary.items()):
        if number >= 128:
            word = "<|channel|>" if number == 255 else f"{markers[number % 2]}{number} "
            vocabulary[word] = vocabulary.pop(letter)
            tokenizer["added_tokens"].append({"id": number, "content": word, "special": True} | flags)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}{{ reasoning_effort }}")
    speaking = Tokenizer(directory)
    assert speaking.harmony
    loop = EngineLoop(Generator(open_session(open_engine(engine), threads=1), speaking))
    loop.start()
    until(lambda: loop.state == "ready")
    with TestClient(make_app(loop, speaking, Settings("toy"), None)) as client:
        yield client, Generator(open_session(open_engine(engine), threads=1), speaking)
    loop.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_model_that_speaks_harmony_has_its_thoughts_told_apart(speaker, seed):
    client, generator = speaker
    prompt = generator.tokenizer.encode_chat([{"content": "xyz"}], reasoning_effort="low")
    sampling = Sampling(1.8, seed=seed)
    raw = "".join(out.text for out in generator.generate([Request(prompt, SAID, sampling, ignore_eos=True)]))
    said = Splitter().push(raw, last=True)
    assert said.reasoning and said.content
    body = {"messages": [{"role": "user", "content": "xyz"}], "reasoning_effort": "low"}
    how = {"max_tokens": SAID, "temperature": 1.8, "seed": seed, "ignore_eos": True}
    body |= how
    message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == said.reasoning
    assert message["content"] == said.content
    *chunks, last = events(client.post(CHAT, json=body | {"stream": True}).content.splitlines())
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert last == DONE
    for name, text in [("content", said.content), ("reasoning", said.reasoning), ("reasoning_content", said.reasoning)]:
        assert "".join(delta.get(name, "") for delta in deltas) == text
    assert client.post(COMPLETION, json=how | {"prompt": prompt}).json()["choices"][0]["text"] == raw, (
        "a completion is left as it is"
    )


def test_variables_that_a_template_cannot_use_are_the_callers_fault(tmp_path, pair):
    (tmp_path / "tokenizer.json").write_text((pair[0] / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content * times }}{{ messages[0].content }}")
    server = Server(Tokenizer(tmp_path))
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for times, status in [(3, 200), ("y", 400)]:
        status_, reply = server.post(CHAT, body | {"chat_template_kwargs": {"times": times}})
        assert status_ == status
    assert reply["error"]["param"] == "chat_template_kwargs"
    assert server.post(CHAT, body | {"chat_template_kwargs": {"times": 3}})[1]["usage"]["prompt_tokens"] == 4
    server.loop.close()
