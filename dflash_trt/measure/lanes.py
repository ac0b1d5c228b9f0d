"""Ways to answer prompts that can be raced against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_trt.engine import Engine
from dflash_trt.runtime import Request, Statistics, Timing
from dflash_trt.runtime.open import open_generator


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
    """An engine directory, with its drafter or without.

    It detokenizes as for a user; `listen` gets the text as it comes.
    """

    def __init__(self, engine: Engine, *, draft: bool, threads: int | None = None):
        self.name = "DFlash" if draft else "autoregressive"
        self.listen: Callable[[str], object] = lambda text: None
        self._generator = open_generator(engine, draft=draft, threads=threads)

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Heat:
        requests = [Request(prompt, max_new_tokens) for prompt in prompts]
        answers: dict[str, list[int]] = {request.id: [] for request in requests}
        statistics = Statistics(self._generator.session.limits.block_size)
        timing = self._generator.timing = Timing()
        start = time.perf_counter()
        for out in self._generator.generate(requests):
            answers[out.request_id] += out.token_ids
            self.listen(out.text)
            if out.finished:
                statistics.verified += out.statistics.verified
        seconds = time.perf_counter() - start
        return Heat([tuple(ids) for ids in answers.values()], seconds, statistics, timing)
