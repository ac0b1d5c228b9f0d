"""Attention of a block to a cached context and to itself, plainly: one query at a time, in float64."""

from __future__ import annotations

import numpy as np


def block_attention(
    q: np.ndarray,
    k_block: np.ndarray,
    v_block: np.ndarray,
    cache: np.ndarray,
    start: np.ndarray,
    count: np.ndarray,
    sinks: np.ndarray | None = None,
    *,
    k_head: int,
    v_head: int,
    causal: bool,
    window: int = 0,
    both_sides: bool = False,
    scale: float,
) -> np.ndarray:
    """float64 [B, Hq, Q, D]; rows from count[b] on are zeros.

    q [B, Hq, Q, D], k_block and v_block [B, Hkv, Q, D], cache [B, Hc, S, D], start and count [B], sinks [Hq]. Query i
    stands at position start[b] + i. Its keys are the cache's below start[b] and the block's first count[b]; with
    `causal` none after itself, with a window W only those at a distance < W, to the left or on `both_sides`. A sink is
    one more logit, with no value.
    """
    batch, heads, columns, _ = q.shape
    group = heads // k_block.shape[1]
    out = np.zeros(q.shape, np.float64)
    for b in range(batch):
        begin, used = int(start[b]), min(int(count[b]), columns)
        context = min(begin, cache.shape[2])
        positions = np.concatenate([np.arange(context), begin + np.arange(used)])
        for head in range(heads):
            shared = head // group
            k = np.concatenate([cache[b, k_head + shared, :context], k_block[b, shared, :used]]).astype(np.float64)
            v = np.concatenate([cache[b, v_head + shared, :context], v_block[b, shared, :used]]).astype(np.float64)
            for i in range(used):
                seen = visible(positions - (begin + i), causal=causal, window=window, both_sides=both_sides)
                scores = k[seen] @ q[b, head, i].astype(np.float64) * scale
                sink = -np.inf if sinks is None else float(sinks[head])
                peak = max(scores.max(), sink)
                weights = np.exp(scores - peak)
                out[b, head, i] = weights @ v[seen] / (weights.sum() + np.exp(sink - peak))
    return out


def visible(distance: np.ndarray, *, causal: bool, window: int, both_sides: bool) -> np.ndarray:
    """Which keys a query sees, by their positions less its own. Same as the masks of the step graph."""
    seen = np.ones(distance.shape, bool)
    if causal:
        seen &= distance <= 0
    if window:
        seen &= distance > -window
    if window and both_sides:
        seen &= distance < window
    return seen
