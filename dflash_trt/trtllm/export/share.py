"""How a tensor of a checkpoint is cut over the ranks of tensor parallelism.

Rows are cut where a projection's outputs are (column-parallel, in TensorRT-LLM's words), columns where its inputs are
(row-parallel). Of a row-major tensor a cut of rows is one range of the file, a cut of columns is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Share:
    """`parts` equal parts along `axis`; where there are fewer than ranks, neighbouring ranks hold the same one."""

    axis: Literal["rows", "columns"] | None  # None: every rank holds all of it
    parts: int = 1

    def bounds(self, size: int, rank: int, tp: int) -> tuple[int, int]:
        """First and end of a rank's part of `size` entries. Where they do not divide, the last parts end beyond."""
        each, part = -(-size // self.parts), rank * self.parts // tp
        return part * each, (part + 1) * each

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of one rank's part."""
        if self.axis is None:
            return shape
        axis = 0 if self.axis == "rows" else 1
        first, end = self.bounds(shape[axis], 0, 1)
        return (*shape[:axis], end - first, *shape[axis + 1 :])

    def cut(self, values: np.ndarray, begin: int, rows: int, rank: int, tp: int) -> np.ndarray:
        """What of `values`, the rows from `begin` on of a tensor with `rows` rows, belongs to a rank."""
        if self.axis is None:
            return values
        if self.axis == "columns":
            first, end = self.bounds(values.shape[1], rank, tp)
            return values[:, first:end]
        first, end = self.bounds(rows, rank, tp)
        return values[max(first - begin, 0) : max(end - begin, 0)]

    def missing(self, rows: int, rank: int, tp: int) -> int:
        """Rows of a rank's part that the tensor does not have."""
        if self.axis != "rows":
            return 0
        first, end = self.bounds(rows, rank, tp)
        return end - max(first, min(end, rows))


WHOLE = Share(None)
