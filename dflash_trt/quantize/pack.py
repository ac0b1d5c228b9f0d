"""One linear, or all experts of a layer in one tensor, into the tensors that stand for it in an NVFP4 checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dflash_trt.checkpoint import nvfp4
from dflash_trt.checkpoint.mxfp4 import transpose_bytes
from dflash_trt.checkpoint.shards import ShardWriter, Slot
from dflash_trt.checkpoint.weights import slices
from dflash_trt.quantize.plan import Linear
from dflash_trt.quantize.source import check_finite


@dataclass(frozen=True)
class Scales:
    """The global scales of a group and the largest magnitudes they were made of."""

    weight: np.float32
    input: np.float32 | None  # None: the inputs stay as they are
    amax: float
    input_amax: float | None
    block: np.ndarray | None = None  # [out, in/16] of this linear, where a search chose the block scales


@dataclass(frozen=True)
class Layer:
    """What became of one linear; for the report."""

    module: str
    amax: float
    input_amax: float | None
    error: float  # root mean square of the weights' errors, relative to that of the weights
    outlier: float | None = None  # the largest weight in units of the weights' root mean square; None for a cast
    blocks: int = 0  # casts: blocks of 32 in the source
    outside: int = 0  # casts: of these, blocks (not of zeros) whose exponent is more than 17 below the largest
    changed: int = 0  # casts: of these, blocks whose values are not exactly the source's
    spread: int = 0  # casts: largest exponent minus smallest


def slots(linear: Linear, activations: bool) -> list[Slot]:
    """[codes, block scales, weight_scale_2] and, for W4A4, input_scale: the unified Hugging Face layout.

    Experts in one tensor have ModelOpt's names for them. They are [E, in, out] as in the model, so that codes and block
    scales are those of the transposed matrix, and gate and up rows stay as they are interleaved.
    """
    experts, rows, width = linear.shape
    if linear.kind == "linear":
        found = [
            Slot(f"{linear.module}.weight", "U8", (rows, width // 2)),
            Slot(f"{linear.module}.weight_scale", "F8_E4M3", (rows, width // nvfp4.BLOCK)),
        ]
    else:
        found = [
            Slot(linear.module, "U8", (experts, width // 2, rows)),
            Slot(f"{linear.module}_weight_scale", "F8_E4M3", (experts, width // nvfp4.BLOCK, rows)),
        ]
    scale = found[1].name
    found.append(Slot(f"{scale}_2", "F32", ()))
    return found + ([Slot(scale.replace("weight_scale", "input_scale"), "F32", ())] if activations else [])


def pack(linear: Linear, scales: Scales, writer: ShardWriter) -> Layer:
    """Quantize floats into `writer`: a few MiB at a time, of experts one at a time."""
    codes_slot, scale_slot, *_ = slots(linear, activations=False)
    turned = linear.kind == "experts"
    row, largest, power, error = 0, 0.0, 0.0, 0.0
    for values in _matrices(linear):
        largest = max(largest, check_finite(values, linear.ref))
        block = None if scales.block is None else scales.block[row : row + len(values)]
        codes, block_scales = nvfp4.encode(values, scales.weight, block)
        writer.write(codes_slot.name, transpose_bytes(codes) if turned else codes)
        writer.write(scale_slot.name, transpose_bytes(block_scales) if turned else block_scales)
        exact = values.astype(np.float32)
        power += _power(exact)
        exact -= nvfp4.decode(codes, block_scales, scales.weight)
        error += _power(exact)
        row += len(values)
    write_global(linear, scales, writer)
    mean = power / (row * linear.shape[2])
    return Layer(
        linear.module,
        scales.amax,
        scales.input_amax,
        error=(error / power) ** 0.5 if power else 0.0,
        outlier=largest / mean**0.5 if power else 0.0,
    )


def write_global(linear: Linear, scales: Scales, writer: ShardWriter) -> None:
    """The scales that have no axes."""
    wanted = slots(linear, scales.input is not None)[2:]
    for slot, scale in zip(wanted, (scales.weight, scales.input), strict=False):
        writer.write(slot.name, np.array(scale, np.float32))


def _matrices(linear: Linear) -> Iterator[np.ndarray]:
    """[rows, in]: blocks run along the last axis."""
    if linear.kind == "linear":
        yield from slices(linear.ref)
    else:
        for expert in slices(linear.ref, size=0):
            yield np.ascontiguousarray(expert[0].T)


def _power(values: np.ndarray) -> float:
    flat = values.reshape(-1)
    power = float(np.einsum("i,i->", flat, flat))  # one thread, whatever BLAS would start
    return power if 1e-20 < power < np.inf else float(np.square(flat, dtype=np.float64).sum())  # out of float32's range
