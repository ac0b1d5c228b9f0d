"""Rotary position embedding: inverse frequencies per kind, angles computed inside the graph.

Nothing is tabulated: one step needs cos and sin of B*Q positions only, which costs nothing next to a layer, and a
table of 131,072 rows would have to be written beside the checkpoint.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), Llama 3.1's model card code for `llama3`.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint import Rope
from dflash_trt.graph.net import Net


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Angles per position, float32 [head_dim/2], and the factor on cos and sin (1 except for YaRN)."""
    plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    plain = plain.astype(np.float32)
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Short waves stay, long waves are stretched by `factor`, those between are blended."""
    wavelength = 2 * math.pi / plain
    low_wave = rope.original_max_position / rope.low_freq_factor
    high_wave = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * plain / rope.factor + blend * plain
    stretched = np.where(wavelength > low_wave, plain / rope.factor, plain)
    return np.where((wavelength <= low_wave) & (wavelength >= high_wave), mixed, stretched).astype(np.float32)


def _yarn(rope: Rope, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """Dimensions that turn often keep their frequency, slow ones are interpolated, with a linear ramp between."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0, 1)
    return (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(rope: Rope) -> float:
    def scale(factor: float, mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.factor, rope.mscale) / scale(rope.factor, rope.mscale_all_dim)
    return scale(rope.factor, 1.0)


class Rotation:
    """cos and sin of a set of positions, made once and shared by all layers."""

    def __init__(self, net: Net, rope: Rope, head_dim: int, positions: ir.Value):
        """`positions` int64 [B, Q]."""
        frequencies, factor = inverse_frequencies(rope, head_dim)
        angles = net.mul(  # [B, Q, D/2] float32
            net.unsqueeze(net.cast(positions, ir.DataType.FLOAT), 2), net.const(frequencies, np.float32)
        )
        scale = net.const(factor, np.float32)
        self._net = net
        self.cos, self.sin = (net.mul(net.op(f, angles), scale) for f in ("Cos", "Sin"))  # [B, Q, D/2] float32
        self._cos, self._sin = (net.cast(angle, net.dtype) for angle in (self.cos, self.sin))

    def __call__(self, x: ir.Value) -> ir.Value:
        """Rotate x [B, heads, Q, D]."""
        return self._net.op("RotaryEmbedding", x, self._cos, self._sin, interleaved=0)
