"""The kinds of work a step is made of, as one rank does them; `roofline` and `measured` tell the seconds of each.

Widths and counts are those of the rank: a linear layer split over 8 ranks has an eighth of the outputs here.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.kv import CACHE_WIDTHS, WIDTHS

ACTIVATION = 2  # bytes of a value between layers: bf16


@dataclass(frozen=True)
class Gemm:
    """[rows, inputs] x [inputs, outputs]."""

    rows: int
    outputs: int
    inputs: int
    precision: str = "bf16"

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.outputs * self.inputs

    @property
    def bytes(self) -> float:
        moved = self.rows * (self.inputs + self.outputs) * ACTIVATION
        return self.outputs * self.inputs * WIDTHS[self.precision] + moved


@dataclass(frozen=True)
class Attention:
    """`queries` columns of each row over `context` cached tokens, and all that rearranges them before."""

    rows: int
    queries: int
    context: int  # tokens that a row sees: no more than the window
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    cache: str = "bf16"

    @property
    def flops(self) -> float:
        return 4.0 * self.rows * self.queries * self.heads * self.head_dim * self.context

    @property
    def bytes(self) -> float:
        cached = 2 * self.rows * self.context * self.kv_heads * self.head_dim * CACHE_WIDTHS[self.cache]
        return cached + 2 * self.rows * self.queries * self.heads * self.head_dim * ACTIVATION


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer: routing, two grouped GEMMs, the gate between, the weighted sum."""

    tokens: int  # of all ranks that share the experts
    hidden: int
    ffn: int  # of an expert, unsplit
    experts: int
    per_token: int
    tp: int  # ranks that share an expert
    ep: int  # groups that share the experts
    precision: str = "bf16"

    @property
    def weights(self) -> float:
        """Numbers of one expert that a rank holds."""
        return 3.0 * self.hidden * self.ffn / self.tp


@dataclass(frozen=True)
class AllReduce:
    """A sum over the ranks of `values` bf16 numbers, with the norm that TensorRT-LLM fuses into it."""

    values: int
    ranks: int


@dataclass(frozen=True)
class Small:
    """A kernel that moves few bytes: a norm, an activation, rotary, a gather, a choice."""

    bytes: float = 0.0


Op = Gemm | Attention | Experts | AllReduce | Small
