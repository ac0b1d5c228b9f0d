"""The target half of a step: every layer over the given columns, with taps for the drafter.

One class of network serves Llama and dense Qwen3; what differs (q/k norms, biases, windows) is in the config and the
file.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflash_trt.checkpoint import Target
from dflash_trt.graph.layer import LayerCache, Rows, decoder_layer
from dflash_trt.graph.linear import project
from dflash_trt.graph.net import Net
from dflash_trt.graph.visibility import Sight
from dflash_trt.graph.weights import Weights


class TargetNet:
    """Embedding, decoder layers and head of the target as parts of one graph."""

    def __init__(self, net: Net, target: Target):
        self.net, self.config = net, target.config
        self.weights = Weights(net, "target", target.tensors)

    def embed(self, ids: ir.Value) -> ir.Value:
        """ids [n] → [n, H]. Rows are gathered in the checkpoint's dtype, so the table itself is never cast."""
        rows = self.net.op("Gather", self.weights.raw("model.embed_tokens.weight"), ids, axis=0)
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
                )
            outputs[i] = x
        if len(caches) - 1 in taps:
            outputs[len(caches) - 1] = self.norm(x)
        return x, [outputs[i] for i in taps]

    def norm(self, x: ir.Value) -> ir.Value:
        return self.net.rms_norm(x, self.weights("model.norm.weight"), self.config.rms_eps)

    def head(self, x: ir.Value) -> ir.Value:
        """Normed rows [n, H] → logits float32 [n, V]."""
        logits = project(self.net, self.weights, x, "model.embed_tokens" if self.config.tie_embeddings else "lm_head")
        return logits if self.net.dtype == ir.DataType.FLOAT else self.net.cast(logits, ir.DataType.FLOAT)
