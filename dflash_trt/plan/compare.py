"""Methods beside each other at a speed for each user: what NVIDIA's claim for eight B300 is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from dflash_trt.plan.steps import Method
from dflash_trt.plan.sweep import Point, pareto, throughput_at


@dataclass(frozen=True)
class Claim:
    """What somebody published of one pair on one machine: ratios of throughput at a range of speeds for each user."""

    target: str
    gpus: str
    per_user: tuple[float, ...]
    over: Mapping[Method, float]


# NVIDIA's blog of 2026-06-23: TensorRT-LLM, SPEED-Bench coding; "more than" 15
CLAIM = Claim("openai/gpt-oss-120b", "B300x8", (500.0, 550.0, 600.0), {"ar": 15.0, "eagle3": 1.5})


@dataclass(frozen=True)
class Ratio:
    """DFlash's throughput over another method's at one speed for each user."""

    per_user: float
    over: Method
    dflash: float | None  # tokens/s/GPU; None: not that fast with any batch
    other: float | None
    fastest: float  # tokens/s/user of the other method at its best

    @property
    def value(self) -> float | None:
        return self.dflash / self.other if self.dflash and self.other else None

    def record(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.value}


def ratios(points: Sequence[Point], speeds: Sequence[float]) -> list[Ratio]:
    """Each method with its own best settings."""
    fronts = fronts_of(points)
    if "dflash" not in fronts:
        return []
    others = [method for method in fronts if method != "dflash"]
    return [
        Ratio(
            per_user=speed,
            over=other,
            dflash=throughput_at(fronts["dflash"], speed),
            other=throughput_at(fronts[other], speed),
            fastest=fronts[other][0].per_user,
        )
        for other in others
        for speed in speeds
    ]


def fronts_of(points: Sequence[Point]) -> dict[Method, list[Point]]:
    """Method → its Pareto front, where anything fits."""
    found: dict[Method, list[Point]] = {}
    for method in dict.fromkeys(point.method for point in points):
        if front := pareto(point for point in points if point.method == method):
            found[method] = front
    return found
