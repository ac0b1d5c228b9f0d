"""NVFP4: e2m1 codes, an e4m3 scale for each 16 of them, one float32 scale over all.

value = VALUES[code] × (float32(block scale) × global scale), in this order.
Two codes a byte, the first in the low half.

The bytes are those of ModelOpt 0.47 (`NVFP4QTensor.quantize`) on a CPU for the same global scale, except where its
result would be of no use or hide a fault:

* an all-zero tensor (or one so small that amax / 2688 is zero): its global scale is 0 and its block scales are NaN (or
  448); ours are 1 and decode to zeros;
* a last dimension that is not a multiple of 16 is padded there and refused here;
* NaN spoils its block and infinity is clipped there, silently; both are refused here;
* code 8 decodes to 0 there and to -0 here, as in ONNX's FLOAT4E2M1 and in MXFP4: equal in value.

ModelOpt's export of *static* quantizers divides in another order: of bfloat16 weights about one block scale in some
thousand then falls on the other side of a tie, and blocks of zeros get another scale. All decode to what they should.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the smallest subnormal
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by code

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # where the code steps up
TIES_UP = (False, True, False, True, False, True, False)  # to the even code
NOTHING = 2.0**-150  # what float32 rounds to zero, and then ModelOpt sees no sign
# (low, high) of each byte; read through uint64 as one item
BYTE_VALUES = np.stack([VALUES[np.arange(256) & 15], VALUES[np.arange(256) >> 4]], -1)  # [256, 2]: both of a byte
PAIRS = BYTE_VALUES.view(np.uint64).ravel()
CHUNK = 8192  # blocks at once: what is computed from them fits a core's cache


def global_scale(amax: float) -> np.float32:
    """`weight_scale_2` (or `input_scale`) of a tensor whose largest magnitude is `amax`; 1 for zeros."""
    scale = np.float32(amax) / np.float32(E2M1_MAX * E4M3_MAX)
    if not np.isfinite(scale) or scale < 0:
        raise ValueError(f"a largest magnitude of {amax} cannot be scaled to NVFP4")
    return scale if scale > 0 else np.float32(1)


def encode(
    values: np.ndarray, scale: np.float32, block_amax: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """values [..., in] → (codes uint8 [..., in/2], block scales float8_e4m3fn [..., in/16]).

    `values` are bfloat16, float16 or float32; `block_amax` [..., in/16] stands in for the blocks' own maxima. A
    block of zeros gets scale 1. Raises ValueError for other dtypes and shapes and for values that are not finite.
    """
    scale = np.float32(scale)
    if values.dtype not in (BFLOAT16, np.float16, np.float32):
        raise ValueError(f"cannot encode {values.dtype} as NVFP4")
    if values.ndim == 0 or values.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension of {list(values.shape)} is not a multiple of {BLOCK}")
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"a global scale of {scale} is not positive and finite")
    *rows, width = values.shape
    codes = np.empty((*rows, width // 2), np.uint8)
    scales = np.empty((*rows, width // BLOCK), FLOAT8)
    if block_amax is not None and (block_amax.shape != scales.shape or not _is_amax(block_amax)):
        raise ValueError(f"block maxima {list(block_amax.shape)} are not {list(scales.shape)} finite magnitudes")
    steps = _steps(values.dtype, scale)
    source, amax = np.ascontiguousarray(values).reshape(-1, BLOCK), None
    to_codes, to_scales = codes.reshape(-1, BLOCK // 2), scales.reshape(-1)
    for start in range(0, len(source), CHUNK):
        part = slice(start, start + CHUNK)
        if block_amax is not None:
            amax = block_amax.reshape(-1)[part].astype(np.float32)
        _encode_blocks(source[part], scale, amax, steps, to_codes[part], to_scales[part])
    return codes, scales


def decode(codes: np.ndarray, scales: np.ndarray, scale: np.float32) -> np.ndarray:
    """(codes uint8 [..., in/2], block scales [..., in/16]) → float32 [..., in]"""
    if (*codes.shape[:-1], codes.shape[-1] * 2) != (*scales.shape[:-1], scales.shape[-1] * BLOCK):
        raise ValueError(f"block scales {list(scales.shape)} do not fit codes {list(codes.shape)}")
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        factors = scales.astype(np.float32) * np.float32(scale)
    return expand(codes.reshape(*scales.shape, BLOCK // 2), factors)


def expand(blocks: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Codes uint8 [..., n, bytes of a block] times float32 [..., n], as float32 [..., n × values of a block]."""
    *rows, count, size = blocks.shape
    values = np.empty((*rows, count * size * 2), np.float32)
    source, target, factors = blocks.reshape(-1, size), values.reshape(-1, size * 2), factors.reshape(-1, 1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, len(source), CHUNK):
            part = slice(start, start + CHUNK)
            PAIRS.take(source[part], out=target[part].view(np.uint64), mode="clip")  # only "clip" writes in place
            target[part] *= factors[part]
    return values


def _encode_blocks(
    values: np.ndarray,  # [N, 16]
    scale: np.float32,
    amax: np.ndarray | None,  # float32 [N]
    steps: np.ndarray,
    codes: np.ndarray,  # [N, 8], written
    scales: np.ndarray,  # [N], written
) -> None:
    """Magnitudes compare as the integers they are stored as: seven comparisons make a code, and nothing is divided.

    A block is W words of 64 bits with `lanes` values each; words are transposed so that all loops run over blocks.
    """
    bits = np.dtype(f"u{values.itemsize}")
    lanes = 8 // values.itemsize
    words = np.ascontiguousarray(values.view(np.uint64).T)  # [W, N]
    magnitudes = words.view(bits)  # [W, N × lanes]
    sign = bits.type(1 << (8 * bits.itemsize - 1))
    code = (magnitudes > sign).view(np.uint8) * np.uint8(8)  # the sign, but not that of -0
    words &= np.uint64(_spread(sign - 1, bits))
    largest = magnitudes.max(0)
    while len(largest) > len(values):
        largest = np.maximum(largest[::2], largest[1::2])
    largest = largest.view(values.dtype).astype(np.float32)
    if not np.isfinite(largest).all():
        raise ValueError("a value is not finite")
    scales[:] = _block_scales(largest if amax is None else amax, scale)
    index = scales.view(np.uint8).astype(np.intp)
    nothing, *bounds = steps
    if (nothing > _spread(1, bits)).any():
        code *= (magnitudes >= nothing.take(index).view(bits)).view(np.uint8)
    for step in bounds:
        code += (magnitudes >= step.take(index).view(bits)).view(np.uint8)
    pairs = code.view(np.uint16)  # one code a byte → two, little-endian
    pairs |= pairs >> 4
    word = np.dtype(f"u{lanes // 2}")
    for column, packed in enumerate(pairs.astype(np.uint8).view(word)):
        codes.view(word)[:, column] = packed


def _is_amax(values: np.ndarray) -> bool:
    values = values.astype(np.float32)
    return bool((np.isfinite(values) & (values >= 0)).all())


def _block_scales(amax: np.ndarray, scale: np.float32) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        wanted = amax / (np.float32(E2M1_MAX) * scale)
    wanted[wanted == 0] = 1
    return wanted.clip(E4M3_MIN, E4M3_MAX).astype(FLOAT8)


@functools.lru_cache(maxsize=64)
def _steps(dtype: np.dtype, scale: np.float32) -> np.ndarray:
    """uint64 [8, 128]: for each bound and block scale the bits of the smallest magnitude beyond it, in every lane.

    Beyond: value / (block scale × global scale), divided in float32, passes the bound. So the division's rounding is in
    here. Where the product underflows to zero every value is beyond, as infinity and NaN are for ModelOpt.
    """
    bits = np.dtype(f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        divisor = np.arange(128, dtype=np.uint8).view(FLOAT8).astype(np.float32) * scale
        divisor[127] = 1  # NaN, which no block has
        bound = np.array([NOTHING, *BOUNDS])[:, None]
        ties_up = np.array([False, *TIES_UP])[:, None]

        def beyond(value: np.ndarray) -> np.ndarray:
            ratio = value / divisor
            return ~np.where(ties_up, ratio < bound, ratio <= bound)

        value = (bound * divisor).astype(np.float32)  # at most an ulp or two off
        while not (reached := beyond(value)).all():
            value = np.where(reached, value, np.nextafter(value, np.float32(np.inf)))
        while (early := (value > 0) & beyond(lower := np.nextafter(value, np.float32(0)))).any():
            value = np.where(early, lower, value)
        stored = value.astype(dtype)
        stored_bits = stored.view(bits) + (stored.astype(np.float32) < value)  # the next one up
    return _spread(stored_bits, bits)


def _spread(value: np.ndarray | int, bits: np.dtype) -> np.ndarray:
    """The same bits in every lane of a 64-bit word."""
    return np.asarray(value).astype(np.uint64) * np.uint64(sum(1 << shift for shift in range(0, 64, 8 * bits.itemsize)))
