"""Drives a session by hand, one row of tokens per slot, so that tests choose exactly what a call holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint import Pair, pair, read_draft, read_target
from dflash_trt.graph import SINGLE, place, write_step
from dflash_trt.runtime.ort_session import OrtSession
from dflash_trt.runtime.session import Limits, StepInputs


@dataclass(frozen=True)
class Row:
    """One slot's share of a call; an empty row is idle."""

    ids: Sequence[int] = ()
    given: int = 0
    past: int = 0


def load(
    target: Path,
    draft: Path | None,
    directory: Path,
    *,
    max_batch: int = 1,
    block_size: int | None = None,
    ops: str = "native",
) -> OrtSession:
    """The float32 debug graph of a pair (autoregressive without a drafter), ready to step."""
    checkpoint = read_target(target)
    checked = pair(checkpoint, read_draft(draft, block_size)) if draft else Pair(checkpoint, None)
    directory.mkdir()
    graph = write_step(place(checked, SINGLE, directory), directory, "rank0", dtype="float32", ops=ops, debug=True)
    width = checked.draft.config.block_size if checked.draft else 1
    return OrtSession(graph, Limits(max_batch, 512, width, 64), threads=1)


def inputs(block_size: int, rows: Sequence[Row], first: int = 0) -> StepInputs:
    """Rows as arrays, greedy; columns beyond a row's tokens hold a token that must not matter."""
    width = max(len(row.ids) for row in rows)
    ids = np.full((len(rows), width), 7, np.int64)
    for row, line in zip(rows, ids, strict=True):
        line[: len(row.ids)] = row.ids
    count = len(rows)
    return StepInputs(
        first,
        ids,
        np.array([len(row.ids) for row in rows], np.int64),
        np.array([row.given for row in rows], np.int64),
        np.array([row.past for row in rows], np.int64),
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int64),
        uniform=np.zeros((count, block_size), np.float32),
    )
