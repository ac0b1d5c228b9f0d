"""KV caches by this package's ops: one tensor for all layers of a drafter, one a layer of a target.

A cache is [B, 2*L*Hkv, S, D]: the K heads of its layers, then their V heads. Context rows go into it with one
`kv_inject` for all layers; the rows of a block attend to it and to themselves by `block_attention`, and need not be in
it. A drafter's block is never written at all: it lasts one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from dflash_trt.checkpoint import StackConfig
from dflash_trt.graph.block_attention import block_attention
from dflash_trt.graph.kv_inject import kv_inject
from dflash_trt.graph.layer import LayerCache, Projected, Rows
from dflash_trt.graph.net import Net
from dflash_trt.graph.visibility import Sight
from dflash_trt.graph.weights import Weights


@dataclass
class Store:
    """One cache tensor; each write makes the next version of the same buffer."""

    kv: ir.Value  # [B, 2*L*Hkv, S, D]
    layers: int
    overflow: ir.Value | None = None  # int32 [1]: rows that found no place

    def write(self, net: Net, config: StackConfig, y: ir.Value, rows: Rows, k_norm: ir.Value | None) -> None:
        """y [B*Q, 2*L*Hkv*D] as projected; the first rows.count[b] of row b count."""
        width = net.const([2 * self.layers * config.kv_heads * config.head_dim])
        stacked = net.reshape(y, net.concat([rows.shape, width], axis=0))
        self.kv, self.overflow = kv_inject(
            net, stacked, rows.rotation.cos, rows.rotation.sin, k_norm, rows.start, rows.count, self.kv,
            rotated=config.head_dim, epsilon=config.rms_eps,
        )  # fmt: skip

    def read(
        self,
        net: Net,
        config: StackConfig,
        layer: int,
        new: Projected,
        rows: Rows,
        sight: Sight,
        sinks: ir.Value | None = None,
    ) -> ir.Value:
        """The rows of one layer attend to the positions before them and to themselves, [B, Hq, Q, D]."""
        return block_attention(
            net, new.q, new.k, new.v, self.kv, rows.start, rows.count, sinks,
            k_head=layer * config.kv_heads, v_head=(self.layers + layer) * config.kv_heads,
            causal=sight.causal, window=sight.window, scale=config.head_dim**-0.5,
        )  # fmt: skip


@dataclass
class TargetLayer:
    """A layer of the target: its rows stay."""

    store: Store
    sinks: bool

    def attend(
        self, net: Net, config: StackConfig, weights: Weights, new: Projected, rows: Rows, sight: Sight
    ) -> ir.Value:
        sizes = [config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim]
        _, kv = net.split(new.raw, sizes, axis=-1)
        k_norm = net.unsqueeze(weights("self_attn.k_norm.weight"), 0) if config.qk_norm else None
        self.store.write(net, config, kv, rows, k_norm)
        sinks = weights.raw("self_attn.sinks") if self.sinks else None
        if sinks is not None and sinks.dtype != ir.DataType.FLOAT:
            sinks = net.cast(sinks, ir.DataType.FLOAT)
        return self.store.read(net, config, 0, new, rows, sight, sinks)


@dataclass
class DraftLayer:
    """A layer of the drafter: the context is in the store, the block passes by."""

    store: Store
    layer: int

    def attend(
        self, net: Net, config: StackConfig, weights: Weights, new: Projected, rows: Rows, sight: Sight
    ) -> ir.Value:
        return self.store.read(net, config, self.layer, new, rows, sight)


class PluginCaches:
    """Inputs `ROLE_kv_cache.i`, outputs `ROLE_kv_present.i`: of a target one a layer, of a drafter one in all."""

    first = 0  # block_attention takes sinks by themselves

    def __init__(self, net: Net, role: str, config: StackConfig, length: int | str, sinks: bool = False):
        self._net, self._role, self._config, self._sinks = net, role, config, sinks
        shared = role == "draft"
        layers, count = (config.layers, 1) if shared else (1, config.layers)
        self._shape = ("batch", 2 * layers * config.kv_heads, length, config.head_dim)
        self._stores = [Store(net.input(f"{role}_kv_cache.{i}", net.dtype, self._shape), layers) for i in range(count)]

    @property
    def layers(self) -> Sequence[LayerCache]:
        return [TargetLayer(store, self._sinks) for store in self._stores]

    @property
    def length(self) -> ir.Value:
        return self._net.op("Squeeze", self._net.op("Shape", self._stores[0].kv, start=2, end=3))

    def inject(self, weights: Weights, y: ir.Value, rows: Rows, n_new: ir.Value, block: int) -> Sequence[LayerCache]:
        config, (store,) = self._config, self._stores
        names = [f"layers.{i}.self_attn.k_norm.weight" for i in range(config.layers)]
        k_norm = self._net.reshape(weights(*names), [config.layers, config.head_dim]) if config.qk_norm else None
        store.write(self._net, config, y, rows, k_norm)
        return [DraftLayer(store, i) for i in range(config.layers)]

    def overflow(self) -> ir.Value | None:
        """Rows of the first store that found no place, int32 [1]; the others lose the same ones."""
        return self._stores[0].overflow

    def present(self) -> None:
        for i, store in enumerate(self._stores):
            self._net.output(f"{self._role}_kv_present.{i}", store.kv, self._net.dtype, self._shape)
