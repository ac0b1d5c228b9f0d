"""Look for NaN and Inf in weights, a few MiB at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflash_trt.checkpoint.experts import is_mxfp4_scale
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.checkpoint.weights import DTYPES, load_tensor

CHUNK = 8 << 20  # bytes
# A value is not finite if all these bits are set. The two fp8 types without sign or Inf have a single NaN pattern.
NOT_FINITE = {
    "F64": 0x7FF0_0000_0000_0000, "F32": 0x7F80_0000, "BF16": 0x7F80, "F16": 0x7C00,
    "F8_E5M2": 0x7C, "F8_E4M3": 0x7F, "F8_E8M0": 0xFF,
}  # fmt: skip


@dataclass(frozen=True)
class NotFinite:
    """What `scan` found in one tensor."""

    name: str
    nans: int
    infs: int
    first: tuple[int, ...]  # index of the first of them

    def __str__(self) -> str:
        return f"{self.name} holds {self.nans} NaN and {self.infs} Inf, the first at {list(self.first)}"


def scan(ref: TensorRef) -> NotFinite | None:
    """None if all values are finite. Memory stays bounded whatever the tensor's size."""
    dtype = "F8_E8M0" if ref.dtype == "U8" and is_mxfp4_scale(ref.name) else ref.dtype
    if dtype not in NOT_FINITE:
        return None
    width = DTYPES[dtype].itemsize
    mask = np.array(NOT_FINITE[dtype], f"u{width}")
    nans = infs = 0
    first = None
    for begin in range(0, ref.nbytes, CHUNK):
        size = min(CHUNK, ref.nbytes - begin) // width
        piece = load_tensor(TensorRef(ref.name, ref.file, ref.offset + begin, size * width, dtype, (size,)))
        bad = np.flatnonzero((piece.view(mask.dtype) & mask) == mask)
        if bad.size:
            first = begin // width + int(bad[0]) if first is None else first
            with np.errstate(invalid="ignore"):  # a NaN is what is looked for
                nan = int(np.count_nonzero(np.isnan(piece[bad].astype(np.float64))))
            nans, infs = nans + nan, infs + bad.size - nan
    if first is None:
        return None
    return NotFinite(ref.name, nans, infs, tuple(int(i) for i in np.unravel_index(first, ref.shape)))
