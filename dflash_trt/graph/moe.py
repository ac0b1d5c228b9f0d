"""A mixture of experts in place of an MLP: a router picks k of E experts for a row and sums what they say, by share.

    shares = softmax(the k largest of x W_router + b)
    expert = (up + 1) * gate * sigmoid(alpha * gate) W_down + b,  gate = min(x W, limit), up = x W within ± limit

There are three forms. For a CPU: `moe_loop.py`, chosen experts only. For TensorRT "native": products over all experts
*at hand*, each row's share of those that it did not choose being 0. For TensorRT "layer": a MOE layer (`TRT_MoE`).

Why dense. A step's shapes must not depend on what the router says, for it is a CUDA graph; so a product over all
experts at hand is what TensorRT's general layers can say without gathering weights (which would unpack every row's k
experts into memory of their own). It is sane because the experts at hand are few: of 128 one rank of 8 holds 16. A
step reads all their weights, whatever the router says, and reading is what decoding waits for: of gpt-oss-120b 16 MB an
expert and layer, 9 GB a step and rank. A verified block of 16 rows picks 64 times, which touches 6 of a rank's 16
experts in the mean: 2.5 times the reading that is needed. One row alone (autoregressive, batch 1) touches half an
expert: 32 times; there this form costs most, and drafting gains most. From some 100 rows on nearly every expert is
touched, and dense reads no more than a routed form; it multiplies E/k times as much. This counts packed weights:
whether a compiler unpacks them while it multiplies, or into memory first, was not measured.

The layer reads chosen experts only. TensorRT-RTX 1.7's parser takes it; its compiler refuses it for every SM that was
tried (80, 86, 89, 120, 121). It was never executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint import TargetConfig
from dflash_trt.checkpoint.experts import BLOCKS, PROJECTIONS, SCALES
from dflash_trt.checkpoint.model import Experts
from dflash_trt.checkpoint.mxfp4 import BLOCK, POWERS
from dflash_trt.checkpoint.nvfp4 import FLOAT8
from dflash_trt.graph.moe_loop import MOE_FLOAT, MOE_FP4, MOE_FP4_ROUNDED
from dflash_trt.graph.net import Net
from dflash_trt.graph.nvfp4 import TRT, round_rows, unpack
from dflash_trt.graph.weights import Weights

BYTE, F4, F8 = ir.DataType.UINT8, ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN
BF16, F16 = ir.DataType.BFLOAT16, ir.DataType.FLOAT16
E4M3 = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)  # by byte
GATE_UP, DOWN = PROJECTIONS
SILU = 1  # TRT_MoE's number for it


def moe(
    net: Net, config: TargetConfig, weights: Weights, x: ir.Value, *, experts: range, down_bias: bool = True
) -> ir.Value:
    """Normed rows x [T, H] → [T, H]: the sum, by share, of those chosen experts that are among `experts`.

    The tensors in `weights`, read at a layer's prefix, hold exactly `experts` (numbers among config.experts.count), or
    `config.ffn` columns of their width; of ranks that share an expert's width one alone adds its `down_bias`.
    """
    assert config.experts
    ids, shares = _route(net, config.experts, weights.at("mlp.router."), x)
    at_hand = _AtHand(net, config.experts, weights.at("mlp.experts."), experts, config.hidden, config.ffn, down_bias)
    if not net.native:
        return at_hand.loop(x, ids, shares)
    return at_hand.layer(x, ids, shares) if net.moe == "layer" else at_hand.dense(x, ids, shares)


def _route(net: Net, experts: Experts, weights: Weights, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The chosen experts int64 [T, k], and their shares float32 [T, k]."""
    logits = net.linear(x, weights("weight"), weights("bias"))
    kept, ids = net.op("TopK", net.to_float32(logits), net.const([experts.top_k]), axis=-1, outputs=2)
    return ids, net.op("Softmax", kept, axis=-1)


@dataclass(frozen=True)
class _AtHand:
    """The E experts at hand of one layer."""

    net: Net
    settings: Experts
    weights: Weights  # read below `mlp.experts.`
    numbers: range  # theirs among all experts
    hidden: int  # H
    ffn: int  # I, the width that is at hand
    down_bias: bool

    # -- for a CPU ----------------------------------------------------------------------------------------------------

    def loop(self, x: ir.Value, ids: ir.Value, shares: ir.Value) -> ir.Value:
        net, weights = self.net, self.weights
        down_bias = (
            weights.raw(f"{DOWN}_bias")
            if self.down_bias
            else net.const(np.zeros((len(self.numbers), self.hidden)), np.float32)
        )
        biases = (weights.raw(f"{GATE_UP}_bias"), down_bias)
        pairs = zip(PROJECTIONS, biases, strict=True)
        inputs = [value for name, bias in pairs for value in (*self._stored(name), bias)]
        op, scales = MOE_FLOAT if self.settings.storage == "float" else MOE_FP4, map(self._input_scale, PROJECTIONS)
        if given := [scale for scale in scales if scale is not None]:
            op, inputs = MOE_FP4_ROUNDED, [*inputs, *given]
        numbers = {"first": self.numbers.start, "alpha": self.settings.alpha, "limit": self.settings.limit}
        return net.call(op, x, ids, shares, *inputs, **numbers)

    def _stored(self, name: str) -> list[ir.Value]:
        """As `moe_loop.py` takes them: a weight, or codes, scales and table."""
        net, weights = self.net, self.weights
        if self.settings.storage == "float":
            return [weights.raw(name)]
        rows, columns = self._size(name)
        codes, scales = self._names(name)
        table = POWERS if self.settings.storage == "mxfp4" else E4M3 * np.float32(self._global_scale(name))
        codes_of_two = weights.stored(codes, BYTE, (len(self.numbers), rows, columns // 2))
        return [codes_of_two, weights.stored(scales, BYTE), net.const(table, np.float32)]

    # -- for TensorRT -------------------------------------------------------------------------------------------------

    def dense(self, x: ir.Value, ids: ir.Value, shares: ir.Value) -> ir.Value:
        net, experts = self.net, len(self.numbers)
        gate, up = self._halves(self._product(x, GATE_UP), [experts, -1, self.ffn, 2], axis=3)
        y = self._product(self._clamped_swiglu(gate, up), DOWN)  # [E, T, H]
        rows = net.op("Shape", ids, end=1)
        all_shares = net.concat([rows, net.const([self.settings.count])], axis=0)
        all_shares = net.op("Expand", net.const([[0]], np.float32), all_shares)
        all_shares = net.op("ScatterElements", all_shares, ids, shares, axis=1)
        first, end = net.const([self.numbers.start]), net.const([self.numbers.stop])
        share = net.op("Transpose", net.op("Slice", all_shares, first, end, net.const([1])), perm=[1, 0])
        weighted = net.mul(net.to_float32(y), net.unsqueeze(share, 2))
        return net.from_float32(net.op("ReduceSum", weighted, net.const([0]), keepdims=0))

    def layer(self, x: ir.Value, ids: ir.Value, shares: ir.Value) -> ir.Value:
        """Inputs: rows [1, T, H], ids and shares [1, T, k], gate and up [E, H, I], down [E, I, H], their biases.

        The layer numbers the experts at hand from 0; other choices become a share of 0 in the first of them. It rounds
        no activations: RTX 1.7 says of its switch for that, "not supported yet".
        """
        net, experts = self.net, len(self.numbers)
        local = net.op("Sub", ids, net.const(self.numbers.start))
        inside = net.op("And", net.op("GreaterOrEqual", local, net.const(0)), net.op("Less", local, net.const(experts)))
        local = net.op("Where", inside, local, net.const(0))
        shares = net.from_float32(net.op("Where", inside, shares, net.const(0, np.float32)))
        down = self._unpacked(DOWN)
        if self.settings.storage == "float":
            gate_up = self._halves(self._unpacked(GATE_UP), [experts, self.hidden, self.ffn, 2], axis=3)
        else:
            halves = self._halves(self._unpacked(GATE_UP), [experts, self.ffn, 2, self.hidden], axis=2)
            *gate_up, down = (net.op("Transpose", weight, perm=[0, 2, 1]) for weight in (*halves, down))
        biases = self._halves(self.weights(f"{GATE_UP}_bias"), [experts, self.ffn, 2], axis=2)
        last = (
            self.weights(f"{DOWN}_bias") if self.down_bias else net.const(np.zeros((experts, self.hidden)), self._kind)
        )
        given = (net.unsqueeze(value, 0) for value in (x, local, shares))
        y = net.op(
            "TRT_MoE", *given, *gate_up, down, *biases, last, domain=TRT, activation_type=SILU,
            swiglu_limit=self.settings.limit, swiglu_alpha=self.settings.alpha, swiglu_beta=1.0,
        )  # fmt: skip
        return net.op("Squeeze", y, net.const([0]))

    def _product(self, rows: ir.Value, name: str) -> ir.Value:
        """rows [T, in] or [E, T, in] → [E, T, out]"""
        net, scale, weight = self.net, self._input_scale(name), self._unpacked(name)
        rows = rows if scale is None else round_rows(net, rows, scale)
        if self.settings.storage != "float":
            weight = net.op("Transpose", weight, perm=[0, 2, 1])
        y = net.op("MatMul", rows, weight)
        return net.add(y, net.unsqueeze(self.weights(f"{name}_bias"), 1)) if name == GATE_UP or self.down_bias else y

    def _unpacked(self, name: str) -> ir.Value:
        """In the graph's dtype: floats [E, in, out], four bits [E, out, in].

        The parser takes no E8M0 constants: MXFP4's scales are looked up in a table of powers of two. float16 has not
        all of them, there the weights are float32 first.
        """
        net, weights = self.net, self.weights
        if self.settings.storage == "float":
            return weights(name)
        codes, scales = self._names(name)
        values = weights.stored(codes, F4, (len(self.numbers), *self._size(name)))
        if self.settings.storage == "nvfp4":
            return unpack(net, values, weights.stored(scales, F8), net.const(self._global_scale(name), np.float32))
        table = net.const(POWERS, ml_dtypes.bfloat16 if net.dtype == BF16 else np.float32)
        factors = net.op("Gather", table, net.cast(weights.stored(scales, BYTE), ir.DataType.INT32), axis=0)
        weight = net.op("DequantizeLinear", values, factors, axis=-1, block_size=BLOCK)
        return net.cast(weight, F16) if net.dtype == F16 else weight

    def _halves(self, value: ir.Value, shape: Sequence[int], axis: int) -> list[ir.Value]:
        """What lies side by side along `axis` of the given shape, where the length is 2: gate, up."""
        net = self.net
        parts = net.split(net.reshape(value, shape), [1, 1], axis=axis)
        return [net.op("Squeeze", part, net.const([axis])) for part in parts]

    def _clamped_swiglu(self, gate: ir.Value, up: ir.Value) -> ir.Value:
        """In float32: bfloat16 has no 1.702."""
        net = self.net
        limit, least, alpha, one = (
            net.const(number, np.float32)
            for number in (self.settings.limit, -self.settings.limit, self.settings.alpha, 1)
        )
        gate, up = (net.to_float32(half) for half in (gate, up))
        gate, up = net.op("Min", gate, limit), net.op("Max", net.op("Min", up, limit), least)
        y = net.mul(net.mul(gate, net.op("Sigmoid", net.mul(gate, alpha))), net.add(up, one))
        return net.from_float32(y)

    # -- the tensors --------------------------------------------------------------------------------------------------

    @property
    def _kind(self) -> np.dtype:
        return self.net.dtype.numpy()

    def _size(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of one expert."""
        return (2 * self.ffn, self.hidden) if name == GATE_UP else (self.hidden, self.ffn)

    def _names(self, name: str) -> tuple[str, str]:
        """Of the tensors with codes and with scales."""
        if self.settings.storage == "mxfp4":
            return f"{name}{BLOCKS}", f"{name}{SCALES}"
        return name, f"{name}_weight_scale"

    def _global_scale(self, name: str) -> float:
        return self.weights.number(f"{name}_weight_scale_2")

    def _input_scale(self, name: str) -> ir.Value | None:
        """Of the rows that a product takes; None if they are not quantized."""
        scale = f"{name}_input_scale"
        return self.net.const(self.weights.number(scale), np.float32) if scale in self.weights else None
