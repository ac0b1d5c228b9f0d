"""The target half of a step: every layer over the given columns, with taps for the drafter.

One class of network serves Llama, dense Qwen3 and gpt-oss; what differs (q/k norms, biases, windows, sinks, experts) is
in the config and the file. Embedding and head are split over the vocabulary, each rank holding a run of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint import Target
from dflash_trt.graph import decide
from dflash_trt.graph.collective import all_gather, all_reduce
from dflash_trt.graph.layer import LayerCache, Rows, decoder_layer
from dflash_trt.graph.linear import project
from dflash_trt.graph.mapping import Rank
from dflash_trt.graph.net import Net
from dflash_trt.graph.shard import rows_each
from dflash_trt.graph.visibility import Sight
from dflash_trt.graph.weights import Weights

F32 = ir.DataType.FLOAT


class TargetNet:
    """Embedding, decoder layers and head of the target as parts of one graph."""

    def __init__(self, net: Net, target: Target, rank: Rank):
        """`target` as `rank` sees it (`shard.place`)."""
        self.net, self.config, self.rank = net, target.config, rank
        self.weights = Weights(net, "target", target.tensors)
        self._each = rows_each(target.config.vocab, rank.mapping.tp)  # rows of embedding and head, fewer on the last
        self._first = rank.tp_rank * self._each
        self._count = min(self._each, target.config.vocab - self._first)

    def embed(self, ids: ir.Value) -> ir.Value:
        """ids [n] → [n, H]. Rows are gathered in the checkpoint's dtype, so the table itself is never cast."""
        net, table = self.net, self.weights.raw("model.embed_tokens.weight")
        if self.rank.mapping.tp == 1:
            return self._own_dtype(net.op("Gather", table, ids, axis=0))
        own = net.op("Sub", ids, net.const(self._first))
        last = net.const(self._count - 1)
        mine = net.op("And", net.op("GreaterOrEqual", own, net.const(0)), net.op("LessOrEqual", own, last))
        row = net.op("Max", net.op("Min", own, last), net.const(0))
        rows = self._own_dtype(net.op("Gather", table, row, axis=0))
        zero = net.cast(net.const(0, np.float32), net.dtype)
        return all_reduce(net, net.op("Where", net.unsqueeze(mine, 1), rows, zero), self.rank.tp_group)

    def _own_dtype(self, rows: ir.Value) -> ir.Value:
        return rows if rows.dtype == self.net.dtype else self.net.cast(rows, self.net.dtype)

    def layers(
        self, x: ir.Value, rows: Rows, caches: Sequence[LayerCache], taps: Sequence[int]
    ) -> tuple[ir.Value, list[ir.Value]]:
        """x [B*Q, H] → the last hidden state and the outputs of the tapped layers, in the order asked for.

        A tap is the raw residual stream after a layer, except that the last layer's has passed the final norm: so the
        reference implementation reads it (transformers' `hidden_states[-1]`), and so its drafters are trained.
        """
        outputs: dict[int, ir.Value] = {}
        for i, cache in enumerate(caches):
            with self.net.scope(f"target/layers.{i}"):
                x = decoder_layer(
                    self.net,
                    self.config,
                    self.weights.at(f"model.layers.{i}."),
                    x,
                    rows,
                    cache,
                    Sight(causal=True, window=self.config.windows[i]),
                    self.rank,
                )
            outputs[i] = x
        if len(caches) - 1 in taps:
            outputs[len(caches) - 1] = self.norm(x)
        return x, [outputs[i] for i in taps]

    def norm(self, x: ir.Value) -> ir.Value:
        return self.net.rms_norm(x, self.weights("model.norm.weight"), self.config.rms_eps)

    def head(self, x: ir.Value) -> ir.Value:
        """Normed rows [n, H] → logits float32 [n, …] of the tokens whose rows this rank holds."""
        logits = project(self.net, self.weights, x, "model.embed_tokens" if self.config.tie_embeddings else "lm_head")
        return self.net.to_float32(logits)

    def whole(self, logits: ir.Value) -> ir.Value:
        """The logits of all ranks side by side, [n, V]."""
        net, tp = self.net, self.rank.mapping.tp
        if tp == 1:
            return logits
        if self._count < self._each:  # all ranks give the same number
            logits = net.op("Pad", logits, net.const([0, 0, 0, self._each - self._count]))
        parts = self._of_all(logits, self._each)
        together = net.reshape(net.op("Transpose", parts, perm=[1, 0, 2]), [-1, tp * self._each])
        return net.op("Slice", together, net.const([0]), net.const([self.config.vocab]), net.const([1]))

    def _of_all(self, rows: ir.Value, width: int) -> ir.Value:
        """rows [n, width] of the ranks that share the vocabulary, [tp, n, width].

        All ranks give theirs, and the first tp count, for what follows them is the same once more: TensorRT-RTX 1.7
        multiplies the rows of any gathering by one number, that of the largest group in the graph.
        """
        net, tp, world = self.net, self.rank.mapping.tp, self.rank.mapping.world
        gathered = net.reshape(all_gather(net, rows, self.rank.everybody), [world, -1, width])
        return net.split(gathered, [tp, world - tp], axis=0)[0] if tp < world else gathered

    def most_likely(self, logits: ir.Value) -> ir.Value:
        """Logits [n, …] as `head` gives them → the most likely tokens, int64 [n]; of equals the smallest.

        Ranks exchange each row's best value and its token, both as float32, which holds every integer up to 2^24.
        """
        net = self.net
        if net.plugins:
            value, index = decide.draft_head(net, logits, self._first)
        else:
            index = net.op("ArgMax", logits, axis=-1, keepdims=0)
        if self.rank.mapping.tp == 1:
            return index
        if not net.plugins:
            value = net.op("ReduceMax", logits, net.const([-1]), keepdims=0)
            index = net.add(index, net.const(self._first))
        best = net.op("Concat", *(net.unsqueeze(x, 1) for x in (value, net.cast(index, F32))), axis=1)  # [n, 2]
        best = self._of_all(best, 2)
        value, index = (net.op("Squeeze", x, net.const([2])) for x in net.split(best, [1, 1], axis=2))  # [tp, n]
        top = net.op("Equal", value, net.op("ReduceMax", value, net.const([0]), keepdims=1))
        index = net.op("Where", top, index, net.const(self.config.vocab - 1, np.float32))
        return net.cast(net.op("ReduceMin", index, net.const([0]), keepdims=0), ir.DataType.INT64)
