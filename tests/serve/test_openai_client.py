"""The official client against a server: the texts are those of the generator alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from dflash_trt.runtime import Generator, Request, Sampling

LENGTH = 40
WHOLE = {"ignore_eos": True}  # a random model may end anywhere, on another machine elsewhere
PROMPTS = [f"prompt {number}: {'x' * (7 * number % 60)}" for number in range(32)]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def say(generator: Generator, prompt: Any, tokens: int = LENGTH, sampling: Sampling = Sampling(), **more: Any) -> str:
    return "".join(out.text for out in generator.generate([Request(prompt, tokens, sampling, **more)]))


def test_a_chat_gets_the_generators_text(client, generator):
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = say(generator, generator.tokenizer.encode_chat(plain), **WHOLE)
    for model in ("target", openai.omit):
        asked = {"messages": TALK, "temperature": 0, "max_completion_tokens": LENGTH, "extra_body": WHOLE}
        reply = client.chat.completions.create(**asked, model=model)
        (choice,) = reply.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
    first, *chunks = client.chat.completions.create(**asked, model="target", stream=True)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {first.id} and first.id != reply.id


def test_a_chat_without_a_limit_goes_on_to_the_end_of_its_slot(client, generator):
    reply = client.chat.completions.create(
        messages=[{"role": "user", "content": "x" * 1900}],
        model="target",
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert reply.usage.total_tokens == 2048


def test_completions_get_the_generators_texts(client, generator):
    asked = {"model": "target", "prompt": PROMPTS[:3], "temperature": 0, "max_tokens": LENGTH, "extra_body": WHOLE}
    expected = [say(generator, prompt, **WHOLE) for prompt in PROMPTS[:3]]
    reply = client.completions.create(**asked)
    assert [choice.text for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    ids = generator.tokenizer.encode(PROMPTS[0])
    for prompt in (ids, [ids]):
        reply = client.completions.create(**asked | {"prompt": prompt, "max_tokens": openai.omit})
        assert reply.choices[0].text == expected[0][: len(reply.choices[0].text)]
        assert reply.usage.completion_tokens == 16


def test_thirty_two_streams_at_once_get_their_own_texts(client, generator):
    def stream(number: int) -> str:
        asked = {"model": "target", "prompt": PROMPTS[number], "temperature": 0, "max_tokens": LENGTH + number}
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))

    requests = [Request(prompt, LENGTH + number, id=str(number)) for number, prompt in enumerate(PROMPTS)]
    expected = dict.fromkeys(map(str, range(32)), "")
    for out in generator.generate(requests):
        expected[out.request_id] += out.text
    assert len(set(expected.values())) > 16
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(stream, range(32))) == list(expected.values())


def test_a_seed_decides_and_n_counts_it_up(client, generator):
    asked = {"model": "target", "prompt": "one", "max_tokens": 24, "temperature": 1.5, "top_p": 0.9}
    reply = client.completions.create(**asked, n=3, seed=-1, extra_body={"top_k": 100})
    sampled = [Sampling(1.5, 0.9, 100, seed) for seed in (2**64 - 1, 0, 1)]
    assert [choice.text for choice in reply.choices] == [say(generator, "one", 24, sampling) for sampling in sampled]
    texts = {client.completions.create(**asked).choices[0].text for _ in range(4)}
    assert len(texts) > 1, "without a seed every answer is drawn anew"


def test_pieces_of_a_stream_never_end_inside_a_character(client, generator):
    """At this temperature the model utters any bytes, most of them no characters."""
    asked = {"model": "target", "prompt": "one", "max_tokens": 200, "temperature": 2, "seed": 4, "extra_body": WHOLE}
    whole = client.completions.create(**asked).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole and max(map(ord, whole)) > 127
    assert whole == say(generator, "one", 200, Sampling(2, 1, 0, 4), **WHOLE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client, generator, stream):
    text = say(generator, PROMPTS[1], 200, **WHOLE)
    stop = text[80:92]
    asked = {"model": "target", "prompt": PROMPTS[1], "temperature": 0, "max_tokens": 200, "stop": ["never", stop]}
    reply = client.completions.create(**asked, stream=stream, extra_body=WHOLE)
    chunks = list(reply) if stream else [reply]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    messages, pairs = [{"role": "user", "content": "x"}], ["aa", "ab", "ba", "bb"]
    chat = client.chat.completions.create(
        model="target", messages=messages, temperature=0, stop=pairs, max_tokens=200, extra_body=WHOLE
    )
    assert not any(pair in chat.choices[0].message.content for pair in pairs)
    assert chat.choices[0].finish_reason == "stop"


def test_a_stop_token_ends_the_answer_too(client, generator):
    reply = client.completions.create(
        model="target", prompt="one", temperature=0, max_tokens=200, extra_body={"stop_token_ids": [ord("a"), ord("b")]}
    )
    assert not set("ab") & set(reply.choices[0].text) and reply.choices[0].finish_reason == "stop"


def test_usage_counts_tokens_and_drafts(client, generator):
    (out,) = [out for out in generator.generate([Request(PROMPTS[3], 60, **WHOLE)]) if out.finished]
    asked = {"model": "target", "prompt": PROMPTS[3], "temperature": 0, "max_tokens": 60, "extra_body": WHOLE}
    whole = client.completions.create(**asked).usage
    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks) and last.choices == [] and last.usage == whole
    assert (whole.prompt_tokens, whole.completion_tokens) == (len(PROMPTS[3]), 60)
    details = whole.completion_tokens_details
    assert details.accepted_prediction_tokens == whole.accepted_draft_tokens == out.statistics.accepted > 0
    assert (
        details.rejected_prediction_tokens == sum(held for held, _ in out.statistics.drafts) - out.statistics.accepted
    )
    assert whole.acceptance_length == pytest.approx(out.statistics.tau)
    first = client.completions.create(**asked | {"max_tokens": 1}).usage
    assert first.acceptance_length is None and first.accepted_draft_tokens == 0


def test_token_ids_come_with_the_text_if_asked_for(client, generator):
    asked = {"model": "target", "prompt": "one", "max_tokens": 30, "temperature": 2, "seed": 1}
    more = {"extra_body": {"return_token_ids": True} | WHOLE}
    (whole,) = client.completions.create(**asked, **more).choices
    assert whole.prompt_token_ids == generator.tokenizer.encode("one")
    assert generator.tokenizer.decode(whole.token_ids) == whole.text and len(whole.token_ids) == 30
    first, *rest = [chunk.choices[0] for chunk in client.completions.create(**asked, **more, stream=True)]
    assert first.prompt_token_ids == whole.prompt_token_ids
    assert sum((choice.token_ids for choice in rest), first.token_ids) == whole.token_ids
    assert not any(hasattr(choice, "prompt_token_ids") for choice in rest)
    opening, *said = client.chat.completions.create(
        model="target",
        messages=TALK,
        max_tokens=5,
        stream=True,
        extra_body={"return_token_ids": True} | WHOLE,
    )
    assert opening.choices[0].prompt_token_ids and opening.choices[0].token_ids == []
    assert sum(len(chunk.choices[0].token_ids) for chunk in said) == 5


def test_what_has_no_effect_here_is_taken(client):
    reply = client.chat.completions.create(
        model="target",
        messages=[*TALK, {"role": "assistant", "content": "Hi", "refusal": None}, {"role": "user", "content": "So?"}],
        max_tokens=3,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        logprobs=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        tools=[],
        response_format={"type": "text"},
        parallel_tool_calls=True,
        safety_identifier="x",
        prompt_cache_key="x",
        seed=None,
    )
    again = [*TALK, reply.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    answer = client.chat.completions.create(model="target", messages=again, max_tokens=3, extra_body=WHOLE)
    assert answer.usage.completion_tokens == 3


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert client.models.retrieve("target") == model and model.max_model_len == 2048
    with pytest.raises(openai.NotFoundError, match="this server has target") as caught:
        client.models.retrieve("meta/other")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own_kinds(client):
    with pytest.raises(openai.BadRequestError, match="max_seq_len 2048") as caught:
        client.completions.create(model="target", prompt="x", max_tokens=5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
