"""The pre-norm decoder layer that targets and drafters share: grouped-query attention, then a SwiGLU MLP."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from dflash_trt.checkpoint import StackConfig
from dflash_trt.graph.linear import project
from dflash_trt.graph.net import Net
from dflash_trt.graph.rope import Rotation
from dflash_trt.graph.weights import Weights


@dataclass(frozen=True)
class Rows:
    """The rows of one pass: B sequences of Q columns, flattened to [B*Q, …] outside attention."""

    shape: ir.Value  # [2]: (B, Q)
    start: ir.Value  # [B]: cache position of column 0
    length: ir.Value  # [B]: cache positions in use once this pass has written its own, start + Q
    rotation: Rotation


@dataclass
class Cache:
    """Keys and values of one layer, [B, Hkv, S, D]; each write makes the next version of the same buffer."""

    k: ir.Value
    v: ir.Value

    def write(self, net: Net, k: ir.Value, v: ir.Value, start: ir.Value) -> None:
        """Put k, v [B, Hkv, Q, D] at positions start[b] … start[b] + Q - 1."""
        self.k = net.op("TensorScatter", self.k, k, start, axis=2, mode="linear")
        self.v = net.op("TensorScatter", self.v, v, start, axis=2, mode="linear")


def heads(net: Net, x: ir.Value, rows: ir.Value, count: int, head_dim: int) -> ir.Value:
    """[B*Q, count*D] → [B, count, Q, D]; `rows` is the shape (B, Q)."""
    shape = net.concat([rows, net.const([count, head_dim])], axis=0)
    return net.op("Transpose", net.reshape(x, shape), perm=[0, 2, 1, 3])


def project_qkv(net: Net, config: StackConfig, weights: Weights, x: ir.Value, rows: Rows) -> tuple[ir.Value, ...]:
    """q [B, Hq, Q, D], k and v [B, Hkv, Q, D] of the normed rows x, rotated."""
    y = project(net, weights, x, *(f"self_attn.{part}_proj" for part in "qkv"))
    y = heads(net, y, rows.shape, config.heads + 2 * config.kv_heads, config.head_dim)
    if config.qk_norm:
        q, k, v = net.split(y, [config.heads, config.kv_heads, config.kv_heads], axis=1)
        q = rows.rotation(net.rms_norm(q, weights("self_attn.q_norm.weight"), config.rms_eps))
        k = rows.rotation(net.rms_norm(k, weights("self_attn.k_norm.weight"), config.rms_eps))
        return q, k, v
    qk, v = net.split(y, [config.heads + config.kv_heads, config.kv_heads], axis=1)
    return *net.split(rows.rotation(qk), [config.heads, config.kv_heads], axis=1), v


def decoder_layer(
    net: Net, config: StackConfig, weights: Weights, x: ir.Value, rows: Rows, cache: Cache, visible: ir.Value
) -> ir.Value:
    """x [B*Q, H] → [B*Q, H]; writes the rows' keys and values to the cache and attends to it.

    `visible`: mask bool [B, 1, Q, S]. The lengths add nothing to it but the permission to stop early.
    """
    normed = net.rms_norm(x, weights("input_layernorm.weight"), config.rms_eps)
    q, k, v = project_qkv(net, config, weights, normed, rows)
    cache.write(net, k, v, rows.start)
    scale = config.head_dim**-0.5
    y = net.op("Attention", q, cache.k, cache.v, visible, None, None, rows.length, scale=scale)
    y = net.reshape(net.op("Transpose", y, perm=[0, 2, 1, 3]), [-1, config.heads * config.head_dim])
    x = project(net, weights, y, "self_attn.o_proj", residual=x)

    normed = net.rms_norm(x, weights("post_attention_layernorm.weight"), config.rms_eps)
    gate_up = project(net, weights, normed, "mlp.gate_proj", "mlp.up_proj")
    return project(net, weights, net.swiglu(gate_up, config.ffn), "mlp.down_proj", residual=x)
