"""Acceptance and inverse-CDF sampling, plainly (`dflash_trt.graph.accept` is the graph's form)."""

from __future__ import annotations

import numpy as np


def accept(
    greedy: np.ndarray,
    sampled: np.ndarray,
    temperature: np.ndarray,
    ids: np.ndarray,
    n_valid: np.ndarray,
    n_given: np.ndarray,
    past_len: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accepted drafts, next token and committed length after the step, int64 [B] each.

    greedy, sampled [B, K]: the target's token after the last certain column and after each draft; ids [B, Q].
    Row b holds n_given[b] certain tokens at position past_len[b], then n_valid[b] - n_given[b] drafts.
    """
    batch, choices = greedy.shape
    accepted, token = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    for b in range(batch):
        choice = sampled[b] if temperature[b] > 0 else greedy[b]
        drafts = ids[b, n_given[b] : n_valid[b]]
        while accepted[b] < min(choices - 1, len(drafts)) and drafts[accepted[b]] == choice[accepted[b]]:
            accepted[b] += 1
        token[b] = choice[accepted[b]]
    return accepted, token, past_len + n_given + accepted


def sample(weights: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """weights [N, V] ≥ 0, uniform [N] in [0, 1) → int64 [N]: the first entry whose cumulated share exceeds uniform.

    A row of zeros gives 0.
    """
    cumulated = weights.astype(np.float64).cumsum(axis=1)
    total = cumulated[:, -1:]
    below = (cumulated <= uniform.astype(np.float64)[:, None] * total) & (cumulated < total)
    return below.sum(axis=1)
