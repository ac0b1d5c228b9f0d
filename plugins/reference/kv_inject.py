"""KV injection, plainly: norm the keys, rotate them, and put keys and values at their cache positions."""

from __future__ import annotations

import numpy as np


def kv_inject(
    rows: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    k_norm: np.ndarray | None,
    start: np.ndarray,
    count: np.ndarray,
    cache: np.ndarray,
    *,
    layers: int,
    eps: float,
) -> tuple[np.ndarray, int]:
    """The cache afterwards, float64 [B, 2*L*Hkv, S, D], and how many rows found no place in it.

    rows [B, Q, 2*L*Hkv*D]: K heads of layer 0 … L-1, then V heads likewise; cos, sin [B, Q, R] of the first 2R
    dimensions; k_norm [L, D]; start, count [B]; cache as the result. Row q < count[b] goes to position start[b] + q.
    """
    batch, query = rows.shape[:2]
    heads, length, dim = cache.shape[1:]
    keys = heads // 2
    after = cache.astype(np.float64)
    rows = rows.reshape(batch, query, heads, dim)
    overflow = 0
    for b in range(batch):
        for q in range(min(int(count[b]), query)):
            position = int(start[b]) + q
            if not 0 <= position < length:
                overflow += 1
                continue
            new = rows[b, q].astype(np.float64)  # [2*L*Hkv, D]
            if k_norm is not None:
                weights = np.repeat(k_norm.astype(np.float64), keys // layers, axis=0)  # [L*Hkv, D]
                new[:keys] = rms_norm(new[:keys], weights, eps)
            new[:keys] = rotate(new[:keys], cos[b, q].astype(np.float64), sin[b, q].astype(np.float64))
            after[b, :, position] = new
    return after, overflow


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [n, D] with dimension i paired with i + R for i < R; what lies beyond 2R stays as it is."""
    turned = cos.shape[-1]
    low, high, rest = x[:, :turned], x[:, turned : 2 * turned], x[:, 2 * turned :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=1)
