"""NVFP4 in the graph: unpack a checkpoint's bytes, and round activations as the weights were rounded (W4A4).

For TensorRT these are FLOAT4E2M1 codes with two-level `DequantizeLinear`, and `TRT_FP4DynamicQuantize` (domain `trt`);
its compiler makes one 4-bit matrix product of them. ONNX Runtime's CPU provider has no 4-bit kernels; there they are
functions of standard ops over the same bytes, so that a CPU run shows what the rounding does to a model. TensorRT gets
no functions: its parser names the layers of two calls alike, and refuses that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.nvfp4 import BLOCK, BYTE_VALUES, E2M1_MAX, E4M3_MAX
from dflash_trt.graph.function import Body, Op
from dflash_trt.graph.net import Net

TRT = "trt"
F8, F32 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT


def unpack(net: Net, codes: ir.Value, scales: ir.Value, global_scale: ir.Value) -> ir.Value:
    """Packed bytes → weight [out, in] in the graph's dtype."""
    if net.native:
        return net.from_float32(_native_weight(net.op, codes, scales, global_scale))
    return net.from_float32(net.call(Op("Nvfp4Weight", _weight), codes, scales, global_scale))


def round_rows(net: Net, x: ir.Value, global_scale: ir.Value) -> ir.Value:
    """Activations [T, in] → the nearest NVFP4 values under `global_scale`, in the graph's dtype."""
    if net.native:
        return net.from_float32(_native_activation(net.op, x, global_scale))
    return net.from_float32(net.call(Op("Nvfp4Activation", round_body), x, global_scale))


def _native_weight(op: Callable[..., Any], codes: ir.Value, scales: ir.Value, global_scale: ir.Value) -> ir.Value:
    scales = op("DequantizeLinear", scales, global_scale)
    return op("DequantizeLinear", codes, scales, axis=-1, block_size=BLOCK)


def _native_activation(op: Callable[..., Any], x: ir.Value, global_scale: ir.Value) -> ir.Value:
    codes, scales = op(
        "TRT_FP4DynamicQuantize", x, global_scale, domain=TRT, outputs=2, axis=-1, block_size=BLOCK, scale_type=int(F8)
    )
    return _native_weight(op, codes, scales, global_scale)


def _weight(op: Body, codes: ir.Value, scales: ir.Value, global_scale: ir.Value) -> ir.Value:
    """One lookup gives both values of a byte, the low half's first."""
    values = op("Gather", BYTE_VALUES, op("Cast", codes, to=int(ir.DataType.INT32)), axis=0)  # [out, in/2, 2]
    blocks = op("Reshape", values, np.array([0, -1, BLOCK]))
    scale = op("Mul", op("Cast", scales, to=int(F32)), global_scale)  # [out, in/16]
    return _flat(op, op("Mul", blocks, op("Unsqueeze", scale, np.array([-1]))))


def round_body(op: Body, x: ir.Value, global_scale: ir.Value) -> ir.Value:
    """Round to even among the e2m1 values: multiples of 0.5 below 2, of 1 below 4, of 2 up to 6.

    A block whose scale underflows becomes zero, as in TensorRT-LLM's kernels.
    """
    blocks = op("Reshape", op("Cast", x, to=int(F32)), np.array([0, -1, BLOCK]))
    amax = op("ReduceMax", op("Abs", blocks), np.array([-1]), keepdims=1)  # [T, in/16, 1]
    scale = op("Div", amax, op("Mul", global_scale, np.float32(E2M1_MAX)))
    scale = op("Min", scale, np.float32(E4M3_MAX))
    scale = op("Mul", op("Cast", op("Cast", scale, to=int(F8)), to=int(F32)), global_scale)
    empty = op("Equal", scale, np.float32(0))
    y = op("Div", blocks, op("Where", empty, np.float32(np.inf), scale))
    size = op("Abs", y)
    coarse = op("Where", op("Less", size, np.float32(4)), np.float32(1), np.float32(2))
    step = op("Where", op("Less", size, np.float32(2)), np.float32(0.5), coarse)
    y = op("Mul", op("Round", op("Div", y, step)), step)
    y = op("Clip", y, np.float32(-E2M1_MAX), np.float32(E2M1_MAX))
    return _flat(op, op("Mul", y, scale))


def _flat(op: Body, blocks: ir.Value) -> ir.Value:
    """[n, in/16, 16] → [n, in]"""
    return op("Reshape", blocks, np.array([0, -1]))
