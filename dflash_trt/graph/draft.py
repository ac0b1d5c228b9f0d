"""The draft half of a step (arXiv 2602.06036, section 4): KV injection, then one pass over the block.

    context = hidden_norm(fc(target features))            the same for every draft layer
    K, V of every layer = its k_proj / v_proj of context  written at the context's own positions
    block = [next token, MASK …]                          sees the context and itself; its K, V last one step
    draft j = argmax head(norm(block row j)), j ≥ 1       slot j predicts the token at its own position

TensorRT updates a cache in place only if one node writes it, so a layer's context rows and block rows are merged into
one run of positions and written together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint import Draft
from dflash_trt.graph.layer import Cache, Rows, decoder_layer, heads
from dflash_trt.graph.linear import project
from dflash_trt.graph.net import Net
from dflash_trt.graph.target import TargetNet
from dflash_trt.graph.visibility import Visibility
from dflash_trt.graph.weights import Weights


class DraftNet:
    """The drafter as a part of the step graph; embedding and head are the target's."""

    def __init__(self, net: Net, draft: Draft):
        self.net, self.config = net, draft.config
        self.weights = Weights(net, "draft", draft.tensors)

    def inject(self, features: Sequence[ir.Value], rows: Rows, n_new: ir.Value, caches: Sequence[Cache]) -> list[Cache]:
        """Make K and V of new context rows for all draft layers; they are written when a layer writes its block.

        `features`: tapped target states [B*Q, H_target] each; `rows` their positions, of which the first n_new[b] are
        certain. One projection serves every layer: [k of layer 0, k of layer 1, …, v of layer 0, …].
        """
        net, config = self.net, self.config
        count, kv, dim = config.layers, config.kv_heads, config.head_dim
        context = project(net, self.weights, net.concat(features, axis=-1), "fc")
        context = net.rms_norm(context, self.weights("hidden_norm.weight"), config.rms_eps)

        names = [f"layers.{i}.self_attn.{part}_proj" for part in "kv" for i in range(count)]
        y = project(net, self.weights, context, *names)
        y = heads(net, y, rows.shape, 2 * count * kv, dim)  # [B, 2*L*Hkv, Q, D]
        k, v = net.split(y, [count * kv] * 2, axis=1)
        if config.qk_norm:
            k = net.mul(net.rms_norm(k, self._ones(dim), config.rms_eps), self._key_norms())
        ks, vs = (net.split(x, [kv] * count, axis=1) for x in (rows.rotation(k), v))
        order = self._merged_order(rows, n_new)
        return [
            InjectedCache(cache.k, cache.v, k, v, rows.start, order, dim)
            for cache, k, v in zip(caches, ks, vs, strict=True)
        ]

    def _merged_order(self, rows: Rows, n_new: ir.Value) -> ir.Value:
        """For context rows ‖ block rows, [B, Hkv, Q+K] flattened: which row comes at each of the Q+K positions.

        The first n_new[b] positions take the certain context rows, the next K the block; what follows is never seen.
        """
        net, block = self.net, self.config.block_size
        batch, query = net.split(rows.shape, [1, 1], axis=0)
        width = net.add(query, net.const([block]))
        column = net.unsqueeze(net.arange(net.op("Squeeze", width)), 0)  # [1, Q+K]
        n_new = net.unsqueeze(n_new, 1)
        in_block = net.op("Min", net.op("Sub", column, n_new), net.const(block - 1))
        order = net.op("Where", net.op("Less", column, n_new), column, net.add(in_block, query))  # [B, Q+K]
        planes = net.mul(batch, net.const([self.config.kv_heads]))
        plane = net.mul(net.arange(net.op("Squeeze", planes)), width)  # [B*Hkv]
        plane = net.reshape(plane, net.concat([batch, net.const([self.config.kv_heads, 1])], axis=0))
        return net.reshape(net.add(plane, net.unsqueeze(order, 1)), [-1])

    def _ones(self, width: int) -> ir.Value:
        return self.net.cast(self.net.const(np.ones(width), np.float32), self.net.dtype)

    def _key_norms(self) -> ir.Value:
        """k_norm weights of all layers, [L*Hkv, 1, D]: RMSNormalization itself takes one scale for all heads."""
        names = [
            f"layers.{i}.self_attn.k_norm.weight"
            for i in range(self.config.layers)
            for _ in range(self.config.kv_heads)
        ]
        return self.net.reshape(self.weights(*names), [len(names), 1, self.config.head_dim])

    def propose(
        self, target: TargetNet, block: ir.Value, rows: Rows, caches: Sequence[Cache], visibility: Visibility
    ) -> ir.Value:
        """Draft logits float32 [B, K-1, V] for the block ids [B, K] = [next token, MASK …]."""
        net, config = self.net, self.config
        x = target.embed(net.reshape(block, [-1]))
        if config.embedding_scale != 1.0:
            x = net.mul(x, net.cast(net.const(config.embedding_scale, np.float32), net.dtype))
        for i, cache in enumerate(caches):
            with net.scope(f"draft/layers.{i}"):
                mask = visibility(causal=config.causal[i], window=config.windows[i])
                x = decoder_layer(net, config, self.weights.at(f"layers.{i}."), x, rows, cache, mask)
        x = net.rms_norm(x, self.weights("norm.weight"), config.rms_eps)
        drafts = config.block_size - 1
        x = net.reshape(x, [-1, config.block_size, config.hidden])
        x = net.op("Slice", x, net.const([1]), net.const([config.block_size]), net.const([1]))
        logits = target.head(net.reshape(x, [-1, config.hidden]))
        logits = net.reshape(logits, [-1, drafts, config.vocab])
        return self._shape_logits(logits)

    def _shape_logits(self, logits: ir.Value) -> ir.Value:
        """Output multiplier and soft cap of drafters that were trained with them."""
        net, config = self.net, self.config
        if config.logit_scale != 1.0:
            logits = net.mul(logits, net.const(config.logit_scale, np.float32))
        if config.logit_softcap:
            cap = net.const(config.logit_softcap, np.float32)
            logits = net.mul(net.op("Tanh", net.op("Div", logits, cap)), cap)
        return logits


@dataclass
class InjectedCache(Cache):
    """A draft layer's cache together with the context rows that wait to be written with its block."""

    context_k: ir.Value  # [B, Hkv, Q, D]
    context_v: ir.Value
    start: ir.Value  # [B]: position of the first context row
    order: ir.Value  # [B*Hkv*(Q+K)], see `DraftNet._merged_order`
    head_dim: int

    def write(self, net: Net, k: ir.Value, v: ir.Value, start: ir.Value) -> None:
        super().write(net, self._merge(net, self.context_k, k), self._merge(net, self.context_v, v), self.start)

    def _merge(self, net: Net, context: ir.Value, block: ir.Value) -> ir.Value:
        both = net.concat([context, block], axis=2)  # [B, Hkv, Q+K, D]
        shape = net.op("Shape", both)
        rows = net.reshape(both, [-1, self.head_dim])
        return net.reshape(net.op("Gather", rows, self.order, axis=0), shape)
