"""The one protocol between the scheduler and whatever executes a step graph.

A session owns the KV caches: sequence r lives in row (slot) r of every cache. A call works on the contiguous range of
slots `first … first + B - 1`, where B is the length of the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dflash_trt.engine import Limits
from dflash_trt.errors import Failure

OVERFLOW = "overflow"  # an output of plugin graphs: rows that found no place in a cache


@dataclass(frozen=True)
class StepInputs:
    """One call. B rows (slots `first …`), Q columns; see docs/step-graph.md.

    Row r holds `n_valid[r]` tokens at positions `past_len[r] …`; the first `n_given[r]` are certain, the rest drafts.
    An idle row has n_valid = n_given = 0.
    """

    first: int
    input_ids: np.ndarray  # [B, Q] int64
    n_valid: np.ndarray  # [B] int64
    n_given: np.ndarray  # [B] int64
    past_len: np.ndarray  # [B] int64
    temperature: np.ndarray  # [B] float32; 0 = greedy
    top_p: np.ndarray  # [B] float32; 1 = off
    top_k: np.ndarray  # [B] int64; 0 = off
    uniform: np.ndarray  # [B, K] float32 in [0, 1): column t decides the token at position past_len + n_given + t


@dataclass(frozen=True)
class StepOutputs:
    """What a call decided. Idle rows hold arbitrary values."""

    n_accepted: np.ndarray  # [B] int64: drafts of the row that count
    next_token: np.ndarray  # [B] int64: the target's own choice after the accepted drafts
    next_block: np.ndarray  # [B, K] int64: next_token and K-1 new drafts


class Session(Protocol):
    """Executes steps. Not thread-safe: one caller at a time."""

    limits: Limits

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Run the graph once; the caches of the called slots advance in place."""
        ...

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Copy what the first `length` tokens left in every cache, and the sinks' position, to another slot."""
        ...

    def free_slot(self, slot: int) -> None:
        """Forget a slot's contents; nothing will be read from it before a request's first tokens are written."""
        ...


def check_overflow(rows: int, inputs: StepInputs) -> None:
    """Raise Failure if the plugins found no place for some rows. Schedulers keep within the limits; others must."""
    if rows:
        longest = int(inputs.past_len.max())
        raise Failure(
            f"{rows} rows fell beyond the KV cache — past_len up to {longest} — keep to the engine's max_seq_len"
        )
