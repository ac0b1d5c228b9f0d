"""`dflash::kv_inject`: keys and values of new rows, for all layers at once, into a cache that holds all layers.

    rows   T [B, Q, 2*L*Hkv*D]    one stacked projection: k of layer 0 … L-1, then v of layer 0 … L-1
    cos, sin  float32 [B, Q, R]   of the rows' positions; the first 2R dimensions of a head turn
    k_norm T [L, D]               weights of the RMSNorm over each key (`kv_inject_unnormed` has none)
    start, count  int64 [B]       row q < count[b] belongs at position start[b] + q; the others are not written
    cache  T [B, 2*L*Hkv, S, D]   → the same with the rows in place, and how many fell beyond S, int32 [1]

The plugin does it in place, in one launch. This body touches the whole cache, for it has to run, not to be fast.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.graph.function import Body, Op
from dflash_trt.graph.net import Net

FLOAT, INT = ir.AttributeType.FLOAT, ir.AttributeType.INT
NORMED, UNNORMED = "kv_inject", "kv_inject_unnormed"


def kv_inject(
    net: Net,
    rows: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    k_norm: ir.Value | None,
    start: ir.Value,
    count: ir.Value,
    cache: ir.Value,
    *,
    rotated: int,
    epsilon: float,
) -> tuple[ir.Value, ir.Value]:
    """`rotated`: dimensions of a head that turn, 2R. Returns (cache, overflow)."""
    if k_norm is None:
        return net.call(Op(UNNORMED, _plain, {"rotated": INT}), rows, cos, sin, start, count, cache, rotated=rotated)
    op = Op(NORMED, _normed, {"rotated": INT, "epsilon": FLOAT})
    return net.call(op, rows, cos, sin, k_norm, start, count, cache, rotated=rotated, epsilon=epsilon)


def _plain(
    op: Body, rows: ir.Value, cos: ir.Value, sin: ir.Value, start: ir.Value, count: ir.Value, cache: ir.Value
) -> tuple[ir.Value, ir.Value]:
    k, v = _heads(op, rows, cache)
    return _write(op, _rotate(op, k, cos, sin), v, start, count, cache)


def _normed(
    op: Body,
    rows: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    k_norm: ir.Value,
    start: ir.Value,
    count: ir.Value,
    cache: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    k, v = _heads(op, rows, cache)
    _, heads, _, head_dim = _sizes(op, cache)
    layers = op("Shape", k_norm, start=0, end=1)
    each = op("Div", op("Div", heads, np.array([2])), layers)  # Hkv
    one = op("CastLike", op("ConstantOfShape", head_dim, value=ir.tensor(np.ones(1, np.float32))), k)
    weight = op("Expand", op("Unsqueeze", k_norm, np.array([1])), op("Concat", layers, each, head_dim, axis=0))
    weight = op("Reshape", weight, op("Concat", np.array([-1]), head_dim, axis=0))  # [L*Hkv, D]
    k = op("RMSNormalization", k, one, axis=-1, stash_type=1, epsilon=ir.RefAttr("epsilon", "epsilon", FLOAT))
    return _write(op, _rotate(op, op("Mul", k, weight), cos, sin), v, start, count, cache)


def _sizes(op: Body, cache: ir.Value) -> tuple[ir.Value, ...]:
    """B, 2*L*Hkv, S, D, each [1]."""
    return op("Split", op("Shape", cache), np.array([1, 1, 1, 1]), axis=0, outputs=4)


def _heads(op: Body, rows: ir.Value, cache: ir.Value) -> tuple[ir.Value, ir.Value]:
    """k and v, [B, Q, L*Hkv, D] each."""
    batch, heads, _, head_dim = _sizes(op, cache)
    shape = op("Concat", batch, op("Shape", rows, start=1, end=2), heads, head_dim, axis=0)
    return op("Split", op("Reshape", rows, shape), axis=2, num_outputs=2, outputs=2)


def _rotate(op: Body, k: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """[B, Q, heads, D] → the same, rotated."""
    cos, sin = (op("CastLike", angle, k) for angle in (cos, sin))
    dimensions = ir.RefAttr("rotary_embedding_dim", "rotated", INT)
    k = op("Transpose", k, perm=[0, 2, 1, 3])
    k = op("RotaryEmbedding", k, cos, sin, interleaved=0, rotary_embedding_dim=dimensions)
    return op("Transpose", k, perm=[0, 2, 1, 3])


def _write(
    op: Body, k: ir.Value, v: ir.Value, start: ir.Value, count: ir.Value, cache: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Every position looks up its row, if it has one."""
    rows = op("Concat", k, v, axis=2)  # [B, Q, 2*L*Hkv, D]
    start, count = (op("Unsqueeze", x, np.array([1])) for x in (start, count))
    size = op("Shape", cache, start=2, end=3)
    column = op("Sub", op("Range", np.int64(0), op("Squeeze", size), np.int64(1)), start)  # [B, S]
    query = op("Shape", rows, start=1, end=2)
    count = op("Max", op("Min", count, query), np.array([0]))
    last = op("Sub", query, np.array([1]))
    inside = op("And", op("GreaterOrEqual", column, np.array([0])), op("Less", column, count))
    index = op("Min", op("Max", column, np.array([0])), last)
    found = op("GatherND", rows, op("Unsqueeze", index, np.array([-1])), batch_dims=1)  # [B, S, 2*L*Hkv, D]
    found = op("Transpose", found, perm=[0, 2, 1, 3])
    written = op("Where", op("Unsqueeze", inside, np.array([1, 3])), found, cache)
    before = op("Min", op("Max", op("Neg", start), np.array([0])), count)
    beyond = op("Max", op("Min", op("Sub", op("Add", start, count), size), count), np.array([0]))
    lost = op("ReduceSum", op("Add", before, beyond), np.array([0, 1]), keepdims=0)
    overflow = op("Cast", lost, to=int(ir.DataType.INT32))
    return written, op("Unsqueeze", overflow, np.array([0]))
