"""Random numbers that depend on nothing but a request's seed and a token's position.

A counter-based generator (Salmon et al., SC 2011) has no state to advance, so a position draws the same number whether
it is decoded alone or in a batch, after any chunking, and whether the token before it was drafted or not.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """float32 in [0, 1) for every pair of `seed` (uint64) and `position` (int64), which broadcast."""
    bits = _mix(_mix(seed) + position.astype(np.uint64) * _GAMMA)
    return (bits >> 40).astype(np.float32) * np.float32(2**-24)  # 24 bits: rounding never yields 1.0


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = x + _GAMMA
    x = (x ^ (x >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> 31)
