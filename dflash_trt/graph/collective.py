"""What ranks say to each other inside a step: sums of partial results, and each other's rows.

For TensorRT a collective is a `DistCollective` node, which NCCL carries out. ONNX Runtime has none; there it is a
custom op of domain `ai.onnx.contrib` over MPI (`runtime/collective_op.py`). Both gather along the first axis only.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflash_trt.graph.names import CONTRIB, GATHER, REDUCE
from dflash_trt.graph.net import Net


def all_reduce(net: Net, x: ir.Value, group: Sequence[int]) -> ir.Value:
    """The sum of every rank's x, the same bits on all of them; x itself in a group of one."""
    if len(group) == 1:
        return x
    return _native(net, x, group, "all_reduce", "sum") if net.native else _custom(net, x, group, REDUCE)


def all_gather(net: Net, x: ir.Value, group: Sequence[int]) -> ir.Value:
    """Every rank's x [n, …] in the order of the ranks, [len(group) * n, …]; x itself in a group of one."""
    if len(group) == 1:
        return x
    return _native(net, x, group, "all_gather", "none") if net.native else _custom(net, x, group, GATHER)


def _native(net: Net, x: ir.Value, group: Sequence[int], operation: str, reduce: str) -> ir.Value:
    """The parser of TensorRT-RTX 1.7 wants lower case, and `groups` as integers even where there are none."""
    return net.op(
        "DistCollective", x, collective_operation=operation, reduce_op=reduce, root=-1, nb_rank=len(group),
        group_size=len(group), groups=list(group),
    )  # fmt: skip


def _custom(net: Net, x: ir.Value, group: Sequence[int], kind: str) -> ir.Value:
    return net.op(kind, x, domain=CONTRIB, group=",".join(map(str, group)))
