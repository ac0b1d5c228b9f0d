"""`dflash::moe_float`, `moe_fp4`, `moe_fp4_rounded`: chosen experts alone, one after another.

    x       T [N, H]
    ids     int64 [N, k]        global numbers of the experts that a row chose, all different
    shares  float32 [N, k]
    gate_up, down               weights of the E experts from number `first` on, biases [E, 2I], [E, H]
    → T [N, H], by share, the sum of what those of the chosen experts compute that are among the E

moe_float        weights [E, H, 2I], [E, I, H] of any float type
moe_fp4          codes uint8 [E, 2I, H/2], [E, H, I/2], two a byte; a byte of `scales` [E, out, blocks] stands for the
                 entry of `table` float32 [256]: a power of two (MXFP4), or e4m3 times the global scale (NVFP4)
moe_fp4_rounded  the same; inputs of both products are rounded to NVFP4 first, by global scales [] (W4A4)

This is what ONNX Runtime runs. A turn of the loop gathers one expert's bytes, so memory never holds more than one
expert unpacked, and ONNX Runtime finds nothing to fold when it loads the graph. Everything is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.nvfp4 import BYTE_VALUES
from dflash_trt.graph.function import Body, Op
from dflash_trt.graph.nvfp4 import round_body

FLOAT, INT = ir.AttributeType.FLOAT, ir.AttributeType.INT
F32, I32 = int(ir.DataType.FLOAT), int(ir.DataType.INT32)

Product = Callable[[Body, ir.Value, ir.Value], ir.Value]  # rows [n, in], number of an expert → [n, out]


def _float(
    op: Body,
    x: ir.Value,
    ids: ir.Value,
    shares: ir.Value,
    gate_up: ir.Value,
    gate_up_bias: ir.Value,
    down: ir.Value,
    down_bias: ir.Value,
) -> ir.Value:
    return _sum_chosen(op, x, ids, shares, gate_up_bias, _plain(gate_up, gate_up_bias), _plain(down, down_bias))


def _fp4(
    op: Body,
    x: ir.Value,
    ids: ir.Value,
    shares: ir.Value,
    gate_up: ir.Value,
    gate_up_scales: ir.Value,
    gate_up_table: ir.Value,
    gate_up_bias: ir.Value,
    down: ir.Value,
    down_scales: ir.Value,
    down_table: ir.Value,
    down_bias: ir.Value,
) -> ir.Value:
    first = _packed(gate_up, gate_up_scales, gate_up_table, gate_up_bias)
    second = _packed(down, down_scales, down_table, down_bias)
    return _sum_chosen(op, x, ids, shares, gate_up_bias, first, second)


def _fp4_rounded(
    op: Body,
    x: ir.Value,
    ids: ir.Value,
    shares: ir.Value,
    gate_up: ir.Value,
    gate_up_scales: ir.Value,
    gate_up_table: ir.Value,
    gate_up_bias: ir.Value,
    down: ir.Value,
    down_scales: ir.Value,
    down_table: ir.Value,
    down_bias: ir.Value,
    gate_up_input: ir.Value,
    down_input: ir.Value,
) -> ir.Value:
    first = _packed(gate_up, gate_up_scales, gate_up_table, gate_up_bias)
    second = _packed(down, down_scales, down_table, down_bias)
    rounded_first, rounded_second = _rounded(first, gate_up_input), _rounded(second, down_input)
    return _sum_chosen(op, x, ids, shares, gate_up_bias, rounded_first, rounded_second)


ATTRIBUTES = {"first": INT, "alpha": FLOAT, "limit": FLOAT}
MOE_FLOAT = Op("moe_float", _float, ATTRIBUTES)
MOE_FP4 = Op("moe_fp4", _fp4, ATTRIBUTES)
MOE_FP4_ROUNDED = Op("moe_fp4_rounded", _fp4_rounded, ATTRIBUTES)


def _sum_chosen(
    op: Body, x: ir.Value, ids: ir.Value, shares: ir.Value, held: ir.Value, gate_up: Product, down: Product
) -> ir.Value:
    """`held` [E, …]: any tensor of the experts at hand."""
    local = op("Sub", ids, op.attribute("first"))  # [N, k]
    inside = op("And", op("GreaterOrEqual", local, np.int64(0)), op("Less", local, op("Shape", held, start=0, end=1)))
    chosen = op("Unique", op("Compress", local, inside), axis=0)  # without an axis Compress and Unique flatten alike
    alpha, limit = op.number("alpha"), op.number("limit")
    rows = op("Cast", x, to=F32)

    def turn(op: Body, number: ir.Value, total: ir.Value) -> ir.Value:
        expert = op("Gather", chosen, number, axis=0)
        where = op("NonZero", op("Equal", local, expert))  # [2, n]: rows, and which of their k choices
        row = op("Gather", where, np.int64(0), axis=0)
        y = gate_up(op, op("Gather", rows, row, axis=0), expert)
        y = down(op, _clamped_swiglu(op, y, alpha, limit), expert)
        share = op("GatherND", shares, op("Transpose", where, perm=[1, 0]))
        y = op("Mul", y, op("Unsqueeze", share, np.array([1])))
        return op("ScatterND", total, op("Unsqueeze", row, np.array([1])), y, reduction="add")

    nothing = op("Mul", rows, np.float32(0))
    return op("CastLike", op.loop(op("Size", chosen), nothing, turn), x)


def _clamped_swiglu(op: Body, y: ir.Value, alpha: ir.Value, limit: ir.Value) -> ir.Value:
    """[n, 2I], gate and up in turn → [n, I]"""
    pairs = op("Reshape", y, np.array([0, -1, 2]))
    gate, up = (op("Gather", pairs, np.int64(i), axis=2) for i in range(2))
    gate = op("Min", gate, limit)
    up = op("Clip", up, op("Neg", limit), limit)
    gate = op("Mul", gate, op("Sigmoid", op("Mul", gate, alpha)))
    return op("Mul", gate, op("Add", up, np.float32(1)))


def _plain(weight: ir.Value, bias: ir.Value) -> Product:
    return lambda op, rows, expert: op("Gemm", rows, _one(op, weight, expert), _one(op, bias, expert))


def _packed(codes: ir.Value, scales: ir.Value, table: ir.Value, bias: ir.Value) -> Product:
    def product(op: Body, rows: ir.Value, expert: ir.Value) -> ir.Value:
        def looked_up(values: ir.Value | np.ndarray, index: ir.Value) -> ir.Value:
            return op("Gather", values, op("Cast", op("Gather", index, expert, axis=0), to=I32), axis=0)

        factors = looked_up(table, scales)  # [out, blocks]
        blocks = op(
            "Reshape", looked_up(BYTE_VALUES, codes), op("Concat", op("Shape", factors), np.array([-1]), axis=0)
        )
        weight = op("Mul", blocks, op("Unsqueeze", factors, np.array([2])))
        weight = op("Reshape", weight, np.array([0, -1]))
        return op("Gemm", rows, weight, _one(op, bias, expert), transB=1)

    return product


def _rounded(product: Product, global_scale: ir.Value) -> Product:
    return lambda op, rows, expert: product(op, round_body(op, rows, global_scale), expert)


def _one(op: Body, stacked: ir.Value, expert: ir.Value) -> ir.Value:
    """That of one expert, float32."""
    return op("Cast", op("Gather", stacked, expert, axis=0), to=F32)
