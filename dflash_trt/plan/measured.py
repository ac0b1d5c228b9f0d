"""Seconds of work from NVIDIA's measured kernel latencies, where there are any; the roofline elsewhere.

The wheel `aiconfigurator-core` (Apache-2.0, extra `plan`) brings tables of TensorRT-LLM's kernels, timed one by one on
each card. A latency between rows is interpolated with logarithms on every axis; beyond a table's rows nothing is
made up: the roofline answers and the kind of work is remembered in `fallbacks`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.errors import UserError
from dflash_trt.gpus import Card
from dflash_trt.plan.models import Model, Split
from dflash_trt.plan.ops import AllReduce, Attention, Experts, Gemm, Op, Small
from dflash_trt.plan.roofline import COMPUTE, Roofline
from dflash_trt.plan.steps import mlp

PACKAGE = "aiconfigurator_core"
VERSION = "1.3.0rc20"  # of TensorRT-LLM, the newest that has all four tables for all cards
SYSTEMS = {
    "B300": "b300_sxm",
    "GB300": "gb300",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "H200": "h200_sxm",
    "H100": "h100_sxm",
    "RTX PRO 6000": "rtx_pro_6000_server",
}
GEMMS = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
CACHES = {"bf16": "bfloat16", "fp8": "fp8"}
EXPERTS = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
SKEW = "power_law_1.2"  # of tokens over experts: AIConfigurator's own choice for models of experts


class Grid:
    """Latencies at points of a few axes."""

    def __init__(self, points: Mapping[tuple[int, ...], float]):
        self.points = points
        self.axes = [sorted({point[axis] for point in points}) for axis in range(len(next(iter(points))))]


class Measured:
    """Tells seconds of ops on a card, from tables where they have rows."""

    def __init__(self, card: Card):
        self.card = card
        self.roofline = Roofline(card)
        self.fallbacks: dict[str, tuple[int, int]] = {}  # kind of work → fewest and most rows that the tables lack
        self._folder = data_folder(card)
        self._known: dict[Op, float] = {}

    def seconds(self, op: Op) -> float:
        if op not in self._known:
            self._known[op] = self._look_up(op)
        return self._known[op]

    def covered(self, model: Model, splits: Sequence[Split]) -> tuple[Split, ...]:
        """Splits whose experts were measured, for they cannot be ranked with others; all, if none was."""
        layer = next((layer for layer in model.target.layers if not layer.dense), None)
        if layer is None:
            return tuple(splits)
        found = []
        for split in splits:
            ops = [op for op, _ in mlp(model.target, layer, 1, split) if isinstance(op, Experts)]
            if all(_open(self._folder, "moe", self._experts(op)) for op in ops):
                found.append(split)
        return tuple(found) or tuple(splits)

    def _look_up(self, op: Op) -> float:
        found: float | None = None
        match op:
            case Gemm():
                found = self._between("gemm", (GEMMS.get(op.precision),), (op.rows, op.outputs, op.inputs))
            case Attention():
                shape = (CACHES.get(op.cache), op.heads, op.kv_heads, op.head_dim, op.window or 0)
                found = self._between("attention", shape, (op.rows, max(1, op.context - 1)))
                if found is not None:  # measured for one query a row; more of them read the same cache
                    found = max(found, op.flops / (COMPUTE["bf16"] * self.card.flops["bf16"]))
            case Experts():
                found = self._between("moe", self._experts(op), (op.tokens,))
            case AllReduce():
                found = 0.0 if op.ranks == 1 else self._between("comm", (op.ranks,), (max(128, op.values),))
            case Small():
                return self.roofline.seconds(op)
        if found is None:
            name, rows = _describe(op)
            low, high = self.fallbacks.get(name, (rows, rows))
            self.fallbacks[name] = (min(low, rows), max(high, rows))
            return self.roofline.seconds(op)
        return found

    def _experts(self, op: Experts) -> tuple[Any, ...]:
        dtype = EXPERTS.get(op.precision) or ("w4a8_mxfp4_mxfp8" if self.card.sm >= 100 else "w4a16_mxfp4")
        return (dtype, op.hidden, op.ffn, op.per_token, op.experts, op.tp, op.ep)

    def _between(self, kind: str, key: tuple[Any, ...], at: tuple[int, ...]) -> float | None:
        grid = None if None in key else _open(self._folder, kind, key)
        return interpolate(grid, at) if grid else None


def data_folder(card: Card) -> Path:
    """Where the card's tables are. Raises UserError without the wheel, or without the card in it."""
    found = importlib.util.find_spec(PACKAGE)  # not imported: only its files are read
    if found is None or not found.submodule_search_locations:
        fix = "pip install 'dflash-trt[plan]', or plan with --data roofline"
        raise UserError("aiconfigurator-core, which has the measured data, is not installed", fix=fix)
    if importlib.util.find_spec("pyarrow") is None:
        fix = "pip install pyarrow, or plan with --data roofline"
        raise UserError("pyarrow, which reads the measured data, is not installed", fix=fix)
    folder = Path(next(iter(found.submodule_search_locations))) / "systems" / "data" / SYSTEMS.get(card.name, "none")
    if not (folder / "gemm" / "trtllm" / VERSION).is_dir():
        fix = "plan with --data roofline"
        raise UserError(f"aiconfigurator-core has no TensorRT-LLM {VERSION} data of {card.name}", where=folder, fix=fix)
    return folder


def is_available(card: Card) -> bool:
    try:
        data_folder(card)
    except UserError:
        return False
    return True


def interpolate(grid: Grid, at: Sequence[int]) -> float | None:
    """Between the rows around a point, multilinear in logarithms; None outside of them, or where one is missing."""
    corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for values, value in zip(grid.axes, at, strict=True):
        place = bisect_left(values, value)
        if place == len(values) or (values[place] != value and place == 0):
            return None
        if values[place] == value:
            corners = [((*point, value), weight) for point, weight in corners]
            continue
        low, high = values[place - 1], values[place]
        share = math.log(value / low) / math.log(high / low)
        corners = [
            ((*point, edge), weight * part)
            for point, weight in corners
            for edge, part in ((low, 1 - share), (high, share))
        ]
    if any(point not in grid.points for point, _ in corners):
        return None
    return math.exp(sum(weight * math.log(grid.points[point]) for point, weight in corners))


def _describe(op: Op) -> tuple[str, int]:
    """A kind of work, and how much of it."""
    match op:
        case Gemm():
            return f"{op.precision} GEMM {op.inputs} → {op.outputs}", op.rows
        case Attention():
            window = f", window {op.window}" if op.window else ""
            return f"attention of {op.heads}/{op.kv_heads} heads of {op.head_dim}{window}, {op.cache} cache", op.rows
        case Experts():
            return f"{op.precision} experts {op.experts} x {op.hidden} x {op.ffn}, tp {op.tp}, ep {op.ep}", op.tokens
        case AllReduce():
            return f"all-reduce over {op.ranks} ranks", op.values
    return "small kernels", 1


@dataclass(frozen=True)
class Table:
    """Where one kind of work lies, and what its columns are called."""

    file: str
    keys: tuple[str, ...]
    axes: tuple[str, ...]
    keep: tuple[tuple[str, Any], ...] = ()


TABLES = {
    "gemm": Table("gemm/trtllm/{}/gemm_perf.parquet", ("gemm_dtype",), ("m", "n", "k")),
    "attention": Table(  # one query a row, with `step` tokens in the cache before it
        "attention/trtllm/{}/generation_attention_perf.parquet",
        ("kv_cache_dtype", "num_heads", "num_key_value_heads", "head_dim", "window_size"),
        ("batch_size", "step"),
        (("beam_width", 1),),
    ),
    "moe": Table(
        "moe/trtllm/{}/moe_perf.parquet",
        ("moe_dtype", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
        ("num_tokens",),
        (("distribution", SKEW),),
    ),
    "comm": Table(  # sizes count values, not bytes: so AIConfigurator asks for them
        "comm/trtllm/{}/custom_allreduce_perf.parquet",
        ("num_gpus",),
        ("message_size",),
        (("allreduce_dtype", "bfloat16"),),
    ),
}


@functools.cache
def _open(folder: Path, kind: str, key: tuple[Any, ...]) -> Grid | None:
    """The rows of one dtype, shape and split; None if there are none."""
    from pyarrow import parquet  # type: ignore[import-untyped, unused-ignore]

    table = TABLES[kind]
    wanted = [(name, "==", value) for name, value in [*zip(table.keys, key, strict=True), *table.keep]]
    file = folder / table.file.format(VERSION)
    rows = parquet.read_table(file, columns=[*table.axes, "latency"], filters=wanted).to_pydict()
    places = zip(*(rows[axis] for axis in table.axes), strict=True)
    points = {place: latency / 1e3 for place, latency in zip(places, rows["latency"], strict=True) if latency > 0}
    return Grid(points) if points else None
