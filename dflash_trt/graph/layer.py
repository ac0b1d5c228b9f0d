"""The pre-norm decoder layer that targets and drafters share: grouped-query attention, then a SwiGLU MLP or a
mixture of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from dflash_trt.checkpoint import StackConfig, TargetConfig
from dflash_trt.graph.collective import all_reduce
from dflash_trt.graph.linear import project
from dflash_trt.graph.mapping import Rank
from dflash_trt.graph.moe import moe
from dflash_trt.graph.net import Net
from dflash_trt.graph.rope import Rotation
from dflash_trt.graph.visibility import Sight, Visibility
from dflash_trt.graph.weights import Weights


@dataclass(frozen=True)
class Rows:
    """The rows of one pass: B sequences of Q columns, flattened to [B*Q, …] outside attention."""

    shape: ir.Value  # [2]: (B, Q)
    start: ir.Value  # [B]: cache position of column 0
    count: ir.Value  # [B]: columns that are more than padding
    length: ir.Value  # [B]: cache positions in use once this pass has written its own, start + Q
    rotation: Rotation
    visibility: Visibility


@dataclass(frozen=True)
class Projected:
    """What a layer's rows became."""

    raw: ir.Value  # [B*Q, (Hq + 2*Hkv)*D], q, k and v as projected
    q: ir.Value  # [B, Hq, Q, D], normed where the model does that, and rotated
    k: ir.Value  # [B, Hkv, Q, D], likewise
    v: ir.Value  # [B, Hkv, Q, D]


class LayerCache(Protocol):
    """The past of one layer: takes the rows' keys and values in, and lets the rows attend to all of it."""

    def attend(
        self, net: Net, config: StackConfig, weights: Weights, new: Projected, rows: Rows, sight: Sight
    ) -> ir.Value:
        """[B, Hq, Q, D]"""
        ...


class Caches(Protocol):
    """Those of all layers of a model, as inputs and outputs of the graph."""

    @property
    def layers(self) -> Sequence[LayerCache]: ...

    @property
    def first(self) -> int:
        """The cache position of token 0."""
        ...

    @property
    def length(self) -> ir.Value:
        """S, a scalar."""
        ...

    def inject(self, weights: Weights, y: ir.Value, rows: Rows, n_new: ir.Value, block: int) -> Sequence[LayerCache]:
        """Take in a drafter's context: y [B*Q, 2*L*Hkv*D], k of all layers and then v of all layers as projected, of
        which the first n_new[b] rows count. A block of so many columns follows them. Returns the layers' caches."""
        ...

    def overflow(self) -> ir.Value | None:
        """int32 [1]: how many rows found no place in the cache; None: nobody counts."""
        ...

    def present(self) -> None:
        """Make the outputs; whoever runs the graph binds them to the same buffers as the inputs."""
        ...


def heads(net: Net, x: ir.Value, rows: ir.Value, count: int, head_dim: int) -> ir.Value:
    """[B*Q, count*D] → [B, count, Q, D]; `rows` is the shape (B, Q)."""
    shape = net.concat([rows, net.const([count, head_dim])], axis=0)
    return net.op("Transpose", net.reshape(x, shape), perm=[0, 2, 1, 3])


def project_qkv(net: Net, config: StackConfig, weights: Weights, x: ir.Value, rows: Rows) -> Projected:
    """q, k and v of the normed rows x [B*Q, H]."""
    raw = project(net, weights, x, *(f"self_attn.{part}_proj" for part in "qkv"))
    y = heads(net, raw, rows.shape, config.heads + 2 * config.kv_heads, config.head_dim)
    if config.qk_norm:
        q, k, v = net.split(y, [config.heads, config.kv_heads, config.kv_heads], axis=1)
        q = rows.rotation(net.rms_norm(q, weights("self_attn.q_norm.weight"), config.rms_eps))
        k = rows.rotation(net.rms_norm(k, weights("self_attn.k_norm.weight"), config.rms_eps))
        return Projected(raw, q, k, v)
    qk, v = net.split(y, [config.heads + config.kv_heads, config.kv_heads], axis=1)
    q, k = net.split(rows.rotation(qk), [config.heads, config.kv_heads], axis=1)
    return Projected(raw, q, k, v)


def decoder_layer(
    net: Net,
    config: StackConfig,
    weights: Weights,
    x: ir.Value,
    rows: Rows,
    cache: LayerCache,
    sight: Sight,
    rank: Rank,
) -> ir.Value:
    """x [B*Q, H] → [B*Q, H], the same on every rank; the cache takes the rows' keys and values in."""
    normed = net.rms_norm(x, weights("input_layernorm.weight"), config.rms_eps)
    new = project_qkv(net, config, weights, normed, rows)
    y = cache.attend(net, config, weights, new, rows, sight)
    y = net.reshape(net.op("Transpose", y, perm=[0, 2, 1, 3]), [-1, config.heads * config.head_dim])
    x = project(net, weights, y, "self_attn.o_proj", residual=x, summed_over=rank.tp_group)

    normed = net.rms_norm(x, weights("post_attention_layernorm.weight"), config.rms_eps)
    if isinstance(config, TargetConfig) and config.experts:
        experts, adds_bias = rank.experts(config.experts.count), rank.expert_width_rank == 0
        y = moe(net, config, weights, normed, experts=experts, down_bias=adds_bias)
        return net.add(x, all_reduce(net, y, rank.everybody))
    gate_up = project(net, weights, normed, "mlp.gate_proj", "mlp.up_proj")
    y = net.swiglu(gate_up, config.ffn)
    return project(net, weights, y, "mlp.down_proj", residual=x, summed_over=rank.tp_group)
