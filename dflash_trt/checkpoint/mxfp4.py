"""MXFP4 (OCP Microscaling 1.0): e2m1 codes, a power of two (e8m0) for each 32 of them; and its cast to NVFP4.

value = VALUES[code] × 2^(e8m0 - 127); two codes a byte, the first in the low half.

The cast: with k a block's exponent and k_max the largest, both halves of the block get NVFP4's block scale
2^(k - k_max + 8) and the tensor gets the global scale 2^(k_max - 8). e4m3 has the powers of two from 2^-9 to 2^8, so a
block with k_max - k <= 17 keeps its codes and its exact values. Others get 2^-9 and codes rounded to it; no other scale
serves them better, since all are multiples of it and such a block reaches no further than half its range.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from dflash_trt.checkpoint.nvfp4 import CHUNK, FLOAT8, VALUES, expand

BLOCK = 32
BIAS = 127
NAN = 255
E4M3_TOP, E4M3_BOTTOM = 8, -9  # exponents of the largest and the smallest power of two
WINDOW = E4M3_TOP - E4M3_BOTTOM

FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
with np.errstate(invalid="ignore"):
    POWERS = np.append(np.ldexp(np.float32(1), np.arange(NAN) - BIAS), np.float32(np.nan))  # by e8m0
STRIP = 192  # rows transposed at once: a cache line of each fits a core's first cache


@dataclass(frozen=True)
class Cast:
    codes: np.ndarray  # uint8 [..., n*16]
    scales: np.ndarray  # float8_e4m3fn [..., 2n]
    changed: int  # blocks of 32 whose values are not exactly the source's
    out_of_window: int  # blocks with k_max - k > 17 that hold more than zeros


def encode(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """values [..., 32n] → (blocks uint8 [..., n, 16], scales uint8 [..., n]); exponent floor(log2(amax)) - 2.

    Rounds half to even and clips, so magnitudes in (7, 8) × 2^k become 6 × 2^k. Raises ValueError for a last dimension
    that is not a multiple of 32 and for values that are not finite.
    """
    if values.ndim == 0 or values.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension of {list(values.shape)} is not a multiple of {BLOCK}")
    *rows, width = values.shape
    blocks = np.empty((*rows, width // BLOCK, BLOCK // 2), np.uint8)
    scales = np.empty((*rows, width // BLOCK), np.uint8)
    source = np.ascontiguousarray(values).reshape(-1, BLOCK)
    to_blocks, to_scales = blocks.reshape(-1, BLOCK // 2), scales.reshape(-1)
    for start in range(0, len(source), CHUNK):
        part = slice(start, start + CHUNK)
        x = source[part].astype(np.float32)
        amax = np.abs(x).max(-1)
        if not np.isfinite(amax).all():
            raise ValueError("a value is not finite")
        exponent = np.where(amax > 0, np.frexp(amax)[1] - 3, -BIAS).clip(-BIAS)  # frexp's mantissa is in [0.5, 1)
        codes = np.ldexp(x, -exponent[:, None]).astype(FLOAT4).view(np.uint8)
        to_blocks[part] = codes[:, 0::2] | codes[:, 1::2] << 4
        to_scales[part] = exponent + BIAS
    return blocks, scales


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """(blocks uint8 [..., n, 16], scales uint8 [..., n]) → float32 [..., 32n], NaN where a scale is."""
    blocks, scales = _checked(blocks, scales)
    return expand(blocks, POWERS[scales])


def largest_exponent(scales: np.ndarray) -> int:
    """k_max. Scales of e8m0 0 do not count (encoders give it to blocks of zeros); 0 where there is no other."""
    return (int(scales.view(np.uint8).max(initial=0)) or BIAS) - BIAS


def nvfp4_scale(k_max: int) -> np.float32:
    return np.ldexp(np.float32(1), k_max - E4M3_TOP)


def to_nvfp4(
    blocks: np.ndarray, scales: np.ndarray, k_max: int, out: tuple[np.ndarray, np.ndarray] | None = None
) -> Cast:
    """blocks uint8 [..., n, 16], scales uint8 [..., n] of a tensor or a slice of one; `k_max` is the whole tensor's.

    The result is written into `out` (codes, scales; C-contiguous). Without it the codes are a read-only view of
    `blocks` if none of them had to change. Raises ValueError for NaN scales and for exponents above k_max.
    """
    blocks, scales = _checked(blocks, scales)
    top = int(scales.max(initial=0))
    if top == NAN:
        raise ValueError("a scale is NaN (e8m0 255)")
    if not top - BIAS <= k_max <= BIAS:
        raise ValueError(f"k_max {k_max} is not the largest exponent, which is at least {top - BIAS}")
    lowest = k_max + BIAS - WINDOW  # the e8m0 that becomes 2^-9
    low = int(scales.min(initial=NAN)) < lowest
    outside = np.flatnonzero(scales < lowest) if low else np.empty(0, np.intp)
    shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK // 2)
    if out is not None:
        codes, to_scales = out
        wanted = [shape, (*scales.shape[:-1], 2 * scales.shape[-1])]
        if [codes.shape, to_scales.shape] != wanted or not all(target.flags.c_contiguous for target in out):
            raise ValueError(f"`out` must be C-contiguous, of shapes {wanted}")
        codes[...] = blocks.reshape(shape)
    else:
        codes, to_scales = blocks.reshape(shape), np.empty((*scales.shape[:-1], 2 * scales.shape[-1]), FLOAT8)
        if outside.size:
            codes = codes.copy()
        else:
            codes.flags.writeable = False
    _remap(scales, lowest, outside, to_scales)
    changed = out_of_window = 0
    for start in range(0, outside.size, CHUNK):
        index = outside[start : start + CHUNK]
        lost = np.minimum(lowest - scales.reshape(-1)[index].astype(np.intp), len(ROUNDED) - 1)[:, None]
        before = blocks.reshape(-1, BLOCK // 2)[index]
        codes.reshape(-1, BLOCK // 2)[index] = ROUNDED[lost, before]
        changed += int((~KEPT[lost, before]).any(-1).sum())
        out_of_window += int((before & 0x77).any(-1).sum())
    return Cast(codes, to_scales, changed, out_of_window)


def transpose_bytes(source: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """[..., r, c] → [..., c, r] of a one-byte type, a strip of rows at a time.

    The strip lies in a buffer of odd width: columns of rows a power of two apart would share few places of a cache.
    """
    *rows, r, c = source.shape
    target = np.empty((*rows, c, r), source.dtype) if out is None else out
    buffer = np.empty((STRIP, (c // 64 + 1 | 1) * 64), np.uint8)  # an odd number of cache lines
    for index in np.ndindex(*rows):
        before, after = source[index].view(np.uint8), target[index].view(np.uint8)
        for start in range(0, r, STRIP):
            strip = buffer[: r - start, :c]
            strip[:] = before[start : start + STRIP]
            after[:, start : start + STRIP] = strip.T
    return target


def _checked(blocks: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if blocks.shape != (*scales.shape, BLOCK // 2) or scales.ndim == 0:
        raise ValueError(f"scales {list(scales.shape)} do not fit blocks {list(blocks.shape)}")
    if blocks.itemsize != 1 or scales.itemsize != 1:
        raise ValueError(f"blocks and scales are bytes, not {blocks.dtype} and {scales.dtype}")
    return blocks.view(np.uint8), np.ascontiguousarray(scales).view(np.uint8)


def _remap(scales: np.ndarray, lowest: int, outside: np.ndarray, out: np.ndarray) -> None:
    """e8m0 [..., n] → e4m3 [..., 2n], each twice: 2^(e8m0 - lowest - 9), and 2^-9 for those outside.

    The e4m3 codes of 2^(x - 9) are 1, 2, 4 and then 8 × (x - 2): the largest of three straight lines. Arithmetic on
    bytes (which wrap, for a negative `lowest`) is several times faster than a table.
    """
    x = (scales - np.uint8(lowest % 256)).view(np.int8)
    x.reshape(-1)[outside] = 0
    code = x - np.int8(2)
    code *= np.int8(8)
    np.maximum(code, x * np.int8(2), out=code)
    x += np.int8(1)
    np.maximum(code, x, out=code)
    np.multiply(code.view(np.uint8), np.uint16(0x0101), out=out.view(np.uint16))


def _rounding() -> tuple[np.ndarray, np.ndarray]:
    """[d, byte]: the byte's two codes times 2^-d, and whether both are exact. From d = 5 on all is zero (or -0)."""
    wanted = np.ldexp(VALUES, -np.arange(6)[:, None])
    codes = wanted.astype(FLOAT4).view(np.uint8)
    exact = VALUES[codes] == wanted
    byte = np.arange(256)
    return codes[:, byte & 15] | codes[:, byte >> 4] << 4, exact[:, byte & 15] & exact[:, byte >> 4]


ROUNDED, KEPT = _rounding()
