"""`dflash::draft_head`, `dflash::sample`, `dflash::accept`: a row's token, and how many drafts of a block count.

draft_head(logits [N, V], offset int64 [1])        → value float32 [N], index int64 [N]
    of the tokens offset, offset + 1 …; the smallest index among equals. Ranks that share a vocabulary exchange these.
accept(greedy, sampled int64 [B, K], temperature float32 [B], ids int64 [B, Q], n_valid, n_given, past_len int64 [B])
    → n_accepted, next_token, new_len int64 [B]
    The target chose `sampled` where temperature > 0, else `greedy`; drafts follow the n_given columns of ids.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_trt.graph.function import Body, Op
from dflash_trt.graph.net import Net

FEW = 4096  # tokens that one launch of `sample` reads


def draft_head(net: Net, logits: ir.Value, offset: int = 0) -> tuple[ir.Value, ir.Value]:
    return net.call(Op("draft_head", _draft_head), logits, net.const([offset]))


def sample(net: Net, weights: ir.Value, uniform: ir.Value, count: int) -> ir.Value:
    """`count`: V."""
    name = "sample" if count > FEW else "sample_few"
    return net.call(Op(name, _sample), weights, uniform)


def accept(
    net: Net,
    greedy: ir.Value,
    sampled: ir.Value,
    temperature: ir.Value,
    ids: ir.Value,
    n_valid: ir.Value,
    n_given: ir.Value,
    past_len: ir.Value,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    return net.call(Op("accept", _accept), greedy, sampled, temperature, ids, n_valid, n_given, past_len)


def _draft_head(op: Body, logits: ir.Value, offset: ir.Value) -> tuple[ir.Value, ir.Value]:
    value = op("Cast", op("ReduceMax", logits, np.array([-1]), keepdims=0), to=int(ir.DataType.FLOAT))
    return value, op("Add", op("ArgMax", logits, axis=-1, keepdims=0), offset)


def _sample(op: Body, weights: ir.Value, uniform: ir.Value) -> ir.Value:
    """As in `accept.py`: the second comparison keeps an index in range when uniform * total rounds up to total."""
    cumulated = op("CumSum", weights, np.int64(1))
    total = op("ReduceMax", cumulated, np.array([-1]), keepdims=1)
    below = op("LessOrEqual", cumulated, op("Mul", op("Unsqueeze", uniform, np.array([1])), total))
    below = op("And", below, op("Less", cumulated, total))
    return op("ReduceSum", op("Cast", below, to=int(ir.DataType.INT64)), np.array([-1]), keepdims=0)


def _accept(
    op: Body,
    greedy: ir.Value,
    sampled: ir.Value,
    temperature: ir.Value,
    ids: ir.Value,
    n_valid: ir.Value,
    n_given: ir.Value,
    past_len: ir.Value,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """A draft counts if it is there, equals the choice at its place, and all before it do."""
    column = np.array([1])
    hot = op("Greater", temperature, np.float32(0))
    choice = op("Where", op("Unsqueeze", hot, column), sampled, greedy)  # [B, K]
    drafts = op("Sub", op("Shape", choice, start=1, end=2), np.array([1]))  # [1]: K - 1
    place = op("Range", np.int64(0), op("Squeeze", drafts), np.int64(1))  # [K-1]
    last = op("Sub", op("Shape", ids, start=1, end=2), np.array([1]))
    following = op("Min", op("Add", op("Unsqueeze", n_given, column), place), last)  # [B, K-1]
    proposed = op("GatherElements", ids, op("Max", following, np.array([0])), axis=1)
    wanted = op("Slice", choice, np.array([0]), drafts, np.array([1]))
    held = op("Less", place, op("Unsqueeze", op("Sub", n_valid, n_given), column))
    wrong = op("Not", op("And", op("Equal", proposed, wanted), held))
    so_far = op("CumSum", op("Cast", wrong, to=int(ir.DataType.INT64)), np.int64(1))
    right = op("Cast", op("Equal", so_far, np.int64(0)), to=int(ir.DataType.INT64))
    count = op("ReduceSum", right, np.array([1]), keepdims=0)
    token = op("Squeeze", op("GatherElements", choice, op("Unsqueeze", count, column), axis=1), column)
    return count, token, op("Add", op("Add", past_len, n_given), count)
