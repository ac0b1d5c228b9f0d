"""Top-1 over a vocabulary shard, plainly."""

from __future__ import annotations

import numpy as np


def draft_head(logits: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """logits [N, V] of the tokens offset, offset + 1 … → largest value [N] and its token, int64 [N].

    Among equals the smallest token wins.
    """
    index = logits.astype(np.float64).argmax(axis=1)
    return logits[np.arange(len(logits)), index].astype(np.float64), index + offset


def combine(value: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """value, index [C, N]: the best of C parts of the vocabulary, in any order → the best of all, [N] each."""
    best = value.max(axis=0)
    return best, np.where(value == best, index, np.iinfo(np.int64).max).min(axis=0)
