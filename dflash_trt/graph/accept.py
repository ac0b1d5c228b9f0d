"""Verification: which drafts count, and the target's own next token.

At every verified position the token is the target's own choice, argmax or inverse-CDF sampling with the caller's
uniforms; a draft counts only if it equals that choice. So the emitted text is exactly what the target alone emits
with the same uniforms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dflash_trt.graph.net import Net

CANDIDATES = 1024  # tokens that top_k and top_p choose among: the most likely ones


@dataclass(frozen=True)
class Sampling:
    """Per-row sampling inputs of a step."""

    temperature: ir.Value  # [B] float32; 0: greedy
    top_p: ir.Value  # [B] float32; 1: off
    top_k: ir.Value  # [B] int64; 0: off
    uniform: ir.Value  # [B, K] float32 in [0, 1)


def accept(net: Net, choice: ir.Value, drafts: ir.Value, n_drafts: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """choice [B, width+1], drafts [B, width] of which row b holds n_drafts[b] → accepted count [B], next token [B].

    Counts the leading drafts that equal the target's choice.
    """
    wanted, _ = net.split(choice, [width, 1], axis=1)
    held = net.op("Less", net.const([range(width)]), net.unsqueeze(n_drafts, 1))
    wrong = net.op("Not", net.op("And", net.op("Equal", drafts, wanted), held))
    wrong_so_far = net.op("CumSum", net.cast(wrong, ir.DataType.INT64), net.const(1))
    right = net.cast(net.op("Equal", wrong_so_far, net.const(0)), ir.DataType.INT64)
    n_accepted = net.op("ReduceSum", right, net.const([1]), keepdims=0)
    return n_accepted, pick(net, choice, n_accepted)


def pick(net: Net, rows: ir.Value, column: ir.Value) -> ir.Value:
    """rows [B, n], column [B] → rows[b, column[b]], [B]."""
    return net.op("Squeeze", net.op("GatherElements", rows, net.unsqueeze(column, 1), axis=1), net.const([1]))


Sampler = Callable[[Net, ir.Value, ir.Value, int], ir.Value]  # weights [B, K, n], uniform [B, K], n → [B, K]


def choose(
    net: Net,
    logits: Callable[[], ir.Value],
    sampling: Sampling,
    vocab: int,
    greedy: ir.Value,
    sample: Sampler | None = None,
) -> ir.Value:
    """The target's token at each position, int64 [B, K].

    `logits` makes float32 [B, K, V] of all ranks' tokens, which only sampling needs; `greedy` [B, K] are the most
    likely tokens. `sample` draws by weights; not given: in standard ops.

    Sampling is computed only in calls with a row that asks for it, the candidate list only where top_k or top_p is
    on; what a row gets depends on that row alone.
    """
    made = logits() if net.native else None  # nothing is conditional there: once for all
    hot = net.op("Greater", sampling.temperature, net.const(0, np.float32))  # [B]
    p_on = net.op("Less", sampling.top_p, net.const(1, np.float32))
    cut = net.op("And", hot, net.op("Or", p_on, net.op("Greater", sampling.top_k, net.const(0))))  # [B]

    def softmax_weights() -> ir.Value:
        temperature = net.op("Where", hot, sampling.temperature, net.const(1, np.float32))
        scaled = net.op("Div", made or logits(), net.unsqueeze(temperature, 1, 2))
        peak = net.op("ReduceMax", scaled, net.const([-1]), keepdims=1)
        return net.op("Exp", net.op("Sub", scaled, peak))  # [B, K, V], the softmax before normalisation

    def by(rows: ir.Value, sample: Callable[[], ir.Value], otherwise: ir.Value) -> ir.Value:
        return net.branch(
            _any(net, rows),
            lambda: net.op("Where", net.unsqueeze(rows, 1), sample(), otherwise),
            lambda: otherwise,
        )

    draw, few = sample or _inverse_cdf, min(CANDIDATES, vocab)
    token = by(hot, lambda: draw(net, softmax_weights(), sampling.uniform, vocab), greedy)
    return by(cut, lambda: _from_candidates(net, softmax_weights(), sampling, few, draw), token)


def _any(net: Net, flags: ir.Value) -> ir.Value:
    """bool [B] → scalar bool."""
    return net.cast(net.op("ReduceMax", net.cast(flags, ir.DataType.INT32), keepdims=0), ir.DataType.BOOL)


def _inverse_cdf(net: Net, weights: ir.Value, uniform: ir.Value, count: int = 0) -> ir.Value:
    """weights [B, K, n] ≥ 0, uniform [B, K] → index of the first entry whose cumulated share exceeds uniform.

    The second comparison keeps an index in range, and off trailing zero weights, when uniform * total rounds up to
    total.
    """
    cumulated = net.op("CumSum", weights, net.const(2))
    total = net.op("ReduceMax", cumulated, net.const([-1]), keepdims=1)
    below = net.op("LessOrEqual", cumulated, net.mul(net.unsqueeze(uniform, 2), total))
    below = net.op("And", below, net.op("Less", cumulated, total))
    return net.op("ReduceSum", net.cast(below, ir.DataType.INT64), net.const([-1]), keepdims=0)


def _from_candidates(net: Net, weights: ir.Value, sampling: Sampling, n: int, draw: Sampler) -> ir.Value:
    """Top-k, then top-p over what is left (the order of transformers and vLLM), then inverse CDF by falling
    likelihood."""
    likely, ids = net.op("TopK", weights, net.const([n]), axis=-1, largest=1, sorted=1, outputs=2)  # [B, K, n]
    k_on = net.op("Greater", sampling.top_k, net.const(0))
    limit = net.op("Where", k_on, sampling.top_k, net.const(n))
    kept = net.op("Less", net.arange(n), net.unsqueeze(limit, 1, 2))  # [B, 1, n]
    likely = net.mul(likely, net.cast(kept, ir.DataType.FLOAT))

    def total(x: ir.Value) -> ir.Value:
        return net.op("ReduceSum", x, net.const([-1]), keepdims=1)

    mass = net.op("Where", net.unsqueeze(k_on, 1, 2), total(likely), total(weights))  # [B, K, 1]
    before = net.op("Sub", net.op("CumSum", likely, net.const(2)), likely)
    nucleus = net.op("Less", before, net.mul(net.unsqueeze(sampling.top_p, 1, 2), mass))
    index = draw(net, net.mul(likely, net.cast(nucleus, ir.DataType.FLOAT)), sampling.uniform, n)
    return net.op("Squeeze", net.op("GatherElements", ids, net.unsqueeze(index, 2), axis=2), net.const([2]))
