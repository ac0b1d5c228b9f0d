"""Counters that say whether the drafter earns its keep, and where the time goes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Statistics:
    """What one request, or everything a generator did, has come to so far."""

    block_size: int  # K
    prompt_tokens: int = 0
    new_tokens: int = 0
    # [K, K] int64: [d, a] counts the decode rows that held d drafts and accepted a of them
    verified: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.verified = np.zeros((self.block_size, self.block_size), np.int64)

    def copy(self) -> Statistics:
        """As it is now."""
        copied = Statistics(self.block_size, self.prompt_tokens, self.new_tokens)
        copied.verified[:] = self.verified
        return copied

    @property
    def decode_steps(self) -> int:
        """Decode rows run: one call that advances n requests counts n times."""
        return int(self.verified.sum())

    @property
    def tau(self) -> float:
        """Acceptance length: tokens a decode row yields, the target's own included; nan before the first."""
        tokens = self.verified.sum(axis=0) @ np.arange(1, self.block_size + 1)
        return float(tokens / self.decode_steps) if self.decode_steps else float("nan")

    @property
    def drafts(self) -> list[tuple[int, int]]:
        """For block positions 1 … K-1: drafts verified there, and how many of them counted."""
        held = self.verified.sum(axis=1)[::-1].cumsum()[::-1][1:]
        counted = self.verified.sum(axis=0)[::-1].cumsum()[::-1][1:]
        return list(zip(held.tolist(), counted.tolist(), strict=True))

    @property
    def accepted(self) -> int:
        """Drafts that counted, at any position."""
        return int(self.verified.sum(axis=0) @ np.arange(self.block_size))

    @property
    def acceptance(self) -> list[float]:
        """For block positions 1 … K-1: the share of the drafts verified there that counted; nan where none was."""
        return [counted / held if held else float("nan") for held, counted in self.drafts]


@dataclass
class Timing:
    """Seconds of wall time. A call that holds a prefill chunk counts as prefill, whatever else it holds."""

    prefill_calls: int = 0
    decode_calls: int = 0
    prefill_seconds: float = 0.0  # inside Session.step
    decode_seconds: float = 0.0  # inside Session.step
    host_seconds: float = 0.0  # scheduling, slot moves, detokenization

    def add_call(self, seconds: float, *, prefill: bool) -> None:
        """Count one Session.step."""
        if prefill:
            self.prefill_calls += 1
            self.prefill_seconds += seconds
        else:
            self.decode_calls += 1
            self.decode_seconds += seconds
