"""One engine, many callers: the loop of `serve/loop.py` around the toy language of `runtime/toy.py`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_trt.errors import DflashError, Failure, UserError
from dflash_trt.runtime import Generator, Limits, Output, Request, StepInputs, StepOutputs
from dflash_trt.serve.loop import Broken, Draining, EngineLoop, QueueFull, Starting, Stopped
from tests.runtime.toy import ToySession, expected
from tests.waiting import until


class Gated(ToySession):
    """A session that takes one step whenever the test lets it, and fails when told to."""

    def __init__(self, limits: Limits):
        super().__init__(limits)
        self.gate = threading.Semaphore(0)
        self.open = True  # no gate
        self.faults: list[Exception] = []

    def step(self, inputs: StepInputs) -> StepOutputs:
        if not self.open:
            self.gate.acquire()
        if self.faults:
            self.calls.append(inputs)
            raise self.faults.pop(0)
        return super().step(inputs)


class Inbox:
    """A caller that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Output | DflashError] = []
        self.done = threading.Event()

    def __call__(self, what: Output | DflashError) -> None:
        self.got.append(what)
        if isinstance(what, DflashError) or what.finished:
            self.done.set()

    def wait(self) -> Output | DflashError:
        assert self.done.wait(20), "no end came"
        return self.got[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for out in self.got if isinstance(out, Output) for token in out.token_ids]


def make(*, slots: int = 2, tokenizer: object = None, **options: object) -> tuple[EngineLoop, Gated]:
    session = Gated(Limits(slots, 200, 4, 16))
    generator = Generator(session, tokenizer)  # type: ignore[arg-type]
    loop = EngineLoop(generator, **options)  # type: ignore[arg-type]
    loop.start()
    until(lambda: loop.state != "starting")
    session.calls.clear()
    return loop, session


def test_callers_on_many_threads_get_their_own_text():
    loop, _ = make(slots=4)
    requests = [Request([n % 50, n // 50], max_new_tokens=5 + n % 20) for n in range(100)]
    inboxes = [Inbox() for _ in requests]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(loop.submit, requests, inboxes))
    for request, inbox in zip(requests, inboxes, strict=True):
        assert isinstance(inbox.wait(), Output)
        assert inbox.tokens == expected(request, frozenset())[0]
    assert loop.idle and loop.counts().running == loop.counts().waiting == 0
    assert loop.close(5)


def test_a_cancelled_request_leaves_its_slot_before_the_next_call_but_one():
    loop, session = make()
    session.open = False
    inbox = Inbox()
    name = loop.submit(Request([1], max_new_tokens=150), inbox)
    session.gate.release(3)
    until(lambda: len(session.calls) == 3)  # and a fourth is about to be made
    loop.cancel(name)
    session.gate.release()
    out = inbox.wait()
    assert isinstance(out, Output) and out.finish_reason == "cancelled"
    assert len(session.calls) == 4 and loop.counts().running == 0
    loop.close(5)


def test_a_cancelled_request_that_waits_never_runs():
    loop, session = make(slots=1)
    session.open = False
    first, second = Inbox(), Inbox()
    loop.submit(Request([1], max_new_tokens=3), first)
    loop.cancel(loop.submit(Request([2] * 5, max_new_tokens=3), second))
    session.open = True
    session.gate.release()
    assert isinstance(first.wait(), Output)
    assert second.wait().finish_reason == "cancelled" and second.tokens == []  # type: ignore[union-attr]
    assert not any((call.past_len == 0)[0] and call.n_given[0] == 5 for call in session.calls)
    loop.close(5)


def test_more_than_may_wait_are_refused_and_room_comes_back():
    loop, session = make(slots=1, max_waiting=1)
    session.open = False
    inboxes = [Inbox(), Inbox()]
    for inbox in inboxes:
        loop.submit(Request([1], max_new_tokens=3), inbox)
    with pytest.raises(QueueFull, match="1 requests wait already"):
        loop.submit(Request([1], max_new_tokens=3), Inbox())
    session.open = True
    session.gate.release()
    for inbox in inboxes:
        inbox.wait()
    until(lambda: loop.idle)
    loop.submit(Request([1], max_new_tokens=3), last := Inbox())
    assert isinstance(last.wait(), Output)
    loop.close(5)


def test_a_drain_refuses_new_requests_and_finishes_those_it_has():
    loop, session = make(slots=1)
    session.open = False
    inboxes = [Inbox(), Inbox()]  # one runs, one waits
    requests = [Request([1], max_new_tokens=9), Request([2], max_new_tokens=9)]
    for request, inbox in zip(requests, inboxes, strict=True):
        loop.submit(request, inbox)
    loop.drain()
    with pytest.raises(Draining):
        loop.submit(Request([3], max_new_tokens=3), Inbox())
    session.open = True
    session.gate.release()
    for request, inbox in zip(requests, inboxes, strict=True):
        inbox.wait()
        assert inbox.tokens == expected(request, frozenset())[0]
    loop.close(5)


def test_a_failed_call_fails_the_requests_in_it_and_no_other():
    loop, session = make()
    session.open = False
    long, short = Inbox(), Inbox()
    request = Request([1], max_new_tokens=60)
    loop.submit(request, long)
    session.gate.release(3)
    until(lambda: len(session.calls) == 3)
    session.faults = [MemoryError()]  # of the prefill of the next request
    loop.submit(Request([2], max_new_tokens=60), short)
    until(lambda: loop.counts().waiting == 1)
    session.faults, fault = [], session.faults.pop()
    session.gate.release()  # a decode call of the first
    until(lambda: len(session.calls) == 4)
    session.faults = [fault]
    session.gate.release()
    assert "out of memory" in str(short.wait())
    session.open = True
    session.gate.release()
    long.wait()
    assert long.tokens == expected(request, frozenset())[0]
    assert loop.state == "ready" and loop.counts().running == 0
    loop.close(5)


def test_a_second_failure_in_a_row_breaks_the_engine_and_all_are_told():
    loop, session = make(slots=1)
    session.open = False
    inboxes = [Inbox() for _ in range(3)]
    for inbox in inboxes:
        loop.submit(Request([1], max_new_tokens=3), inbox)
    session.faults = [Failure("the device is gone"), Failure("the device is gone")]
    session.gate.release(2)
    for inbox in inboxes:
        assert "the device is gone" in str(inbox.wait())
    assert loop.state == "broken" and "the device is gone" in str(loop.fault)
    with pytest.raises(Broken, match="the device is gone"):
        loop.submit(Request([1], max_new_tokens=3), Inbox())
    assert loop.close(5)


def test_an_engine_that_fails_between_calls_is_broken_with_its_own_words():
    loop, session = make()

    def move_slot(source: int, target: int, length: int) -> None:
        raise Failure("the copy engine is gone")

    session.move_slot = move_slot  # type: ignore[method-assign]
    session.open = False
    loop.submit(Request([1], max_new_tokens=5), Inbox())
    loop.submit(Request([2], max_new_tokens=100), last := Inbox())  # has to move when the first has ended
    session.open = True
    session.gate.release()
    assert "the copy engine is gone" in str(last.wait())
    assert loop.state == "broken" and loop.close(5)


def test_whoever_waits_when_the_loop_closes_is_told():
    loop, session = make(slots=1)
    session.open = False
    inboxes = [Inbox(), Inbox()]
    for inbox in inboxes:
        loop.submit(Request([1], max_new_tokens=100), inbox)
    closing = threading.Thread(target=loop.close, args=(5,))
    closing.start()
    until(lambda: loop.state == "draining")
    session.gate.release()
    closing.join()
    for inbox in inboxes:
        assert isinstance(inbox.wait(), Stopped)


def test_statistics_of_an_answer_are_those_of_its_own_end():
    """Whoever reads them later, while the engine counts on, reads the same."""
    request = Request([3], max_new_tokens=150)
    text = Letters().decode(expected(request, frozenset())[0])
    found = set()
    for others in (0, 3):
        loop, _ = make(slots=4, tokenizer=Letters())
        for number in range(others):
            loop.submit(Request([number], max_new_tokens=150), Inbox())
        loop.submit(Request([3], max_new_tokens=150, stop=(text[20:23],)), inbox := Inbox())
        out = inbox.wait()
        assert isinstance(out, Output)
        until(lambda loop=loop: loop.idle)
        found.add((out.statistics.new_tokens, out.statistics.accepted, out.statistics.decode_steps))
        assert out.statistics.new_tokens < len(inbox.tokens) + 4
        loop.close(5)
    assert len(found) == 1


def test_failures_with_good_calls_between_them_are_forgiven():
    loop, session = make(slots=1)
    for _ in range(3):
        session.faults = [Failure("once")]
        loop.submit(Request([1], max_new_tokens=3), bad := Inbox())
        assert "once" in str(bad.wait())
        loop.submit(Request([1], max_new_tokens=3), good := Inbox())
        assert isinstance(good.wait(), Output)
    assert loop.state == "ready"
    loop.close(5)


def test_a_caller_that_fails_is_cancelled_and_the_others_go_on():
    loop, _ = make()

    def gone(what: Output | DflashError) -> None:
        raise BrokenPipeError

    loop.submit(Request([1], max_new_tokens=150), gone)
    loop.submit(request := Request([2], max_new_tokens=20), inbox := Inbox())
    inbox.wait()
    assert inbox.tokens == expected(request, frozenset())[0]
    until(lambda: loop.idle and loop.counts().running == 0)
    loop.close(5)


def test_text_is_made_while_the_next_call_runs():
    loop, session = make()

    def slow(what: Output | DflashError) -> None:
        if not waited:
            waited.append(len(session.calls))
            until(lambda: len(session.calls) > waited[0] + 2)  # calls go on although this caller sits on the first

    waited: list[int] = []
    session.open = False
    loop.submit(Request([1], max_new_tokens=100), slow)
    session.gate.release(3)
    until(lambda: bool(waited))
    session.open = True
    session.gate.release()
    until(lambda: loop.idle)
    assert loop.counts().running == 0 and len(session.calls) > waited[0] + 2
    loop.close(5)


class Letters:
    """Token n is the letter n + 33; one of them is beyond it."""

    vocab = 50

    def __init__(self, unspeakable: int = -1):
        self._unspeakable = unspeakable

    def decode(self, ids: list[int]) -> str:
        if self._unspeakable in ids:
            raise ValueError("no such letter")
        return "".join(chr(33 + token) for token in ids)


def test_a_tokenizer_that_fails_on_one_answer_harms_no_other():
    requests = [Request([n], max_new_tokens=12) for n in range(1, 6)]
    texts = [expected(request, frozenset())[0] for request in requests]
    unspeakable = next(token for token in texts[2] if sum(token in text for text in texts) == 1)
    loop, _ = make(slots=5, tokenizer=Letters(unspeakable))
    inboxes = [Inbox() for _ in requests]
    for request, inbox in zip(requests, inboxes, strict=True):
        loop.submit(request, inbox)
    for number, inbox in enumerate(inboxes):
        end = inbox.wait()
        if number == 2:
            assert "no such letter" in str(end)
        else:
            assert inbox.tokens == texts[number]
    until(lambda: loop.counts().running == 0)
    loop.close(5)


def test_a_stop_string_ends_an_answer_and_frees_its_slot():
    request = Request([3], max_new_tokens=150)
    text = Letters().decode(expected(request, frozenset())[0])
    loop, session = make(tokenizer=Letters())
    loop.submit(Request([3], max_new_tokens=150, stop=(text[20:23],)), inbox := Inbox())
    out = inbox.wait()
    assert isinstance(out, Output) and out.finish_reason == "stop"
    cut = text.find(text[20:23])
    assert "".join(out.text for out in inbox.got if isinstance(out, Output)) == text[:cut]
    assert Letters().decode(inbox.tokens) == text[: cut + 3]
    until(lambda: loop.idle and loop.counts().running == 0)
    assert len(session.calls) < 60
    loop.close(5)


def test_a_bad_request_is_refused_alone():
    loop, _ = make()
    for request, word in [
        (Request([], max_new_tokens=3), "no tokens"),
        (Request([1] * 300, max_new_tokens=3), "max_seq_len 200"),
        (Request([-1], max_new_tokens=3), "outside the vocabulary"),
        (Request([1], max_new_tokens=3, stop=("x",)), "no tokenizer"),
    ]:
        with pytest.raises(UserError, match=word):
            loop.submit(request, Inbox())
    assert loop.idle
    loop.close(5)


def test_an_id_in_use_is_refused_and_the_first_owner_is_served():
    loop, session = make()
    session.open = False
    loop.submit(Request([1], max_new_tokens=9, id="a"), inbox := Inbox())
    with pytest.raises(UserError, match="'a' is in use"):
        loop.submit(Request([2], max_new_tokens=9, id="a"), Inbox())
    session.open = True
    session.gate.release()
    inbox.wait()
    assert inbox.tokens == expected(Request([1], max_new_tokens=9), frozenset())[0]
    loop.close(5)


def test_nobody_is_served_before_the_warm_up_and_it_counts_for_nothing():
    session = Gated(Limits(1, 200, 4, 16))
    session.open = False
    loop = EngineLoop(Generator(session))
    loop.start()
    assert loop.state == "starting"
    with pytest.raises(Starting):
        loop.submit(Request([1], max_new_tokens=3), Inbox())
    session.open = True
    session.gate.release()
    until(lambda: loop.state == "ready")
    assert session.calls and loop.statistics.new_tokens == loop.steps == 0
    loop.close(5)


def test_an_engine_that_fails_its_warm_up_is_broken():
    session = Gated(Limits(1, 200, 4, 16))
    session.faults = [Failure("no memory for the caches")]
    loop = EngineLoop(Generator(session))
    loop.start()
    until(lambda: loop.state == "broken")
    assert "no memory for the caches" in str(loop.fault)
    loop.close(5)
