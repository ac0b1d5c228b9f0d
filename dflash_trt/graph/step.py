"""The step graph: one call verifies drafts, accepts, injects K/V and drafts the next block (docs/step-graph.md).

The autoregressive graph is the same without the draft half and with K = 1.
"""

from __future__ import annotations

import functools
from pathlib import Path

import onnx_ir as ir

from dflash_trt.checkpoint import Pair
from dflash_trt.graph import decide
from dflash_trt.graph.accept import Sampling, accept, choose
from dflash_trt.graph.draft import DraftNet
from dflash_trt.graph.layer import Caches, Rows
from dflash_trt.graph.mapping import SINGLE, Rank
from dflash_trt.graph.native import NativeCaches
from dflash_trt.graph.net import Net
from dflash_trt.graph.plugin import PluginCaches
from dflash_trt.graph.rope import Rotation
from dflash_trt.graph.target import TargetNet
from dflash_trt.graph.visibility import Visibility

I64, F32 = ir.DataType.INT64, ir.DataType.FLOAT

CACHES: dict[str, type[NativeCaches] | type[PluginCaches]] = {"native": NativeCaches, "plugin": PluginCaches}


def build_step(
    pair: Pair,
    *,
    dtype: str,
    cache_len: int | None = None,
    ops: str = "native",
    moe: str = "native",
    debug: bool = False,
    rank: Rank = SINGLE,
    beside: Path | None = None,
) -> Net:
    """Build the graph of `pair`, autoregressive if it has no drafter; of several ranks that of `rank`.

    `pair` is what `shard.place` has made of the checkpoints for that rank, `beside` the folder that it wrote to.

    `dtype`: float32, bfloat16 or float16, of weights, activations and caches; logits are float32. `debug` adds the
    outputs `logits` [B, K, V], and with a drafter `hidden` [B, Q, ids * H] and `draft_logits` [B, K-1, V].

    `cache_len` asks for the form that TensorRT compiles: S is fixed to it, and sampling is computed in every call,
    for a CUDA graph cannot hold a conditional (nor does TensorRT-RTX 1.7 find attention kernels behind one). By
    default S may differ from call to call, and calls without a sampling row skip that work.

    `ops`: attention, caches and acceptance by TensorRT's "native" layers, or by this package's ops, each a "plugin" for
    TensorRT and a function of standard ops for everybody else (`plugin.py`). `moe`: experts by TensorRT's "native"
    products, or by its MOE "layer" (`moe.py`).
    """
    net = Net(dtype, native=cache_len is not None, beside=beside, ops=ops, moe=moe)
    target = TargetNet(net, pair.target, rank)
    draft = DraftNet(net, pair.draft, rank) if pair.draft else None
    block_size = pair.draft.config.block_size if pair.draft else 1

    ids = net.input("input_ids", I64, ("batch", "query"))
    n_valid, n_given, past_len = (net.input(name, I64, ("batch",)) for name in ("n_valid", "n_given", "past_len"))
    sampling = Sampling(
        net.input("temperature", F32, ("batch",)),
        net.input("top_p", F32, ("batch",)),
        net.input("top_k", I64, ("batch",)),
        net.input("uniform", F32, ("batch", block_size)),
    )
    positions_per_slot: int | str = cache_len or "cache"
    target_caches: Caches = CACHES[ops](net, "target", pair.target.config, positions_per_slot, pair.target.config.sinks)
    draft_caches = CACHES[ops](net, "draft", pair.draft.config, positions_per_slot) if pair.draft else None

    # the target over all columns
    shape = net.op("Shape", ids)
    batch, query = (net.op("Squeeze", part) for part in net.split(shape, [1, 1], axis=0))
    key_positions = target_caches.length
    positions = _positions(net, past_len, net.arange(query))
    start = net.add(past_len, net.const(target_caches.first)) if target_caches.first else past_len
    written = net.named("target.kv_lengths", net.add(start, query))
    rotation = Rotation(net, target.config.rope, target.config.head_dim, positions)
    visibility = Visibility(net, positions, written, key_positions, target_caches.first)
    rows = Rows(shape, start, n_valid, written, rotation, visibility)
    x = target.embed(net.reshape(ids, [-1]))
    taps = pair.draft.config.target_layer_ids if pair.draft else ()
    x, features = target.layers(x, rows, target_caches.layers, taps)

    # its choice after the last certain column and after each draft
    with net.scope("accept"):
        steps = net.const([range(block_size)])
        last = net.op("Sub", query, net.const(1))
        columns = net.add(net.unsqueeze(net.op("Sub", n_given, net.const(1)), 1), steps)  # [B, K]
        columns = net.op("Max", net.op("Min", columns, last), net.const(0))
        flat = net.add(columns, net.unsqueeze(net.mul(net.arange(batch), query), 1))
        logits = target.head(target.norm(net.op("Gather", x, net.reshape(flat, [-1]), axis=0)))
        greedy = net.reshape(target.most_likely(logits), _shape(net, batch, block_size))

        def whole() -> ir.Value:
            return net.reshape(target.whole(logits), [-1, block_size, target.config.vocab])

        choice = choose(net, whole, sampling, target.config.vocab, greedy, _sample if net.plugins else None)
        choice = net.reshape(choice, _shape(net, batch, block_size))
        if draft and net.plugins:
            given = (ids, n_valid, n_given, past_len)
            n_accepted, next_token, _ = decide.accept(net, greedy, choice, sampling.temperature, *given)
        elif draft:
            following = net.op("Min", net.add(net.unsqueeze(n_given, 1), net.const([range(block_size - 1)])), last)
            drafts = net.op("GatherElements", ids, following, axis=1)
            n_accepted, next_token = accept(net, choice, drafts, net.op("Sub", n_valid, n_given), block_size - 1)
        else:
            n_accepted, next_token = net.mul(n_given, net.const(0)), net.op("Squeeze", choice, net.const([1]))
    next_block = net.unsqueeze(next_token, 1)

    # the drafter: inject what is now certain, then one pass over the next block
    if draft and draft_caches:
        n_new = net.add(n_given, n_accepted)  # rejected columns lie beyond and are overwritten
        with net.scope("draft/inject"):
            rotation = Rotation(net, draft.config.rope, draft.config.head_dim, positions)
            # Nothing looks from the context: its length and visibility are asked of by nobody.
            context = Rows(shape, past_len, n_new, written, rotation, visibility)
            layers = draft.inject(features, context, n_new, draft_caches)
        with net.scope("draft/block"):
            start = net.add(past_len, n_new)
            end = net.named("draft.kv_lengths", net.add(start, net.const(block_size)))
            positions = _positions(net, start, net.arange(block_size))
            masks = net.op("Expand", net.const([[draft.config.mask_token_id]]), _shape(net, batch, block_size - 1))
            block = net.concat([next_block, masks], axis=1)
            rotation = Rotation(net, draft.config.rope, draft.config.head_dim, positions)
            count = net.op("Expand", net.const([block_size]), net.op("Shape", start))
            visibility = Visibility(net, positions, end, key_positions)
            block_rows = Rows(_shape(net, batch, block_size), start, count, end, rotation, visibility)
            draft_logits = draft.propose(target, block, block_rows, layers)
            proposed = target.most_likely(draft_logits)
            proposed = net.reshape(proposed, _shape(net, batch, block_size - 1))
        next_block = net.concat([next_block, proposed], axis=1)

    net.output("n_accepted", n_accepted, I64, ("batch",))
    net.output("next_token", next_token, I64, ("batch",))
    net.output("next_block", net.op("Identity", next_block), I64, ("batch", block_size))
    lost = [overflow for half in (target_caches, draft_caches) if half and (overflow := half.overflow()) is not None]
    target_caches.present()
    if draft_caches:
        draft_caches.present()
    if lost:
        net.output("overflow", functools.reduce(net.add, (net.cast(rows, I64) for rows in lost)), I64, (1,))
    if debug:
        net.output("logits", whole(), F32, ("batch", block_size, target.config.vocab))
    if debug and draft:
        hidden = net.concat(features, axis=-1)
        width = len(features) * target.config.hidden
        hidden = net.reshape(hidden, net.concat([shape, net.const([width])], axis=0))
        net.output("hidden", hidden, net.dtype, ("batch", "query", width))
        draft_logits = net.reshape(target.whole(draft_logits), [-1, block_size - 1, target.config.vocab])
        net.output("draft_logits", draft_logits, F32, ("batch", block_size - 1, target.config.vocab))
    return net


def _sample(net: Net, weights: ir.Value, uniform: ir.Value, count: int) -> ir.Value:
    """weights [B, K, count], uniform [B, K] → int64 [B, K]"""
    index = decide.sample(net, net.reshape(weights, [-1, count]), net.reshape(uniform, [-1]), count)
    return net.reshape(index, net.op("Shape", uniform))


def _positions(net: Net, start: ir.Value, columns: ir.Value) -> ir.Value:
    """start [B], columns [n] → [B, n]."""
    return net.add(net.unsqueeze(start, 1), net.unsqueeze(columns, 0))


def _shape(net: Net, batch: ir.Value, columns: int) -> ir.Value:
    """(B, columns) as a shape; taken from the inputs, so that compilers see through it whatever comes between."""
    return net.concat([net.unsqueeze(batch, 0), net.const([columns])], axis=0)
