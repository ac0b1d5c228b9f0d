"""MXFP4 experts of gpt-oss into NVFP4 without another rounding: codes are copied, scales are split in two.

An MXFP4 block has the scale 2^k. With the global scale 2^(k_max - 8) the same power of two is an e4m3 block scale,
exactly, as long as k_max - k <= 17; blocks further down, 2^-17 of the largest weights, are rounded again and counted.
The rule, the names and the axes are those of ModelOpt 0.47 (examples/hf_ptq/cast_mxfp4_to_nvfp4.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from dflash_trt.checkpoint import mxfp4, nvfp4
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.checkpoint.shards import ShardWriter
from dflash_trt.checkpoint.weights import load_tensor, slices
from dflash_trt.errors import UserError
from dflash_trt.quantize.pack import Layer, Scales, slots, write_global
from dflash_trt.quantize.plan import Linear

ZERO = 0  # e8m0's smallest, 2^-127: writers give it to blocks of zeros
SQUARES = np.square(nvfp4.BYTE_VALUES).sum(-1)  # of a byte
ROWS = 64  # of an expert at once, where values are computed: its floats would be eight times its bytes


def cast(linear: Linear, scales: Scales, writer: ShardWriter) -> Layer:
    """Cast one tensor into `writer`, expert by expert; the weights decide about the global scale."""
    e8m0 = _load_scales(linear)
    k_max = mxfp4.largest_exponent(e8m0)
    scale = mxfp4.nvfp4_scale(k_max)
    error = 0.0
    outside = changed = 0
    codes_slot, scale_slot, *_ = slots(linear, activations=False)
    for blocks, exponents in zip(_experts(linear.ref), e8m0, strict=True):
        done = mxfp4.to_nvfp4(blocks, exponents, k_max)
        writer.write(codes_slot.name, mxfp4.transpose_bytes(done.codes))
        writer.write(scale_slot.name, mxfp4.transpose_bytes(done.scales))
        outside, changed = outside + done.out_of_window, changed + done.changed
        if done.changed:
            error += _error(blocks, exponents, done, scale)
    # Of all weights, which only a tensor that lost something is read again for.
    power = sum(map(_power, _experts(linear.ref), e8m0)) if error else 0.0
    amax = float(scale) * nvfp4.E2M1_MAX * nvfp4.E4M3_MAX
    write_global(linear, dataclasses.replace(scales, weight=scale), writer)
    used = e8m0[e8m0 > ZERO]
    return Layer(
        linear.module,
        amax,
        scales.input_amax,
        error=(error / power) ** 0.5 if power else 0.0,
        blocks=e8m0.size,
        outside=outside,
        changed=changed,
        spread=int(used.max()) - int(used.min()) if used.size else 0,
    )


def _load_scales(linear: Linear) -> np.ndarray:
    """e8m0 [E, out, in/32]; a thirty-third of the tensor."""
    assert linear.scales is not None
    scales = load_tensor(linear.scales)
    if (bad := np.argwhere(scales == mxfp4.NAN)).size:
        what = f"{linear.scales.name} holds {len(bad)} NaN, the first at {bad[0].tolist()}"
        raise UserError(what, where=linear.scales.file, fix="the checkpoint is damaged; download it again")
    return scales


def _error(blocks: np.ndarray, exponents: np.ndarray, done: mxfp4.Cast, scale: np.float32) -> float:
    """The sum of an expert's squared differences."""
    total = 0.0
    for rows in _rows(blocks):
        lost = mxfp4.decode(blocks[rows], exponents[rows]).astype(np.float64)
        lost -= nvfp4.decode(done.codes[rows], done.scales[rows], scale)
        total += float(np.square(lost).sum())
    return total


def _power(blocks: np.ndarray, exponents: np.ndarray) -> float:
    """The sum of an expert's squared values."""
    total = 0.0
    for rows in _rows(blocks):
        units = SQUARES[blocks[rows]].sum(-1, dtype=np.float64)  # [rows, n]
        total += float(np.ldexp(units, 2 * (exponents[rows].astype(np.int32) - mxfp4.BIAS)).sum())
    return total


def _rows(blocks: np.ndarray) -> Iterator[slice]:
    return (slice(begin, begin + ROWS) for begin in range(0, len(blocks), ROWS))


def _experts(ref: TensorRef) -> Iterator[np.ndarray]:
    for expert in slices(ref, size=0):
        yield expert[0]
