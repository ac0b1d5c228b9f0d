"""What a request may ask for."""

from __future__ import annotations

import pytest

from dflash_trt.errors import UserError
from dflash_trt.runtime import Generator, Limits, Request, Sampling
from tests.runtime.toy import VOCAB, ToySession


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": (-0.1, float("nan"), float("inf")),
        "top_p": (0.0, -1.0, 1.01, float("nan")),
        "top_k": (-1, 1025),
        "seed": (-1, 2**64),
    }.items(),
)
def test_sampling_outside_its_range_is_refused(name, values):
    for value in values:
        with pytest.raises(UserError, match=f"{name} is {value}"):
            Sampling(**{name: value})


def test_the_ends_of_every_range_are_allowed():
    Sampling(temperature=0.0, top_p=1.0, top_k=1024, seed=2**64 - 1)
    Sampling(temperature=5.0, top_p=1e-6, top_k=1)


def refusal(request: Request) -> str:
    generator = Generator(ToySession(Limits(2, 32, 4, 8)), vocab=VOCAB)
    with pytest.raises(UserError) as error:
        generator.add(request)
    assert not generator.busy
    return str(error.value)


def test_a_prompt_that_the_engine_cannot_continue_is_refused():
    assert "no tokens" in refusal(Request([]))
    assert "20 prompt tokens" in (message := refusal(Request([1] * 20, max_new_tokens=13)))
    assert "max_new_tokens 13" in message and "max_seq_len 32" in message
    assert "token id 50" in (message := refusal(Request([1, 50], max_new_tokens=1))) and "position 1" in message
    assert "token id -1" in refusal(Request([-1], max_new_tokens=1))
    assert "not a list of token ids" in refusal(Request([0.5], max_new_tokens=1))
    assert "no tokenizer" in refusal(Request("text", max_new_tokens=1))
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        Request([1], max_new_tokens=0)


def test_a_prompt_may_fill_the_engine_to_the_last_position():
    request = Request([1] * 20, max_new_tokens=12, ignore_eos=True)
    outputs = list(Generator(ToySession(Limits(2, 32, 4, 8)), vocab=VOCAB).generate([request]))
    assert sum(len(out.token_ids) for out in outputs) == 12


def test_a_refused_request_leaves_nothing_behind():
    generator = Generator(ToySession(Limits(2, 32, 4, 8)), vocab=VOCAB)
    with pytest.raises(UserError):
        list(generator.generate([Request([1], max_new_tokens=2), Request([])]))
    assert not generator.busy and not generator.scheduler.waiting


def test_an_id_in_use_is_refused():
    generator = Generator(ToySession(Limits(2, 32, 4, 8)), vocab=VOCAB)
    generator.add(Request([1], max_new_tokens=2, id="same"))
    with pytest.raises(UserError, match="'same' is in use"):
        generator.add(Request([1], max_new_tokens=2, id="same"))
