"""What a server does not do, it says: a status, a code, the parameter and a sentence, and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chat

from dflash_trt.serve.openai.schema import ChatRequest, CompletionRequest
from tests.serve.caller import CHAT, COMPLETION
from tests.serve.live import Server
from tests.waiting import until

USER = {"role": "user", "content": "x"}


def refusal(server: Server, path: str, body: Any, **headers: str) -> tuple[int, str, str | None]:
    """Status, code and parameter of the error that a request gets."""
    status, reply = server.post(path, body, **headers)
    assert list(reply) == ["error"], reply
    error = reply["error"]
    assert list(error) == ["message", "type", "param", "code"]
    what, where, fix = error["message"].split(" — ")
    assert what and where and fix and len(error["message"]) < 400
    assert error["type"] == {4: "invalid_request_error", 5: "server_error"}[status // 100]
    return status, error["code"], error["param"]


@pytest.mark.parametrize(
    ("params", "model"),
    [(of_chat.CompletionCreateParamsBase, ChatRequest), (of_completions.CompletionCreateParamsBase, CompletionRequest)],
)
def test_every_field_of_the_official_client_is_known(params, model):
    assert set(params.__annotations__) <= set(model.model_fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("top_logprobs", 3),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("frequency_penalty", False),
        ("logit_bias", {"50": -100}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("verbosity", "high"),
        ("web_search_options", {}),
        ("moderation", {}),
    ],
)
def test_what_would_change_a_chat_and_is_not_done_is_refused(server, field, value):
    assert refusal(server, CHAT, {"messages": [USER], field: value}) == (400, "unsupported_parameter", field)


@pytest.mark.parametrize(("field", "value"), [("logprobs", 0), ("best_of", 2), ("echo", True), ("suffix", "end")])
def test_what_would_change_a_completion_and_is_not_done_is_refused(server, field, value):
    assert refusal(server, COMPLETION, {"prompt": "x", field: value}) == (400, "unsupported_parameter", field)


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ({"role": "tool", "content": "x"}, "unsupported_parameter", ".role"),
        ({"role": "nobody", "content": "x"}, "invalid_value", ".role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "unsupported_parameter", ".content"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "unsupported_parameter", ".content"),
        ({"role": "user", "content": [{"type": "text"}]}, "invalid_value", ".content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "invalid_value", ".content"),
        ({"role": "user", "content": ["x"]}, "invalid_value", ".content"),
        ({"role": "user", "content": 1}, "invalid_type", ".content"),
        ({"role": "user", "content": None}, "invalid_value", ".content"),
        ({"role": "user"}, "invalid_value", ".content"),
        ({"role": "assistant", "tool_calls": [{}]}, "unsupported_parameter", ".tool_calls"),
        ({"content": "x"}, "missing_required_parameter", ".role"),
        ({"role": "user", "content": "x", "contents": "x"}, "unknown_parameter", ".contents"),
        ("x", "invalid_type", ""),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_its_place(server, message, code, param):
    assert refusal(server, CHAT, {"messages": [USER, message]}) == (400, code, f"messages[1]{param}")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": None}, "invalid_value", "prompt"),
        ({"prompt": 1}, "invalid_value", "prompt"),
        ({"prompt": ["x", 1]}, "invalid_value", "prompt"),
        ({"prompt": [1.0]}, "invalid_value", "prompt"),
        ({"prompt": [True]}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": [10**30]}, "invalid_value", "prompt"),
        ({"prompt": [256]}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": [[]]}, "invalid_value", "prompt"),
        ({"prompt": ["x", ""]}, "invalid_value", "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "invalid_value", "prompt"),
        ({"prompt": "x" * 10_000}, "context_length_exceeded", "prompt"),
        ({"prompt": [97] * 10_000}, "context_length_exceeded", "prompt"),
        ({"prompt": "x", "max_tokens": 2048}, "context_length_exceeded", "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "invalid_type", "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**30}, "invalid_value", "max_tokens"),
        ({"prompt": "x", "temperature": -0.1}, "invalid_value", "temperature"),
        ({"prompt": "x", "temperature": 2.1}, "invalid_value", "temperature"),
        ({"prompt": "x", "temperature": True}, "invalid_type", "temperature"),
        ({"prompt": "x", "temperature": 10**400}, "invalid_type", "temperature"),
        ({"prompt": "x", "top_p": 1.1}, "invalid_value", "top_p"),
        ({"prompt": "x", "top_k": 2000}, "invalid_value", "top_k"),
        ({"prompt": "x", "seed": 2**64}, "invalid_value", "seed"),
        ({"prompt": "x", "n": 9}, "invalid_value", "n"),
        ({"prompt": "x", "n": 0}, "invalid_value", "n"),
        ({"prompt": "x", "stop": ""}, "invalid_value", "stop"),
        ({"prompt": "x", "stop": ["a", ""]}, "invalid_value", "stop"),
        ({"prompt": "x", "stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"prompt": "x", "stop": 5}, "invalid_value", "stop"),
        ({"prompt": "x", "stream": "yes"}, "invalid_type", "stream"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"prompt": "x", "stream": True, "stream_options": {"usage": 1}}, "unknown_parameter", "stream_options.usage"),
        ({"prompt": "x", "stop_token_ids": [1, "2"]}, "invalid_type", "stop_token_ids[1]"),
        ({"prompt": "x", "temprature": 0}, "unknown_parameter", "temprature"),
        ({"prompt": "x", "\u2028": 0}, "unknown_parameter", "\u2028"),
        ({"prompt": "x"} | {f"field{number}": 0 for number in range(50_000)}, "unknown_parameter", "field0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_completion_that_makes_no_sense_is_refused(server, body, code, param):
    assert refusal(server, COMPLETION, body) == (400, code, param)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": {}}, "invalid_type", "messages"),
        ({"messages": ["x"] * 50_000}, "invalid_type", "messages[0]"),
        ({"messages": [USER | {"content": "x" * 10_000}]}, "context_length_exceeded", "messages"),
        ({"messages": [USER], "max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_tokens"),
        ({"messages": [USER], "reasoning_effort": "extreme"}, "invalid_value", "reasoning_effort"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": 1}}, "invalid_value", "chat_template_kwargs"),
        ({"messages": [USER], "chat_template_kwargs": {"bos_token": "x"}}, "invalid_value", "chat_template_kwargs"),
        ({"messages": [USER], "chat_template_kwargs": {"x": [[]]}}, "invalid_value", "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_chat_that_makes_no_sense_is_refused(server, body, code, param):
    assert refusal(server, CHAT, body) == (400, code, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "x"} {}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        rb'{"prompt": "\ud800"}',
        rb'{"prompt": "\udc00\ud800 x"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'["prompt"]',
        b"null",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_body_that_is_no_json_object_is_refused(server, body):
    for path in (CHAT, COMPLETION):
        assert refusal(server, path, body) == (400, "invalid_json", None)


def test_a_number_too_large_for_a_float_is_refused(server):
    body = b'{"prompt": "x", "temperature": 1e999}'
    assert refusal(server, COMPLETION, body) == (400, "invalid_value", "temperature")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "?"])
def test_a_body_of_another_type_is_refused(server, kind):
    headers = {"Content-Type": kind}
    assert refusal(server, COMPLETION, b'{"prompt": "x"}', **headers) == (400, "unsupported_content_type", None)


def test_a_type_may_have_parameters(server):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.post(COMPLETION, {"prompt": "x", "max_tokens": 1}, **headers)[0] == 200


def forever() -> Iterator[bytes]:
    yield b'{"prompt": "'
    while True:
        yield b"x" * 10_000


def test_a_huge_body_is_refused_before_it_is_read(server):
    with server.connect() as connection:
        connection.putrequest("POST", COMPLETION)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(10**12))
        connection.endheaders(b"{")
        response = connection.getresponse()
        assert response.status == 413 and json.load(response)["error"]["code"] == "body_too_large"


def test_a_body_without_a_length_is_refused_once_it_has_grown_too_large(server):
    with server.connect() as connection:
        connection.request(
            "POST",
            COMPLETION,
            (chunk for chunk, _ in zip(forever(), range(200), strict=False)),
            headers={"Content-Type": "application/json", "Transfer-Encoding": "chunked"},
            encode_chunked=True,
        )
        response = connection.getresponse()
        assert response.status == 413 and json.load(response)["error"]["code"] == "body_too_large"
        assert connection.get("/health").status == 200, "the connection is still good"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/redoc", 404, "not_found"),
        ("GET", COMPLETION, 405, "method_not_allowed"),
        ("DELETE", "/v1/models/target", 405, "method_not_allowed"),
        ("TRACE", "/health", 405, "method_not_allowed"),
    ],
)
def test_addresses_and_methods_that_do_not_exist_are_refused_alike(server, method, path, status, code):
    with server.connect() as connection:
        connection.request(method, path)
        response = connection.getresponse()
        error = json.load(response)["error"]
    assert (response.status, error["code"]) == (status, code) and error["message"].count(" — ") == 2
    assert status == 404 or response.headers["Allow"] in ("POST", "GET")


def test_refusals_are_counted_by_code(server):
    name = 'dflash_refused_total{reason="context_length_exceeded"}'
    before = server.metrics().get(name, 0)
    refusal(server, COMPLETION, {"prompt": "x" * 5000})
    assert server.metrics()[name] == before + 1
    until(lambda: not server.running())
