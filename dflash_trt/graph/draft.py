"""The draft half of a step (arXiv 2602.06036, section 4): KV injection, then one pass over the block.

context = hidden_norm(fc(target features))            the same for every draft layer
K, V of every layer = its k_proj / v_proj of context  written at the context's own positions
block = [next token, MASK …]                          sees the context and itself; its K, V last one step
draft j = argmax head(norm(block row j)), j ≥ 1       slot j predicts the token at its own position
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint import Draft
from dflash_trt.graph.layer import Caches, LayerCache, Rows, decoder_layer
from dflash_trt.graph.linear import project
from dflash_trt.graph.mapping import Rank
from dflash_trt.graph.net import Net
from dflash_trt.graph.target import TargetNet
from dflash_trt.graph.visibility import Sight
from dflash_trt.graph.weights import Weights


class DraftNet:
    """The drafter as a part of the step graph; embedding and head are the target's."""

    def __init__(self, net: Net, draft: Draft, rank: Rank):
        """`draft` as `rank` sees it (`shard.place`)."""
        self.net, self.config, self.rank = net, draft.config, rank
        self.weights = Weights(net, "draft", draft.tensors)

    def inject(self, features: Sequence[ir.Value], rows: Rows, n_new: ir.Value, caches: Caches) -> Sequence[LayerCache]:
        """Make K and V of new context rows for all draft layers; returns the layers' caches that hold them.

        `features`: tapped target states [B*Q, H_target] each; `rows` their positions, of which the first n_new[b] are
        certain. One projection serves every layer: [k of layer 0, k of layer 1, …, v of layer 0, …].
        """
        net, config = self.net, self.config
        context = project(net, self.weights, net.concat(features, axis=-1), "fc")
        context = net.rms_norm(context, self.weights("hidden_norm.weight"), config.rms_eps)

        names = [f"layers.{i}.self_attn.{part}_proj" for part in "kv" for i in range(config.layers)]
        y = project(net, self.weights, context, *names)
        return caches.inject(self.weights, y, rows, n_new, config.block_size)

    def propose(self, target: TargetNet, block: ir.Value, rows: Rows, caches: Sequence[LayerCache]) -> ir.Value:
        """Draft logits float32 [B*(K-1), …] of this rank's tokens, for the block ids [B, K] = [next token, MASK …]."""
        net, config = self.net, self.config
        x = target.embed(net.reshape(block, [-1]))
        if config.embedding_scale != 1.0:
            x = net.mul(x, net.cast(net.const(config.embedding_scale, np.float32), net.dtype))
        for i, cache in enumerate(caches):
            with net.scope(f"draft/layers.{i}"):
                sight = Sight(config.causal[i], config.windows[i])
                x = decoder_layer(net, config, self.weights.at(f"layers.{i}."), x, rows, cache, sight, self.rank)
        x = net.rms_norm(x, self.weights("norm.weight"), config.rms_eps)
        x = net.reshape(x, [-1, config.block_size, config.hidden])
        x = net.op("Slice", x, net.const([1]), net.const([config.block_size]), net.const([1]))
        return self._shape_logits(target.head(net.reshape(x, [-1, config.hidden])))

    def _shape_logits(self, logits: ir.Value) -> ir.Value:
        """Output multiplier and soft cap of drafters that were trained with them."""
        net, config = self.net, self.config
        if config.logit_scale != 1.0:
            logits = net.mul(logits, net.const(config.logit_scale, np.float32))
        if config.logit_softcap:
            cap = net.const(config.logit_softcap, np.float32)
            logits = net.mul(net.op("Tanh", net.op("Div", logits, cap)), cap)
        return logits
