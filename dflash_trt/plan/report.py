"""A plan as one record, which is what `--json` prints, and as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_trt.plan.compare import CLAIM, fronts_of, ratios
from dflash_trt.plan.source import Order
from dflash_trt.plan.steps import NAMES
from dflash_trt.plan.sweep import FLOORS, GOALS, Point, choose
from dflash_trt.sizes import format_bytes

SHOWN = 12  # rows of a method's front that a terminal gets; JSON has all


@dataclass(frozen=True)
class Result:
    """A plan: all settings, and what was chosen."""

    order: Order
    points: list[Point]
    choice: Point | None
    floor: float  # tokens/s/user
    data: str  # "measured" or "roofline"
    fallbacks: Mapping[str, tuple[int, int]]  # of measured data: work that the roofline answered for, by rows


def finish(
    order: Order, points: list[Point], floor: float | None, data: str, fallbacks: Mapping[str, tuple[int, int]]
) -> Result:
    floor = FLOORS[order.goal] if floor is None else floor
    return Result(order, points, choose(points, order.goal, floor), floor, data, fallbacks)


def make_record(result: Result) -> dict[str, Any]:
    """Everything in plain values; speeds in tokens a second, times in seconds, sizes in bytes."""
    order = result.order
    speeds = sorted({result.floor, *(CLAIM.per_user if _is_claim(order) else ())} - {0.0})
    return {
        "target": order.model.name,
        "precision": order.model.target.precision,
        "gpus": str(order.gpus),
        "gpu_count": order.gpus.total,
        "data": result.data,
        "fallbacks": dict(result.fallbacks),
        "notes": list(order.notes),
        "workload": asdict(order.workload),
        "acceptance": {
            method: {"task": one.task, "source": one.source, "tokens": {k: one.tokens(k) for k in range(1, 16)}}
            for method, one in order.accepted.items()
        },
        "goal": order.goal,
        "floor": result.floor,
        "points": len(result.points),
        "fitting": sum(point.memory.fits for point in result.points),
        "fronts": {method: [_point(p) for p in front] for method, front in fronts_of(result.points).items()},
        "ratios": [ratio.record() for ratio in ratios(result.points, speeds)],
        "claim": dict(CLAIM.over) if _is_claim(order) else None,
        "choice": _point(result.choice) | {"keys": keys(result)} if result.choice else None,
    }


def keys(result: Result) -> dict[str, Any]:
    """The setting as a recipe has it, whose ranks are all GPUs that it names.

    Under attention DP TensorRT-LLM counts batch and tokens of each rank.
    """
    point, workload = result.choice, result.order.workload
    assert point is not None
    rows = point.split.rows(point.batch)
    parallel = {"tp": point.split.tp, "ep": point.split.ep, "attention_dp": point.split.attention_dp}
    tokens = max(8192, rows * (point.draft + 1))
    gpus = result.order.gpus
    found: dict[str, Any] = {} if point.split.tp == gpus.total else {"gpus": f"{gpus.card.name}x{point.split.tp}"}
    if point.draft:
        found["draft_length"] = point.draft
    return found | {"parallel": parallel, "limits": {"batch": rows, "sequence": workload.sequence, "tokens": tokens}}


def _point(point: Point) -> dict[str, Any]:
    return {
        "method": point.method,
        "tp": point.split.tp,
        "ep": point.split.ep,
        "attention_dp": point.split.attention_dp,
        "batch": point.batch,
        "draft_length": point.draft,
        "tokens_per_step": point.tokens,
        "step_seconds": point.seconds,
        "parts": point.parts,
        "tokens_per_second_per_user": point.per_user,
        "tokens_per_second_per_gpu": point.per_gpu,
        "memory": asdict(point.memory) | {"used": point.memory.used, "fits": point.memory.fits},
    }


def _is_claim(order: Order) -> bool:
    return (order.model.name, str(order.gpus)) == (CLAIM.target, CLAIM.gpus)


def show(console: Console, record: Mapping[str, Any]) -> None:
    """Lines and a table a method; a line is not broken, so that what it holds can be searched for."""

    def say(line: str = "") -> None:
        console.print(line, highlight=False, soft_wrap=True)

    workload = record["workload"]
    say(f"[bold]{escape(record['target'])}[/] in {record['precision']} on {record['gpus']}")
    rows = f"{workload['context']:,} tokens in a row's cache on average, {workload['sequence']:,} at most"
    say(f"{rows}, target's cache in {workload['cache']}")
    for method, one in record["acceptance"].items():
        say(f"{NAMES[method]} accepts as on {one['task']}: {escape(one['source'])}")
    say(_data(record))
    for note in record["notes"]:
        say(f"note: {escape(note)}")
    for method, front in record["fronts"].items():
        say()
        console.print(_front(method, front))
    for line in _ratios(record):
        say(line)
    say()
    for line in _choice(record):
        say(line)


def _data(record: Mapping[str, Any]) -> str:
    gap = record["workload"]["gap"]
    extra = f", and {gap * 1e3:g} ms of waiting a step" if gap else ", without any waiting: an upper bound"
    if record["data"] == "roofline":
        return f"times: roofline{extra}"
    if not record["fallbacks"]:
        return f"times: measured kernels (aiconfigurator-core){extra}"
    lines = [f"times: measured kernels (aiconfigurator-core){extra}", "  by the roofline, where there are no rows:"]
    for name, (low, high) in record["fallbacks"].items():
        lines.append(f"    {name}: " + (f"{low:,} to {high:,} rows" if low < high else f"{low:,} rows"))
    return "\n".join(lines)


def _front(method: str, front: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"{NAMES[method]}: best settings, from fast to many", title_justify="left", box=SIMPLE)
    for name in ("tok/s/user", "tok/s/GPU", "batch", "K", "tau", "step, ms", "split", "GiB"):
        table.add_column(name, justify="left" if name == "split" else "right", no_wrap=True)
    shown = [
        front[round(i * (len(front) - 1) / max(1, min(SHOWN, len(front)) - 1))] for i in range(min(SHOWN, len(front)))
    ]
    for point in shown:
        table.add_row(
            f"{point['tokens_per_second_per_user']:,.0f}",
            f"{point['tokens_per_second_per_gpu']:,.0f}",
            f"{point['batch']}",
            str(point["draft_length"] or "-"),
            f"{point['tokens_per_step']:.2f}",
            f"{point['step_seconds'] * 1e3:.2f}",
            _split(point),
            f"{point['memory']['used'] / (1 << 30):.1f}",
        )
    return table


def _split(point: Mapping[str, Any]) -> str:
    return f"tp{point['tp']} ep{point['ep']}" + (" dp" if point["attention_dp"] else "")


def _rows(point: Mapping[str, Any]) -> str:
    own = point["keys"]["limits"]["batch"]
    return f"batch {point['batch']:,}" + (f" ({own:,} on each GPU, as limits count)" if point["attention_dp"] else "")


def _ratios(record: Mapping[str, Any]) -> list[str]:
    lines = []
    for ratio in record["ratios"]:
        over, at = NAMES[ratio["over"]], f"at {ratio['per_user']:g} tok/s/user"
        if ratio["ratio"]:
            line = f"DFlash / {over} {at}: {ratio['ratio']:.1f} x tok/s/GPU"
        elif ratio["dflash"]:
            line = f"DFlash / {over} {at}: {over} is not that fast; its best is {ratio['fastest']:.0f} tok/s/user"
        else:
            line = f"DFlash / {over} {at}: DFlash is not that fast"
        if record["claim"] and ratio["per_user"] in CLAIM.per_user:
            published = record["claim"][ratio["over"]]
            line += f" (NVIDIA: {'more than ' if ratio['over'] == 'ar' else ''}{published:g} x at 500 to 600"
            line += f"; error {ratio['ratio'] / published - 1:+.0%})" if ratio["ratio"] else ")"
        lines.append(line)
    if record["claim"]:
        lines += [
            "  NVIDIA's settings, acceptance and concurrencies are not published. AR comes to that speed with very few",
            "  users, if at all: there a small error of its step is a large one of the ratio (docs/plan.md).",
        ]
    return ["", *lines] if lines else []


def _choice(record: Mapping[str, Any]) -> list[str]:
    wanted = GOALS[record["goal"]].format(floor=record["floor"])
    point = record["choice"]
    if point is None:
        fronts = record["fronts"].values()
        best = max((front[0]["tokens_per_second_per_user"] for front in fronts), default=0)
        return [f"{record['goal']} ({wanted}): no setting; the fastest has {best:.0f} tokens/s for each user"]
    memory, keys = point["memory"], point["keys"]
    free = format_bytes(memory["free"])
    copies = record["gpu_count"] // point["tp"]
    each = f"{point['tp']} GPUs" if point["tp"] > 1 else "one GPU"
    where = f"{copies} copies of it, on {each} each" if copies > 1 else f"on all {point['tp']} GPUs"
    lines = [
        f"[bold]{record['goal']}[/] ({wanted}): {where if record['gpu_count'] > 1 else 'on the GPU'}",
        f"  {NAMES[point['method']]}, {_rows(point)}: {point['tokens_per_second_per_user']:,.0f} tok/s/user, "
        f"{point['tokens_per_second_per_gpu']:,.0f} tok/s/GPU, step {point['step_seconds'] * 1e3:.2f} ms",
        f"  {format_bytes(memory['used'])} of {free} a GPU: weights {format_bytes(memory['weights'])}, drafter "
        f"{format_bytes(memory['drafter'])}, cache {format_bytes(memory['cache'])}, arena "
        f"{format_bytes(memory['arena'])}; {memory['largest_batch']:,} rows would fit",
        "",
    ]
    lines += [f"{key}: {keys[key]}" for key in ("gpus", "draft_length") if key in keys]
    parallel = ", ".join(f"{key}: {str(value).lower()}" for key, value in keys["parallel"].items())
    limits = ", ".join(f"{key}: {value}" for key, value in keys["limits"].items())
    return [*lines, f"parallel: {{{parallel}}}", f"limits: {{{limits}}}"]
