"""Ways to answer prompts that can be raced against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.engine import Engine
from dflash_trt.runtime import Generator, Limits, Request, Statistics, Timing, Tokenizer
from dflash_trt.runtime.ort_session import OrtSession


@dataclass(frozen=True)
class Heat:
    """One lane's answers to one group of prompts."""

    answers: list[tuple[int, ...]]
    seconds: float  # wall time, prompts included
    statistics: Statistics | None = None  # of our engines
    timing: Timing | None = None


class Lane(Protocol):
    """Answers a group of prompts (token ids) greedily, stop tokens excluded."""

    name: str

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Heat: ...


class EngineLane:
    """An engine directory on ONNX Runtime, with its drafter or without.

    With a tokenizer the answers are detokenized as for a user, and `listen` gets the text as it comes.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        draft: bool,
        threads: int | None = None,
        tokenizer: Tokenizer | None = None,
        eos_ids: Iterable[int] = (),
    ):
        self.name = "DFlash" if draft else "autoregressive"
        self.listen: Callable[[str], None] = lambda text: None
        self._session = open_session(engine, draft=draft, threads=threads)
        self._tokenizer, self._eos_ids, self._vocab = tokenizer, tuple(eos_ids), engine.manifest.vocab

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Heat:
        generator = Generator(self._session, self._tokenizer, self._eos_ids, vocab=self._vocab)
        requests = [Request(prompt, max_new_tokens) for prompt in prompts]
        answers: dict[str, list[int]] = {request.id: [] for request in requests}
        start = time.perf_counter()
        for out in generator.generate(requests):
            answers[out.request_id] += out.token_ids
            self.listen(out.text)
        seconds = time.perf_counter() - start
        return Heat([tuple(ids) for ids in answers.values()], seconds, generator.statistics, generator.timing)


def open_session(engine: Engine, *, draft: bool, threads: int | None = None) -> OrtSession:
    """The engine's float32 graph on this machine's CPU."""
    return OrtSession(engine.graph(draft=draft), engine_limits(engine, draft=draft), threads=threads)


def engine_limits(engine: Engine, *, draft: bool) -> Limits:
    """As the runtime wants them; without a drafter a step yields one token."""
    limits = vars(engine.limits) if draft else vars(engine.limits) | {"block_size": 1}
    return Limits(**limits)
