"""`dflash::block_attention`: a block of rows attends to a cached context and to itself.

    q        T [B, Hq, Q, D]     row i stands at position start[b] + i
    k, v     T [B, Hkv, Q, D]    of the block itself: rows j < count[b] exist
    cache    T [B, H, S, D]      keys from head `k_head`, values from head `v_head` on; positions below start[b] exist
    sinks    float32 [Hq]        one more logit in each softmax (`block_attention_plain` has none)
    start, count  int64 [B]
    → T [B, Hq, Q, D], zeros in rows i >= count[b]

`causal`: row i sees no row j > i. `window` (0: none): keys at a distance < window, to the left, or on `both_sides`. The
plugin never holds the scores; this body does, in float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.graph.function import Body, Op
from dflash_trt.graph.net import Net

FLOAT, INT = ir.AttributeType.FLOAT, ir.AttributeType.INT
SINKS, PLAIN = "block_attention", "block_attention_plain"
ATTRIBUTES = {"k_head": INT, "v_head": INT, "causal": INT, "window": INT, "both_sides": INT, "scale": FLOAT}
FAR = np.float32(-1e30)  # the logit of a key that is not visible


def block_attention(
    net: Net,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    cache: ir.Value,
    start: ir.Value,
    count: ir.Value,
    sinks: ir.Value | None,
    *,
    k_head: int,
    v_head: int,
    causal: bool,
    window: int | None,
    both_sides: bool = True,
    scale: float,
) -> ir.Value:
    attributes = {
        "k_head": k_head,
        "v_head": v_head,
        "causal": int(causal),
        "window": window or 0,
        "both_sides": int(both_sides),
        "scale": scale,
    }
    if sinks is None:
        return net.call(Op(PLAIN, _plain, ATTRIBUTES), q, k, v, cache, start, count, **attributes)
    return net.call(Op(SINKS, _with_sinks, ATTRIBUTES), q, k, v, cache, start, count, sinks, **attributes)


def _plain(
    op: Body, q: ir.Value, k: ir.Value, v: ir.Value, cache: ir.Value, start: ir.Value, count: ir.Value
) -> ir.Value:
    scores, values = _scores(op, q, k, v, cache, start, count)
    peak = op("ReduceMax", scores, np.array([-1]), keepdims=1)
    return _attend(op, scores, values, peak, None, q, count)


def _with_sinks(
    op: Body, q: ir.Value, k: ir.Value, v: ir.Value, cache: ir.Value, start: ir.Value, count: ir.Value, sinks: ir.Value
) -> ir.Value:
    scores, values = _scores(op, q, k, v, cache, start, count)  # [B, Hkv, G, Q, N]
    shape = op("Shape", scores, start=1, end=3)  # Hkv, G
    sinks = op("Reshape", sinks, op("Concat", shape, np.array([1, 1]), axis=0))
    peak = op("Max", op("ReduceMax", scores, np.array([-1]), keepdims=1), sinks)
    return _attend(op, scores, values, peak, sinks, q, count)


def _scores(
    op: Body, q: ir.Value, k: ir.Value, v: ir.Value, cache: ir.Value, start: ir.Value, count: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Logits float32 [B, Hkv, G, Q, S+Q] of cached and own keys, FAR where not visible; values [B, Hkv, S+Q, D]."""
    batch, heads, query, head_dim = op("Split", op("Shape", q), np.array([1, 1, 1, 1]), axis=0, outputs=4)
    kv_heads, size = op("Shape", k, start=1, end=2), op("Shape", cache, start=2, end=3)

    def both(own: ir.Value, name: str) -> ir.Value:
        first = op("Unsqueeze", op.attribute(name), np.array([0]))
        cached = op("Slice", cache, first, op("Add", first, kv_heads), np.array([1]))
        return op("Cast", op("Concat", cached, own, axis=2), to=int(ir.DataType.FLOAT))

    keys, values = both(k, "k_head"), both(v, "v_head")
    grouped = op("Concat", batch, kv_heads, op("Div", heads, kv_heads), query, head_dim, axis=0)
    rows = op("Cast", op("Reshape", q, grouped), to=int(ir.DataType.FLOAT))  # [B, Hkv, G, Q, D]
    keys = op("Unsqueeze", op("Transpose", keys, perm=[0, 1, 3, 2]), np.array([2]))
    scores = op("Mul", op("MatMul", rows, keys), op.number("scale"))
    visible = op("Unsqueeze", _visible(op, start, count, query, size), np.array([1, 2]))  # [B, 1, 1, Q, N]
    return op("Where", visible, scores, FAR), values


def _visible(op: Body, start: ir.Value, count: ir.Value, query: ir.Value, size: ir.Value) -> ir.Value:
    """bool [B, Q, S+Q]"""
    start, count = (op("Unsqueeze", x, np.array([1, 2])) for x in (start, count))  # [B, 1, 1]
    own = _range(op, query)
    column = op("Add", start, op("Unsqueeze", own, np.array([0, 2])))  # [B, Q, 1]: where a row stands
    cached = op("Unsqueeze", _range(op, size), np.array([0, 1]))  # [1, 1, S]
    own = op("Unsqueeze", own, np.array([0, 1]))  # [1, 1, Q]
    shape = op("Concat", op("Shape", start, start=0, end=1), np.array([1]), size, axis=0)
    position = op("Concat", op("Expand", cached, shape), op("Add", start, own), axis=2)  # [B, 1, S+Q]
    held = op("Concat", op("Less", cached, start), op("Less", own, count), axis=2)
    after = op("Greater", position, column)
    causal = op("Cast", op.attribute("causal"), to=int(ir.DataType.BOOL))
    distance, window = op("Sub", column, position), op.attribute("window")
    two = op("Cast", op.attribute("both_sides"), to=int(ir.DataType.BOOL))
    right = op("Or", op("Less", op("Neg", distance), window), op("Not", two))
    near = op("And", op("Less", distance, window), right)
    anywhere = op("Equal", window, np.int64(0))
    return op("And", op("And", held, op("Not", op("And", causal, after))), op("Or", near, anywhere))


def _range(op: Body, count: ir.Value) -> ir.Value:
    return op("Range", np.int64(0), op("Squeeze", count), np.int64(1))


def _attend(
    op: Body, scores: ir.Value, values: ir.Value, peak: ir.Value, sinks: ir.Value | None, q: ir.Value, count: ir.Value
) -> ir.Value:
    weights = op("Exp", op("Sub", scores, peak))
    total = op("ReduceSum", weights, np.array([-1]), keepdims=1)
    if sinks is not None:
        total = op("Add", total, op("Exp", op("Sub", sinks, peak)))
    out = op("Div", op("MatMul", weights, op("Unsqueeze", values, np.array([2]))), total)
    out = op("Reshape", out, op("Shape", q))
    row = op("Unsqueeze", _range(op, op("Shape", q, start=2, end=3)), np.array([0, 1, 3]))
    exists = op("Less", row, op("Unsqueeze", count, np.array([1, 2, 3])))
    return op("CastLike", op("Where", exists, out, np.float32(0)), q)
