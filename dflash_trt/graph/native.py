"""KV caches by TensorRT's native layers: one pair of tensors a layer, [B, Hkv, S, D], K and V.

TensorRT updates a cache in place only if one node writes it, so a draft layer's context rows and block rows are merged
into one run of positions and written together.

Attention sinks need no layer of their own. In a model that has them, position 0 of every cache is never written: it
holds a zero key and a zero value, and token p lies at position p + 1. Whatever the query, a zero key scores 0, so the
mask alone decides its logit: the head's sink. The softmax gets just that one more logit, and what it weighs is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint import StackConfig
from dflash_trt.graph.layer import LayerCache, Projected, Rows, heads
from dflash_trt.graph.net import Net
from dflash_trt.graph.visibility import Sight
from dflash_trt.graph.weights import Weights


@dataclass
class Cache:
    """Keys and values of one layer, [B, Hkv, S, D]; each write makes the next version of the same buffer."""

    k: ir.Value
    v: ir.Value

    def attend(
        self, net: Net, config: StackConfig, weights: Weights, new: Projected, rows: Rows, sight: Sight
    ) -> ir.Value:
        """By TensorRT's native layers. The lengths add nothing to the mask but the permission to stop early."""
        self.write(net, new.k, new.v, rows.start)
        mask = self.mask(weights, rows, sight)
        return net.op("Attention", new.q, self.k, self.v, mask, None, None, rows.length, scale=config.head_dim**-0.5)

    def mask(self, weights: Weights, rows: Rows, sight: Sight) -> ir.Value:
        """Which keys the rows see, [B, 1, Q, S]."""
        return rows.visibility(sight)

    def write(self, net: Net, k: ir.Value, v: ir.Value, start: ir.Value) -> None:
        """Put k, v [B, Hkv, Q, D] at positions start[b] … start[b] + Q - 1."""
        self.k = net.op("TensorScatter", self.k, k, start, axis=2, mode="linear")
        self.v = net.op("TensorScatter", self.v, v, start, axis=2, mode="linear")


class SinkCache(Cache):
    """Of a layer with sinks, one logit a head."""

    def mask(self, weights: Weights, rows: Rows, sight: Sight) -> ir.Value:
        """What is added to the scores, [B, Hq, Q, S]."""
        return rows.visibility.with_sinks(sight, weights("self_attn.sinks"))


class NativeCaches:
    """Those of all layers of a model: inputs `ROLE_{k,v}_cache.i`, outputs `ROLE_{k,v}_present.i`.

    With `sinks`, position 0 of the first inputs must be zero; it stays so.
    """

    def __init__(self, net: Net, role: str, config: StackConfig, length: int | str, sinks: bool = False):
        self._net, self._role, self._config = net, role, config
        self.first = int(sinks)
        cache = SinkCache if sinks else Cache
        self._shape = ("batch", config.kv_heads, length, config.head_dim)
        self.layers: list[Cache] = [
            cache(*(net.input(f"{role}_{kind}_cache.{i}", net.dtype, self._shape) for kind in "kv"))
            for i in range(config.layers)
        ]

    @property
    def length(self) -> ir.Value:
        """S, a scalar."""
        return self._net.op("Squeeze", self._net.op("Shape", self.layers[0].k, start=2, end=3))

    def inject(self, weights: Weights, y: ir.Value, rows: Rows, n_new: ir.Value, block: int) -> Sequence[LayerCache]:
        """Norm and rotate the stacked rows; they are written when a layer writes its block."""
        net, config = self._net, self._config
        count, kv, dim = config.layers, config.kv_heads, config.head_dim
        y = heads(net, y, rows.shape, 2 * count * kv, dim)  # [B, 2*L*Hkv, Q, D]
        k, v = net.split(y, [count * kv] * 2, axis=1)
        if config.qk_norm:
            k = net.mul(net.rms_norm(k, self._ones(dim), config.rms_eps), self._key_norms(weights))
        ks, vs = (net.split(x, [kv] * count, axis=1) for x in (rows.rotation(k), v))
        order = self._merged_order(rows, n_new, block)
        layers = [
            InjectedCache(cache.k, cache.v, k, v, rows.start, order, dim)
            for cache, k, v in zip(self.layers, ks, vs, strict=True)
        ]
        self.layers = [*layers]
        return layers

    def overflow(self) -> ir.Value | None:
        """TensorRT's layers do not tell."""
        return None

    def present(self) -> None:
        """The caches after the call; whoever runs the graph binds them to the same buffers as the inputs."""
        for i, cache in enumerate(self.layers):
            self._net.output(f"{self._role}_k_present.{i}", cache.k, self._net.dtype, self._shape)
            self._net.output(f"{self._role}_v_present.{i}", cache.v, self._net.dtype, self._shape)

    def _merged_order(self, rows: Rows, n_new: ir.Value, block: int) -> ir.Value:
        """For context rows ‖ block rows, [B, Hkv, Q+K] flattened: which row comes at each of the Q+K positions.

        The first n_new[b] positions take the certain context rows, the next K the block; what follows is never seen.
        """
        net = self._net
        batch, query = net.split(rows.shape, [1, 1], axis=0)
        width = net.add(query, net.const([block]))
        column = net.unsqueeze(net.arange(net.op("Squeeze", width)), 0)  # [1, Q+K]
        n_new = net.unsqueeze(n_new, 1)
        in_block = net.op("Min", net.op("Sub", column, n_new), net.const(block - 1))
        order = net.op("Where", net.op("Less", column, n_new), column, net.add(in_block, query))  # [B, Q+K]
        planes = net.mul(batch, net.const([self._config.kv_heads]))
        plane = net.mul(net.arange(net.op("Squeeze", planes)), width)  # [B*Hkv]
        plane = net.reshape(plane, net.concat([batch, net.const([self._config.kv_heads, 1])], axis=0))
        return net.reshape(net.add(plane, net.unsqueeze(order, 1)), [-1])

    def _ones(self, width: int) -> ir.Value:
        return self._net.cast(self._net.const(np.ones(width), np.float32), self._net.dtype)

    def _key_norms(self, weights: Weights) -> ir.Value:
        """k_norm weights of all layers, [L*Hkv, 1, D]: RMSNormalization itself takes one scale for all heads."""
        config = self._config
        names = [f"layers.{i}.self_attn.k_norm.weight" for i in range(config.layers) for _ in range(config.kv_heads)]
        return self._net.reshape(weights(*names), [len(names), 1, config.head_dim])


@dataclass
class InjectedCache(Cache):
    """A draft layer's cache together with the context rows that wait to be written with its block."""

    context_k: ir.Value  # [B, Hkv, Q, D]
    context_v: ir.Value
    start: ir.Value  # [B]: position of the first context row
    order: ir.Value  # [B*Hkv*(Q+K)], see `NativeCaches._merged_order`
    head_dim: int

    def write(self, net: Net, k: ir.Value, v: ir.Value, start: ir.Value) -> None:
        super().write(net, self._merge(net, self.context_k, k), self._merge(net, self.context_v, v), self.start)

    def _merge(self, net: Net, context: ir.Value, block: ir.Value) -> ir.Value:
        both = net.concat([context, block], axis=2)  # [B, Hkv, Q+K, D]
        shape = net.op("Shape", both)
        rows = net.reshape(both, [-1, self.head_dim])
        return net.reshape(net.op("Gather", rows, self.order, axis=0), shape)
