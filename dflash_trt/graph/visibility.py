"""Which cache positions a column may see, as boolean masks [B, 1, Q, S] made once per pass.

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

    def __init__(self, net: Net, positions: ir.Value, length: ir.Value, cache_len: ir.Value):
        """`positions` [B, Q] of the columns; `length` [B] cache positions in use; `cache_len` scalar S."""
        self._net = net
        self._column = net.unsqueeze(positions, 1, 3)  # [B, 1, Q, 1]
        self._key = net.unsqueeze(net.arange(cache_len), 0, 1, 2)  # [1, 1, 1, S]
        last = net.op("Sub", net.unsqueeze(length, 1, 2, 3), net.const(1))
        self._last = net.op("Expand", last, net.op("Shape", self._column))  # [B, 1, Q, 1]
        self._masks: dict[Sight, ir.Value] = {}

    def __call__(self, sight: Sight) -> ir.Value:
        """The mask of a layer."""
        if sight not in self._masks:
            self._masks[sight] = self._mask(sight)
        return self._masks[sight]

    def _mask(self, sight: Sight) -> ir.Value:
        net = self._net
        visible = net.op("LessOrEqual", self._key, self._column if sight.causal else self._last)
        if sight.window is None:
            return visible
        distance = net.op("Abs", net.op("Sub", self._column, self._key))
        return net.op("And", visible, net.op("Less", distance, net.const(sight.window)))
