"""The public face of the runtime: requests in, a stream of tokens and text out.

    generator = Generator(session, tokenizer, eos_ids=[2])
    for out in generator.generate([Request("The capital of France is")]):
        print(out.text, end="")

A server uses `add`, `cancel` and `step` instead of `generate`, all from one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import perf_counter

import numpy as np

from dflash_trt.errors import UserError
from dflash_trt.runtime.request import Output, Request, check_prompt
from dflash_trt.runtime.scheduler import Event, Policy, Scheduler
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.slots import Sequence
from dflash_trt.runtime.statistics import Statistics, Timing
from dflash_trt.runtime.text import TextStream, Tokenizer


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
        self._streams: dict[str, TextStream | None] = {}  # by request id, as long as the request runs
        self._cancelled: list[Event] = []

    @property
    def statistics(self) -> Statistics:
        """Counters over all requests."""
        return self.scheduler.statistics

    @property
    def busy(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        return bool(self._streams)

    def add(self, request: Request) -> str:
        """Queue a request and return its id. Raises UserError if the engine cannot serve it; others are unaffected."""
        if request.id in self._streams:
            raise UserError(f"request id {request.id!r} is in use", where="request", fix="give each request its own")
        prompt = self._encode(request.prompt)
        check_prompt(prompt, request.max_new_tokens, max_seq_len=self.session.limits.max_seq_len, vocab=self.vocab)
        stop = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self.eos_ids)
        self._streams[request.id] = TextStream(self.tokenizer) if self.tokenizer else None
        self.scheduler.add(Sequence(request, prompt, stop, Statistics(self.session.limits.block_size)))
        return request.id

    def cancel(self, request_id: str) -> bool:
        """Stop a request; the next `step` reports it as cancelled. False if it has already finished."""
        event = self.scheduler.cancel(request_id)
        if event:
            self._cancelled.append(event)
        return event is not None

    def step(self) -> list[Output]:
        """Run one call and return what it brought: at most one output for each request."""
        start, engine = perf_counter(), 0.0
        events = []
        inputs = self.scheduler.plan()
        if inputs is not None:
            before = perf_counter()
            outputs = self.session.step(inputs)
            engine = perf_counter() - before
            events = self.scheduler.commit(outputs)
            self.timing.add_call(engine, prefill=self.scheduler.prefilled)
        events, self._cancelled = self._cancelled + events, []
        outs = [self._output(event) for event in events]
        self.timing.host_seconds += perf_counter() - start - engine
        return outs

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
                if self.scheduler.cancel(request_id):
                    del self._streams[request_id]

    def _output(self, event: Event) -> Output:
        request_id, reason = event.sequence.request.id, event.finish_reason
        stream = self._streams.pop(request_id) if reason else self._streams[request_id]
        text = stream.push(event.tokens, last=reason is not None) if stream else ""
        return Output(request_id, tuple(event.tokens), text, reason, event.sequence.statistics)

    def _encode(self, prompt: str | Iterable[int]) -> np.ndarray:
        """Token ids [P] int64."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UserError("the prompt is text, but there is no tokenizer", where="prompt", fix="give token ids")
            prompt = self.tokenizer.encode(prompt)
        ids = np.array(prompt)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UserError("the prompt is not a list of token ids", where="prompt", fix="give text or integers")
        return ids.astype(np.int64)
