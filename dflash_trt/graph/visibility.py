"""Which cache positions a column may see, as masks made once per pass: boolean [B, 1, Q, S], or, in models with
attention sinks, numbers [B, Hq, Q, S] that are added to the scores.

A mask is the safe form. ONNX's `is_causal` with `nonpad_kv_seqlen` says the same (column i of a row sees positions up
to length - Q + i), but TensorRT-RTX 1.7's parser aligns `is_causal` to the upper left and drops the lengths without a
word.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from dflash_trt.graph.net import Net


@dataclass(frozen=True)
class Sight:
    """What a layer's rows may see: all below the row's length, unless it says otherwise."""

    causal: bool  # nothing after themselves
    window: int | None  # nothing at this distance or further, on either side (z-lab's reference `_attention_mask`)


class Visibility:
    """Masks of one pass, one for each distinct sight among its layers."""

    def __init__(self, net: Net, positions: ir.Value, length: ir.Value, cache_len: ir.Value, first: int = 0):
        """`positions` [B, Q] of the columns; `length` [B] cache positions in use; `cache_len` scalar S.

        `first`: the cache position of token 0; those before are for sinks.
        """
        self._net = net
        self._column = net.unsqueeze(positions, 1, 3)  # [B, 1, Q, 1]
        self._key = net.unsqueeze(net.arange(cache_len), 0, 1, 2)  # [1, 1, 1, S], each the position of its token
        if first:
            self._key = net.op("Sub", self._key, net.const(first))
        last = net.op("Sub", net.unsqueeze(length, 1, 2, 3), net.const(first + 1))
        self._last = net.op("Expand", last, net.op("Shape", self._column))  # [B, 1, Q, 1]
        self._masks: dict[Sight, ir.Value] = {}
        self._numbers: dict[Sight, ir.Value] = {}

    def __call__(self, sight: Sight) -> ir.Value:
        """The mask of a layer."""
        if sight not in self._masks:
            self._masks[sight] = self._mask(sight)
        return self._masks[sight]

    def with_sinks(self, sight: Sight, sinks: ir.Value) -> ir.Value:
        """What a layer adds to its scores, in the graph's dtype: `sinks` [Hq] before token 0; else 0 where a key is
        visible and half the lowest number where it is not, [B, Hq, Q, S]. Up to the sinks, layers of equal sight share
        it.

        That weighs nothing in any softmax, for a row always sees itself. Minus infinity would say the same, but a
        kernel that reads keys in parts meets parts of which nothing is visible, and would subtract infinity from
        infinity there; the other half is room for the score.
        """
        net = self._net
        if sight not in self._numbers:
            nothing, lowest = (net.const(number, net.dtype.numpy()) for number in (0, float(net.dtype.min) / 2))
            self._numbers[sight] = net.op("Where", self(sight), nothing, lowest)
        at_sink = net.op("Less", self._key, net.const(0))
        return net.op("Where", at_sink, net.unsqueeze(sinks, 0, 2, 3), self._numbers[sight])

    def _mask(self, sight: Sight) -> ir.Value:
        net = self._net
        visible = net.op("LessOrEqual", self._key, self._column if sight.causal else self._last)
        if sight.window is None:
            return visible
        distance = net.op("Abs", net.op("Sub", self._column, self._key))
        return net.op("And", visible, net.op("Less", distance, net.const(sight.window)))
