"""Slots and batching, against the toy language of `toy.py`, whose every error shows in the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime import Generator, Limits, Output, Request, Sampling
from dflash_trt.runtime.sampling import uniforms
from tests.runtime.toy import VOCAB, ToySession, expected

EOS = frozenset({7})
MAX_SEQ_LEN = 64


def session(*, slots: int = 4, block: int = 8, query: int = 16, skill: float = 0.8) -> ToySession:
    return ToySession(Limits(slots, MAX_SEQ_LEN, block, max(query, block)), skill)


def run(generator: Generator, requests: list[Request]) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
    for out in generator.generate(requests):
        outputs[out.request_id].append(out)
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [token for out in outputs for token in out.token_ids]


def oracle(request: Request) -> tuple[list[int], str]:
    if not request.sampling.temperature:
        return expected(request, EOS)
    positions = len(request.prompt) + np.arange(request.max_new_tokens)
    return expected(request, EOS, uniforms(np.array([request.sampling.seed], np.uint64), positions).tolist())


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40))
    return Request(
        prompt,
        max_new_tokens=draw(st.integers(1, min(24, MAX_SEQ_LEN - len(prompt)))),
        sampling=Sampling(temperature=draw(st.sampled_from([0.0, 1.0])), seed=draw(st.integers(0, 2**64 - 1))),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))),
        ignore_eos=draw(st.booleans()),
    )


sizes = st.fixed_dictionaries(
    {"slots": st.integers(1, 8), "block": st.integers(1, 8), "query": st.integers(1, 16), "skill": st.floats(0, 1)}
)
policies = st.sampled_from(["split", "mixed"])


@given(st.data(), sizes, policies, st.lists(requests(), min_size=1, max_size=12), st.integers(1, 20))
def test_a_request_gets_its_own_text_whatever_else_runs(data, size, policy, mix, chunk):
    """Requests arrive and are cancelled at any time; those that finish get what the language alone says."""
    generator = Generator(session(**size), eos_ids=EOS, vocab=VOCAB, policy=policy, prefill_chunk=chunk)
    arriving, got, reasons = list(mix), {request.id: [] for request in mix}, {}
    while arriving or generator.busy:
        for _ in range(data.draw(st.integers(0 if generator.busy else 1, 3), label="arrivals")):
            if arriving:
                generator.add(arriving.pop(0))
        if data.draw(st.integers(0, 15), label="cancel") == 0:
            generator.cancel(data.draw(st.sampled_from(mix), label="which").id)
        for out in generator.step():
            assert out.request_id not in reasons, "an output after the last"
            got[out.request_id] += out.token_ids
            if out.finished:
                reasons[out.request_id] = out.finish_reason
    for request in mix:
        want, reason = oracle(request)
        if reasons[request.id] == "cancelled":
            want, reason = want[: len(got[request.id])], "cancelled"
        assert (got[request.id], reasons[request.id]) == (want, reason)


@given(sizes, policies, st.lists(requests(), min_size=2, max_size=8), st.integers(1, 20))
def test_drafts_fare_in_a_batch_as_they_do_alone(size, policy, mix, chunk):
    """Lost or misplaced entries of the drafter's cache would leave the text right and the acceptance low."""
    together = run(Generator(session(**size), eos_ids=EOS, policy=policy, prefill_chunk=chunk), mix)
    for request in mix:
        alone = run(Generator(session(**size), eos_ids=EOS), [request])[request.id]
        assert [out.token_ids for out in together[request.id]] == [out.token_ids for out in alone]
        assert np.array_equal(together[request.id][-1].statistics.verified, alone[-1].statistics.verified)


@given(sizes, policies, st.lists(requests(), min_size=1, max_size=12), st.integers(1, 20))
def test_calls_stay_within_the_limits_and_span_no_more_slots_than_they_need(size, policy, mix, chunk):
    toy = session(**size)
    run(Generator(toy, eos_ids=EOS, policy=policy, prefill_chunk=chunk), mix)
    for call in toy.calls:
        rows, query = call.input_ids.shape
        assert call.first >= 0 and call.first + rows <= toy.limits.max_batch
        assert query <= max(min(chunk, toy.limits.max_query), toy.limits.block_size)
        assert call.input_ids.min() >= 0 and call.input_ids.max() < VOCAB
        assert (call.past_len + call.n_valid <= MAX_SEQ_LEN).all() and (call.n_valid <= query).all()
        assert call.n_valid[0] and call.n_valid[-1]
        assert policy == "split" or (call.first == 0 and call.n_valid.all()), "mixed calls leave nobody idle"


def test_a_chunk_of_a_prompt_runs_between_two_decode_calls():
    """Neither side waits for the whole of the other."""
    toy = session(block=2, query=4)
    generator = Generator(toy, policy="split", prefill_chunk=4)
    generator.add(Request([1] * 4, max_new_tokens=30))
    generator.step()
    generator.add(Request([2] * 12, max_new_tokens=30))
    generator.add(Request([3] * 8, max_new_tokens=30))
    for _ in range(10):
        generator.step()
    chunk_slots = [call.first if call.input_ids.shape[1] == 4 else None for call in toy.calls]
    assert chunk_slots == [0, None, 1, None, 1, None, 1, None, 2, None, 2]


def test_a_request_that_prefills_stands_idle_between_streams():
    toy = session(slots=3, block=2, query=4)
    generator = Generator(toy, policy="split", prefill_chunk=4)
    short, *long = (Request([n] * 4, max_new_tokens=n, ignore_eos=True) for n in (1, 20, 21))
    for request in (long[0], short, long[1], Request([4] * 12, max_new_tokens=9)):
        generator.add(request)
    for _ in range(10):
        generator.step()
    idle = [call for call in toy.calls if not call.n_valid.all()]
    assert [call.n_valid.tolist() for call in idle] == [[2, 0, 2]] * 3
    assert [int(call.past_len[1]) for call in idle] == [0, 4, 8]


@pytest.mark.parametrize("skill", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("length", range(1, 21))
def test_max_new_tokens_is_exact_inside_a_block(length, skill):
    request = Request([5, 6], max_new_tokens=length, ignore_eos=True)
    outputs = run(Generator(session(skill=skill), eos_ids=EOS), [request])[request.id]
    assert (len(tokens(outputs)), outputs[-1].finish_reason) == (length, "length")


def test_a_stop_token_inside_an_accepted_block_ends_the_text_there():
    endless = Request([5, 6], max_new_tokens=40, ignore_eos=True)
    blocks = [out.token_ids for out in run(Generator(session(skill=1.0)), [endless])[endless.id]]
    stop = blocks[1][3]
    before = [token for block in blocks for token in block]
    request = Request([5, 6], max_new_tokens=40, stop_token_ids=(stop,))
    for block in (8, 1):
        outputs = run(Generator(session(block=block, skill=1.0)), [request])[request.id]
        assert tokens(outputs) == before[: before.index(stop)]
        assert outputs[-1].finish_reason == "stop"


def test_a_freed_slot_goes_to_a_waiting_request_or_to_the_last_live_one():
    toy = session(slots=3, block=1, query=4)
    generator = Generator(toy, policy="mixed")
    first, second, third, fourth = (Request([n], max_new_tokens=n + 2) for n in range(4))
    for request in (first, second, third, fourth):
        generator.add(request)
    occupied = []
    while generator.busy:
        generator.step()
        occupied.append({slot: s.request.id for slot, s in generator.scheduler.slots.tenant.items()})
    assert {0: fourth.id, 2: third.id} in occupied  # took the hole of the first, when the second had just gone
    assert occupied[-2] == {0: fourth.id}


def test_cancelling_frees_the_slot_at_once_and_is_reported_once():
    generator = Generator(session(slots=1))
    running, waiting = Request([1], max_new_tokens=50), Request([2], max_new_tokens=2)
    generator.add(running)
    generator.add(waiting)
    generator.step()
    assert generator.cancel(running.id) and not generator.cancel(running.id)
    outputs = generator.step()
    assert [(out.request_id, out.finish_reason) for out in outputs] == [(running.id, "cancelled"), (waiting.id, None)]


def test_closing_the_iterator_drops_what_still_runs():
    generator = Generator(session())
    stream = generator.generate([Request([1], max_new_tokens=50), Request([2], max_new_tokens=50)])
    next(stream)
    stream.close()
    assert not generator.busy
    last = Request([3], max_new_tokens=5, ignore_eos=True)
    assert tokens(run(generator, [last])[last.id]) == oracle(last)[0]
