"""The public face of the runtime: requests in, a stream of tokens and text out.

    generator = Generator(session, tokenizer, eos_ids=[2])
    for out in generator.generate([Request("The capital of France is")]):
        print(out.text, end="")

A server uses `prepare` (from any thread), `enqueue`, `cancel` and `advance` (from one thread), and `render` (from
another, so that text is made while the next step runs); `add` and `step` are both halves for a single thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from dflash_trt.errors import UserError
from dflash_trt.runtime.answer import Answer
from dflash_trt.runtime.request import Output, Request, check_prompt
from dflash_trt.runtime.scheduler import Event, Policy, Scheduler
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.slots import Sequence
from dflash_trt.runtime.statistics import Statistics, Timing
from dflash_trt.runtime.text import Tokenizer


@dataclass(frozen=True)
class Call:
    """One Session.step."""

    seconds: float
    rows: int  # that ran in it
    prefill: bool  # did it hold a prefill chunk


class Generator:
    """Runs requests together on one session.

    Without a tokenizer prompts must be token ids, and outputs carry no text. `vocab` is the target's; it defaults to
    the tokenizer's. Several requests keep all slots of the session busy; further ones wait.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None = None,
        eos_ids: Iterable[int] = (),
        *,
        vocab: int | None = None,
        policy: Policy = "split",
        prefill_chunk: int | None = None,
    ):
        self.session = session
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.vocab = vocab or (tokenizer.vocab if tokenizer else None)
        self.scheduler = Scheduler(session, policy=policy, prefill_chunk=prefill_chunk)
        self.timing = Timing()
        self.last_call: Call | None = None
        self._running: set[str] = set()  # ids of requests whose end `advance` has not reported
        self._cancelled: list[Event] = []

    @property
    def statistics(self) -> Statistics:
        """Counters over all requests."""
        return self.scheduler.statistics

    @property
    def busy(self) -> bool:
        """Whether `advance` has anything left to do or to report."""
        return bool(self._running)

    def add(self, request: Request) -> str:
        """Queue a request and return its id. Raises UserError if the engine cannot serve it; others are unaffected."""
        return self.enqueue(self.prepare(request))

    def prepare(self, request: Request) -> Sequence:
        """Tokenize and check a request. Raises UserError if the engine cannot serve it."""
        prompt = self._encode(request.prompt)
        check_prompt(prompt, request.max_new_tokens, max_seq_len=self.session.limits.max_seq_len, vocab=self.vocab)
        if request.stop and self.tokenizer is None:
            raise UserError("there is no tokenizer to find stop strings", where="stop", fix="give stop_token_ids")
        stop = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self.eos_ids)
        statistics = Statistics(self.session.limits.block_size)
        return Sequence(request, prompt, stop, statistics, Answer(self.tokenizer, request.stop))

    def enqueue(self, sequence: Sequence) -> str:
        """Queue what `prepare` made and return the request's id. Raises UserError if that is in use."""
        name = sequence.request.id
        if name in self._running:
            raise UserError(f"request id {name!r} is in use", where="request", fix="give each request its own")
        self._running.add(name)
        self.scheduler.add(sequence)
        return name

    def cancel(self, request_id: str) -> bool:
        """Stop a request; the next `step` reports it as cancelled. False if it has already finished."""
        event = self.scheduler.cancel(request_id)
        if event:
            self._cancelled.append(event)
        return event is not None

    def step(self) -> list[Output]:
        """Run one call and return what it brought: at most one output for each request."""
        events = self.advance()
        start = perf_counter()
        outs = []
        for event in events:
            if out := self.render(event):
                outs.append(out)
                if out.finished and not event.finish_reason:  # by a stop string
                    self._drop(out.request_id)
        self.timing.host_seconds += perf_counter() - start
        return outs

    def advance(self) -> list[Event]:
        """Run one call and return what happened to the requests.

        If the session fails its exception passes; `abandon` then gives up the requests that ran in the call.
        """
        start, engine = perf_counter(), 0.0
        events: list[Event] = []
        self.last_call = None
        inputs = self.scheduler.plan()
        if inputs is not None:
            before = perf_counter()
            outputs = self.session.step(inputs)
            engine = perf_counter() - before
            prefill = self.scheduler.prefilled
            events = self.scheduler.commit(outputs)
            self.timing.add_call(engine, prefill=prefill)
            self.last_call = Call(engine, int(np.count_nonzero(inputs.n_valid)), prefill)
        events, self._cancelled = self._cancelled + events, []
        self._running.difference_update(event.sequence.request.id for event in events if event.finish_reason)
        self.timing.host_seconds += perf_counter() - start - engine
        return events

    def abandon(self) -> list[Sequence]:
        """After a failed call: forget the requests that ran in it, and return them."""
        sequences = self.scheduler.abandon()
        self._running.difference_update(sequence.request.id for sequence in sequences)
        return sequences

    def render(self, event: Event) -> Output | None:
        """What an event brings the request's caller; None behind the end of an answer. Events of a request in order."""
        sequence, answer = event.sequence, event.sequence.answer
        brought = answer.push(event.tokens, last=event.finish_reason is not None)
        if brought is None:
            return None
        reason = "stop" if answer.ended else event.finish_reason
        return Output(sequence.request.id, *brought, reason, event.statistics)

    def generate(self, requests: Iterable[Request]) -> Iterator[Output]:
        """Yield what `requests` bring as it comes, until all have finished; closing the iterator drops the rest.

        Raises UserError before the first step if any of them is refused. Outputs of requests given to `add` come along.
        """
        running: set[str] = set()
        try:
            for request in requests:
                running.add(self.add(request))
            while running:
                for out in self.step():
                    if out.finished:
                        running.discard(out.request_id)
                    yield out
        finally:
            for request_id in running:
                self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        """Stop a request without a word."""
        if self.scheduler.cancel(request_id):
            self._running.discard(request_id)

    def _encode(self, prompt: str | Iterable[int] | np.ndarray) -> np.ndarray:
        """Token ids [P] int64."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("the prompt is text, but there is no tokenizer", where="prompt", fix="give token ids")
            prompt = self.tokenizer.encode(prompt)
        ids = np.array(prompt)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UserError("the prompt is not a list of token ids", where="prompt", fix="give text or integers")
        return ids.astype(np.int64)
