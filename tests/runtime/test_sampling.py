"""The counter-based random numbers behind sampling."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from dflash_trt.runtime.sampling import uniforms


def seeds(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    ("seed", "position"),
    [
        (seeds(0), np.arange(100_000)),
        (seeds(2**64 - 1), np.arange(100_000)),
        (np.arange(100_000, dtype=np.uint64), np.array([17])),
        (np.arange(0, 2**40, 2**23, dtype=np.uint64)[:, None], np.arange(4)),
    ],
    ids=["positions of one seed", "positions of the last seed", "neighbouring seeds", "seeds that differ in high bits"],
)
def test_numbers_are_uniform(seed, position):
    drawn = uniforms(seed, position).ravel()
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3
    counts = np.histogram(drawn, bins=256, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_neighbours_are_independent():
    grid = uniforms(np.arange(400, dtype=np.uint64)[:, None], np.arange(400))
    for one, other in [(grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1]), (grid, grid.T)]:
        if one is not grid:
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01
    assert len(np.unique(grid)) > 0.99 * grid.size, "seed s at position p must not repeat seed p at position s"


def test_one_is_never_drawn():
    largest = np.float32(2**24 - 1) * np.float32(2**-24)
    assert uniforms(seeds(3), np.arange(2_000_000)).max() <= largest < 1


def test_a_position_draws_the_same_number_in_any_company():
    alone = uniforms(seeds(5), np.array([40]))[0]
    assert uniforms(seeds(1, 5, 9)[:, None], np.arange(32, 48))[1, 8] == alone
    assert uniforms(seeds(5), np.array([41]))[0] != alone
