"""NVFP4 scales as TensorRT-LLM's FP4 linears take them (`FP4Linear`, `FP4RowLinear` in its `quantization/layers.py`).

    weights_block_scaling_factor              e4m3 [out, in/16]       as ModelOpt has them
    weights_block_scaling_factor_interleaved  e4m3 [out to 128, in/16 to 4]  the same, in tiles of 128 x 4
    weights_global_scaling_factor             float32 [1]             weight_scale_2
    activation_global_scaling_factor          float32 [1]             input_scale
    alpha                                     float32 [1]             their product

A tile is 512 bytes: entry (r, c) lies at 16 (r mod 32) + 4 (r div 32) + c. Tiles follow each other along a row of
tiles first. What the padding holds is zero.

ModelOpt's own TensorRT-LLM files have other names (`weights_scaling_factor`, …), which 1.2's loader turns into these;
it leaves these as they are, and computes `alpha` again, to the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.checkpoint import TensorRef, load_tensor
from dflash_trt.checkpoint.nvfp4 import FLOAT8
from dflash_trt.checkpoint.quantized import part_name
from dflash_trt.errors import UserError

ROWS, COLUMNS = 128, 4  # of a tile
LANE = 32  # rows whose scales lie 16 bytes apart
SIGN, NAN = 0x80, 0x7F  # of an e4m3 byte
TIE = "quantize again with `dflash-trt quantize`, which ties them"


@dataclass(frozen=True)
class Globals:
    """The two scales that the members of one linear share."""

    weight: np.float32
    input: np.float32

    @property
    def alpha(self) -> np.float32:
        return np.float32(self.input * self.weight)


def read_globals(tensors: Mapping[str, TensorRef], modules: Sequence[str]) -> Globals:
    """Raises UserError unless all members scale their input alike; of the weights' scales the largest counts."""
    return Globals(
        max(_scalar(tensors, module, "weight_scale_2") for module in modules), read_input_scale(tensors, modules)
    )


def read_input_scale(tensors: Mapping[str, TensorRef], modules: Sequence[str]) -> np.float32:
    """Of linears that read the same input."""
    scales = [_scalar(tensors, module, "input_scale") for module in modules]
    for module, scale in zip(modules, scales, strict=True):
        if scale != scales[0]:
            ref = tensors[part_name(module, "input_scale")]
            other = part_name(modules[0], "input_scale")
            what = f"{ref.name} is {scale:g}, {other} is {scales[0]:g}; TensorRT-LLM quantizes their input once"
            raise UserError(what, where=ref.file, fix=TIE)
    return scales[0]


def read_blocks(tensors: Mapping[str, TensorRef], module: str, common: np.float32) -> np.ndarray:
    """Block scales e4m3 [out, in/16] of a module under a global scale that may be another than its own.

    Raises UserError for damaged scales, and if no e4m3 scales say exactly the same under `common`.
    """
    ref = tensors[part_name(module, "weight_scale")]
    scales, own = load_tensor(ref), _scalar(tensors, module, "weight_scale_2")
    bits = scales.view(np.uint8)
    for bad, what in (((bits & NAN) == NAN, "NaN"), (bits > SIGN, "a negative number")):
        if bad.any():
            first = [int(i) for i in np.argwhere(bad)[0]]
            raise UserError(f"{ref.name} holds {what} at {first}", where=ref.file, fix="quantize again")
    if own == common:
        return scales
    values = scales.astype(np.float32)
    changed = (values * np.float64(own) / np.float64(common)).astype(np.float32).astype(FLOAT8)
    if (changed.astype(np.float32) * common != values * own).any():
        name = part_name(module, "weight_scale_2")
        what = (
            f"{tensors[name].name} is {own:g}, that of its neighbours {common:g}; TensorRT-LLM has one for q, k and v"
        )
        raise UserError(what, where=ref.file, fix=TIE)
    return changed


def interleave(scales: np.ndarray) -> np.ndarray:
    """[rows, columns] → [rows to 128, columns to 4] in tiles."""
    rows, columns = scales.shape
    padded = np.pad(scales.view(np.uint8), ((0, -rows % ROWS), (0, -columns % COLUMNS)))
    down, across = padded.shape[0] // ROWS, padded.shape[1] // COLUMNS
    tiles = padded.reshape(down, ROWS // LANE, LANE, across, COLUMNS).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(padded.shape).view(scales.dtype)


def interleaved_shape(rows: int, columns: int) -> tuple[int, int]:
    return rows + -rows % ROWS, columns + -columns % COLUMNS


def _scalar(tensors: Mapping[str, TensorRef], module: str, part: str) -> np.float32:
    return np.float32(load_tensor(tensors[part_name(module, part)]).reshape(()))
