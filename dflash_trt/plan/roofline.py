"""Seconds of work from a card's data sheet: the larger of its bytes and its FLOPs, and what starting kernels costs.

The few numbers here are the same for every card, model and batch. They were read off the measured tables once
(`measured.py`; docs/plan.md names the rows) and are not fitted to any published throughput.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash_trt.gpus import Card
from dflash_trt.kv import WIDTHS
from dflash_trt.plan.ops import ACTIVATION, AllReduce, Attention, Experts, Gemm, Op, Small

BANDWIDTH = 0.8  # share of the memory's peak; AIConfigurator's system files have the same
COMPUTE = {"bf16": 0.7, "fp8": 0.6, "fp4": 0.35}  # share of the tensor cores' peak, GEMMs of 8192 x 8192 x 8192
LINK = 0.8  # share of the links' peak, all-reduces of 1 GiB
KERNEL = 3e-6  # seconds before and after the work of a kernel in a CUDA graph; AIConfigurator's constant
KERNELS = {Gemm: 1, Small: 1, Attention: 3, Experts: 6}  # of 11 and 18 us for the smallest attention and experts


@dataclass(frozen=True)
class Roofline:
    """Tells seconds of ops on a card."""

    card: Card

    def seconds(self, op: Op) -> float:
        match op:
            case AllReduce():
                return self._all_reduce(op)
            case Small():
                work = self._memory(op.bytes)
            case Gemm():
                work = max(self._memory(op.bytes), op.flops / self._speed(op.precision))
            case Attention():
                work = max(self._memory(op.bytes), op.flops / self._speed("bf16"))
            case Experts():
                work = self._experts(op)
        return KERNELS[type(op)] * KERNEL + work

    def _memory(self, count: float) -> float:
        return count / (BANDWIDTH * self.card.bandwidth)

    def _speed(self, precision: str) -> float:
        dtype = compute_dtype(precision, self.card)
        return COMPUTE[dtype] * self.card.flops[dtype]

    def _experts(self, op: Experts) -> float:
        """The rank that has most to do sets the pace: most experts to read, most tokens to compute."""
        held = op.experts / op.ep
        read = busiest(held, 1 - (1 - op.per_token / op.experts) ** op.tokens, op.ep)
        computed = busiest(op.tokens * op.per_token, 1 / op.ep, op.ep)
        moved = computed * (2 * op.hidden + 3 * op.ffn / op.tp) * ACTIVATION
        memory = self._memory(read * op.weights * WIDTHS[op.precision] + moved)
        return max(memory, 2 * computed * op.weights / self._speed(op.precision))

    def _all_reduce(self, op: AllReduce) -> float:
        """All to all at once, or in two rounds once that is less; a ring or switch does no better with a full link."""
        if op.ranks == 1:
            return 0.0
        size, latency = op.values * ACTIVATION, self.card.link_latency
        link = LINK * self.card.link
        once = latency + (op.ranks - 1) * size / link
        twice = 2 * latency + 2 * (op.ranks - 1) / op.ranks * size / link
        return min(once, twice)


def compute_dtype(precision: str, card: Card) -> str:
    """What the tensor cores multiply in. MXFP4's activations are MXFP8 on Blackwell, bf16 on Hopper."""
    wanted = {"bf16": "bf16", "fp8": "fp8", "mxfp4": "fp8" if card.sm >= 100 else "bf16", "nvfp4": "fp4"}[precision]
    return wanted if wanted in card.flops else "bf16"


def busiest(trials: float, share: float, ranks: int) -> float:
    """Expected count of the rank with most, when each of `trials` counts with probability `share` on every rank.

    Mean and the usual bound on the largest of `ranks` deviations, no more than all: sqrt(2 ln ranks) deviations.
    """
    mean = trials * share
    return min(trials, mean + math.sqrt(2 * math.log(ranks) * mean * (1 - share)))
