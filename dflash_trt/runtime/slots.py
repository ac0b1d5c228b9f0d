"""The slots of a session: who lies where, and the state of each as one row of an array."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from dflash_trt.runtime.answer import Answer
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.statistics import Statistics


@dataclass(eq=False)
class Sequence:
    """A request on its way through the scheduler."""

    request: Request
    prompt: np.ndarray  # [P] int64
    stop: frozenset[int]
    statistics: Statistics
    answer: Answer
    admitted: float = 0.0  # perf_counter when it got its slot


class Slots:
    """`count` slots. Rows without a tenant hold leftovers."""

    def __init__(self, count: int, block_size: int):
        self.count = count
        self.tenant: dict[int, Sequence] = {}
        self.arrival = np.zeros(count, np.int64)  # number of the admission
        self.prompt_len = np.zeros(count, np.int64)
        self.past_len = np.zeros(count, np.int64)  # tokens committed to the caches
        self.remaining = np.zeros(count, np.int64)  # tokens the request may still get
        self.block = np.zeros((count, block_size), np.int64)  # its last token, not yet in the caches, and K-1 drafts
        self.temperature = np.zeros(count, np.float32)
        self.top_p = np.zeros(count, np.float32)
        self.top_k = np.zeros(count, np.int64)
        self.seed = np.zeros((count, 1), np.uint64)
        self._arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        self._admitted = 0

    def admit(self, slot: int, sequence: Sequence) -> None:
        """Give a free slot to `sequence`, which starts with nothing in the caches."""
        request, sampling = sequence.request, sequence.request.sampling
        self.tenant[slot] = sequence
        sequence.admitted = perf_counter()
        self._admitted += 1
        self.arrival[slot] = self._admitted
        self.prompt_len[slot] = len(sequence.prompt)
        self.past_len[slot] = 0
        self.remaining[slot] = request.max_new_tokens
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.seed[slot] = sampling.seed

    def move(self, source: int, target: int) -> None:
        """Bring the books of `source` to the free slot `target`; the caches are the session's business."""
        self.tenant[target] = self.tenant.pop(source)
        for array in self._arrays:
            array[target] = array[source]
