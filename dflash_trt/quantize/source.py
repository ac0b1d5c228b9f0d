"""Read a checkpoint's tensors in pieces; NaN and Inf end the work where they are met."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.checkpoint.scan import NOT_FINITE, scan
from dflash_trt.checkpoint.weights import slices
from dflash_trt.errors import UserError

ALL_BUT_SIGN = {"BF16": 0x7FFF, "F16": 0x7FFF, "F32": 0x7FFF_FFFF}


def flat(ref: TensorRef) -> Iterator[np.ndarray]:
    """The values of a tensor of any shape, some at a time."""
    return slices(replace(ref, shape=(math.prod(ref.shape),)))


def find_amax(ref: TensorRef) -> float:
    """The largest magnitude of a tensor of floats. Raises UserError for NaN and Inf."""
    return max((check_finite(piece, ref) for piece in flat(ref)), default=0.0)


def check_finite(values: np.ndarray, ref: TensorRef) -> float:
    """The largest magnitude of a piece of `ref`. Raises UserError, naming the first of them, for NaN and Inf."""
    # Floats without their sign are ordered as their bits are, and NaN and Inf come last.
    bits = values.reshape(-1).view(f"u{values.itemsize}")
    top = np.bitwise_and(bits, ALL_BUT_SIGN[ref.dtype]).max(keepdims=True)
    if top[0] >= NOT_FINITE[ref.dtype]:
        fix = "the checkpoint is damaged; download it again or train on"
        raise UserError(str(scan(ref)), where=ref.file, fix=fix)
    return float(top.view(values.dtype)[0])
