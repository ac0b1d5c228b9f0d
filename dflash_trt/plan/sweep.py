"""Batches and draft lengths, and what each makes of them; the Pareto front; the choice for a goal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dflash_trt.gpus import Card
from dflash_trt.plan.acceptance import Acceptance
from dflash_trt.plan.memory import Memory, measure_memory
from dflash_trt.plan.models import Model, Split
from dflash_trt.plan.ops import Op
from dflash_trt.plan.steps import METHODS, Load, Method, build_step

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
Goal = Literal["latency", "interactive", "throughput"]
GOALS: dict[Goal, str] = {
    "latency": "most tokens a second for each user",
    "interactive": "most tokens a second of a GPU at {floor:g} tokens a second for each user, or more",
    "throughput": "most tokens a second of a GPU at {floor:g} tokens a second for each user, or more",
}
FLOORS: dict[Goal, float] = {"latency": 0, "interactive": 500, "throughput": 50}


class Clock(Protocol):
    """Tells seconds of work: `Roofline` or `Measured`."""

    def seconds(self, op: Op) -> float: ...


@dataclass(frozen=True)
class Workload:
    """What is served."""

    context: int  # tokens in a row's caches, on average over its answer
    sequence: int  # tokens of the longest row
    cache: str = "bf16"
    gap: float = 0.0  # seconds of a step in which the GPUs wait: for the host, for each other


@dataclass(frozen=True)
class Point:
    """One setting and what it does."""

    method: Method
    split: Split
    batch: int
    draft: int  # K; 0 for AR
    tokens: float  # a step yields for each row
    seconds: float  # of a step
    parts: dict[str, float]  # seconds by part of the step
    memory: Memory

    @property
    def per_user(self) -> float:
        return self.tokens / self.seconds

    @property
    def per_gpu(self) -> float:
        return self.batch * self.per_user / self.split.tp


def time_step(model: Model, method: Method, load: Load, split: Split, clock: Clock) -> dict[str, float]:
    """Seconds by part."""
    parts: dict[str, float] = {}
    for call in build_step(model, method, load, split):
        parts[call.part] = parts.get(call.part, 0.0) + call.count * clock.seconds(call.op)
    return parts


def sweep(
    model: Model,
    splits: Iterable[Split],
    card: Card,
    clock: Clock,
    workload: Workload,
    accepted: dict[Method, Acceptance],
    batches: Sequence[int] = BATCHES,
    drafts: Sequence[int] | None = None,
) -> list[Point]:
    """All settings, those that do not fit in memory too. AR needs no entry in `accepted`; others are left out without.

    `drafts` are K of DFlash, by default 1 up to what its block holds; EAGLE-3 has its own, 1 to 7.
    """
    points = []
    for split in splits:
        for method in METHODS:
            if method != "ar" and (method not in accepted or (method == "dflash" and model.dflash is None)):
                continue
            for draft in _drafts(model, method, drafts):
                tokens = accepted[method].tokens(draft) if draft else 1.0
                for batch in batches:
                    load = Load(batch, draft, workload.context, workload.cache)
                    parts = time_step(model, method, load, split, clock) | {"waiting": workload.gap}
                    memory = measure_memory(model, method, split, card, batch, workload.sequence, draft, workload.cache)
                    points.append(Point(method, split, batch, draft, tokens, sum(parts.values()), parts, memory))
    return points


def _drafts(model: Model, method: Method, drafts: Sequence[int] | None) -> Sequence[int]:
    if method == "ar":
        return (0,)
    if method == "eagle3":
        return tuple(range(1, 8))
    block = model.dflash.block if model.dflash else None
    return drafts or tuple(range(1, block or 16))


def pareto(points: Iterable[Point]) -> list[Point]:
    """Of those that fit: from the fastest for a user to the most of a GPU, each better at one than all others."""
    front: list[Point] = []
    for point in sorted((p for p in points if p.memory.fits), key=lambda p: (-p.per_user, -p.per_gpu)):
        if not front or point.per_gpu > front[-1].per_gpu:
            front.append(point)
    return front


def choose(points: Iterable[Point], goal: Goal, floor: float) -> Point | None:
    """The best setting; None if nothing fits or nothing is as fast as the floor."""
    fitting = [p for p in points if p.memory.fits and p.per_user >= floor]
    key = (lambda p: p.per_user) if goal == "latency" else (lambda p: p.per_gpu)
    return max(fitting, key=key, default=None)


def throughput_at(front: Sequence[Point], per_user: float) -> float | None:
    """Tokens a second of a GPU at that speed, between the front's points (logarithms); None if it is not reached."""
    if not front or per_user > front[0].per_user:
        return None
    for fast, slow in itertools.pairwise(front):
        if slow.per_user <= per_user:
            share = math.log(fast.per_user / per_user) / math.log(fast.per_user / slow.per_user)
            return fast.per_gpu * (slow.per_gpu / fast.per_gpu) ** share
    return front[-1].per_gpu
