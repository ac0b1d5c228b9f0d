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
from dflash_trt.graph.layer import Cache, Rows, decoder_layer, heads
from dflash_trt.graph.net import Net
from dflash_trt.graph.target import TargetNet
from dflash_trt.graph.visibility import Visibility
from dflash_trt.graph.weights import Weights


class DraftNet:
    """The drafter as a part of the step graph; embedding and head are the target's."""

    def __init__(self, net: Net, draft: Draft):
        self.net, self.config = net, draft.config
        self.weights = Weights(net, "draft", draft.tensors)

    def inject(self, features: Sequence[ir.Value], rows: Rows, caches: Sequence[Cache]) -> None:
        """Write K and V of new context rows into the caches of all draft layers.

        `features`: tapped target states [B*Q, H_target] each; `rows` their positions. One projection makes the keys and
        values of every layer: the stacked weight is [k of layer 0, k of layer 1, …, v of layer 0, …].
        """
        net, config = self.net, self.config
        count, kv, dim = config.layers, config.kv_heads, config.head_dim
        context = net.linear(net.concat(features, axis=-1), self.weights("fc.weight"))
        context = net.rms_norm(context, self.weights("hidden_norm.weight"), config.rms_eps)

        names = [f"layers.{i}.self_attn.{part}_proj" for part in "kv" for i in range(count)]
        y = net.linear(
            context, self.weights(*(f"{n}.weight" for n in names)), self.weights.bias(*(f"{n}.bias" for n in names))
        )
        y = heads(net, y, rows.shape, 2 * count * kv, dim)  # [B, 2*L*Hkv, Q, D]
        k, v = net.split(y, [count * kv] * 2, axis=1)
        if config.qk_norm:
            k = net.mul(net.rms_norm(k, self._ones(dim), config.rms_eps), self._key_norms())
        k = rows.rotation(k)
        for cache, layer_k, layer_v in zip(
            caches, net.split(k, [kv] * count, axis=1), net.split(v, [kv] * count, axis=1), strict=True
        ):
            cache.write(net, layer_k, layer_v, rows.start)

    def _ones(self, width: int) -> ir.Value:
        return self.net.cast(self.net.const(np.ones(width), np.float32), self.net.dtype)

    def _key_norms(self) -> ir.Value:
        """k_norm weights of all layers, [L*Hkv, 1, D]: RMSNormalization itself takes one scale for all heads."""
        names = [f"layers.{i}.self_attn.k_norm.weight" for i in range(self.config.layers) for _ in range(self.config.kv_heads)]
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
