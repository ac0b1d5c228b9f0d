"""The model beside published measurements (`published.yaml`): nothing in it was fitted to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_trt.document import read_document
from dflash_trt.gpus import parse_gpus
from dflash_trt.plan.acceptance import Acceptance, Check, find_acceptance, fit_rates
from dflash_trt.plan.compare import ratios
from dflash_trt.plan.measured import Measured, is_available
from dflash_trt.plan.models import Model, Split
from dflash_trt.plan.roofline import Roofline
from dflash_trt.plan.source import find_accepted, open_model, splits_of
from dflash_trt.plan.steps import NAMES, Load, Method
from dflash_trt.plan.sweep import Clock, Point, Workload, sweep, time_step

FILE = Path(__file__).with_name("published.yaml")
GAP = 1e-3  # seconds: what TensorRT-LLM#12130 has for a step of batch 1 to 16 beyond the kernels, rounded
DATA = ("roofline", "measured", "measured + gap")
UNITS = {"per_user": "tok/s/user", "total": "tok/s", "speedup": "x AR", "ratio": "x"}


@dataclass(frozen=True)
class Residual:
    """One published number and what the model says in its place."""

    source: str
    setting: str
    metric: str
    published: float
    predicted: Mapping[str, float | None]  # by data: "roofline", "measured"; None: the baseline is not that fast
    assumed: str

    def error(self, data: str) -> float | None:
        predicted = self.predicted.get(data)
        return None if predicted is None else predicted / self.published - 1

    def record(self) -> dict[str, Any]:
        errors = {data: self.error(data) for data in self.predicted}
        return {**vars(self), "predicted": dict(self.predicted), "error": errors}


def residuals() -> list[Residual]:
    """All of the file; the measured data where it is installed."""
    return [residual for group in read_document(FILE).values["points"] for residual in _group(group)]


def _group(group: Mapping[str, Any]) -> Iterator[Residual]:
    model, gpus = open_model(group["target"], None), parse_gpus(group["gpus"])
    clocks: dict[str, tuple[Clock, float]] = {"roofline": (Roofline(gpus.card), 0.0)}
    if is_available(gpus.card):
        clock = Measured(gpus.card)
        clocks |= {"measured": (clock, 0.0), "measured + gap": (clock, GAP)}
    shared = {key: value for key, value in group.items() if key != "runs"}
    if group["metric"] == "ratio":
        each = {id(clock): clock for clock, _ in clocks.values()}
        swept = {key: _points(model, shared, clock) for key, clock in each.items()}
        found = {data: _ratios(swept[id(clock)], group["runs"], gap) for data, (clock, gap) in clocks.items()}
    else:
        found = {data: [_one(model, shared | run, *clock) for run in group["runs"]] for data, clock in clocks.items()}
    for index, run in enumerate(group["runs"]):
        yield Residual(
            source=group["source"],
            setting=_describe(shared | run),
            metric=group["metric"],
            published=run["value"],
            predicted={data: values[index] for data, values in found.items()},
            assumed=group.get("assumed", ""),
        )


def _one(model: Model, run: Mapping[str, Any], clock: Clock, gap: float) -> float:
    batches = run["batch"] if isinstance(run["batch"], list) else [run["batch"]]
    logs = [math.log(_value(model, run, batch, clock, gap)) for batch in batches]
    return math.exp(sum(logs) / len(logs))


def _value(model: Model, run: Mapping[str, Any], batch: int, clock: Clock, gap: float) -> float:
    method: Method = run["method"]
    split, draft = Split(run["tp"], run.get("ep", 1)), run.get("draft", 0)
    tokens = _acceptance(model, run).tokens(draft) if draft else 1.0
    load = Load(batch, draft, run["context"])
    seconds = gap + sum(time_step(model, method, load, split, clock).values())
    match run["metric"]:
        case "per_user":
            return tokens / seconds
        case "total":
            return batch * tokens / seconds
    plain = gap + sum(time_step(model, "ar", Load(batch, 0, run["context"]), split, clock).values())
    return tokens * plain / seconds


def _acceptance(model: Model, run: Mapping[str, Any]) -> Acceptance:
    if "tau" in run:
        return fit_rates({run["draft"]: run["tau"]}, run["source"])
    found = find_acceptance(model.name, run["method"], run["category"])
    assert found is not None, f"no acceptance of {model.name}, {run['method']}"
    return found


def _ratios(points: Sequence[Point], runs: Sequence[Mapping[str, Any]], gap: float) -> list[float | None]:
    slower = [replace(point, seconds=point.seconds + gap) for point in points]
    found = ratios(slower, sorted({run["per_user"] for run in runs}))
    values = {(ratio.over, ratio.per_user): ratio.value for ratio in found}
    return [values[run["over"], run["per_user"]] for run in runs]


def _points(model: Model, shared: Mapping[str, Any], clock: Clock) -> list[Point]:
    """All settings of all splits."""
    gpus, context = parse_gpus(shared["gpus"]), shared["context"]
    splits = splits_of(model, gpus)
    if isinstance(clock, Measured):
        splits = clock.covered(model, splits)
    accepted = find_accepted(model, shared["category"])
    return sweep(model, splits, gpus.card, clock, Workload(context, 4 * context), accepted)


def _describe(run: Mapping[str, Any]) -> str:
    name = run["target"].split("/")[1]
    what = NAMES[run["method"]]
    if "over" in run:
        return f"{name}, {what} over {NAMES[run['over']]} at {run['per_user']} tok/s/user"
    batch = run["batch"]
    rows = f"batch {batch}" if isinstance(batch, int) else f"batch {batch[0]}-{batch[-1]}"
    parts = [name, what, *([f"K {run['draft']}"] if "draft" in run else []), rows]
    return ", ".join([*parts, *([run["task"]] if "task" in run else [])])


def markdown(rows: Sequence[Residual]) -> str:
    """The table of docs/plan.md."""
    lines = [f"| source | setting | published | {' | '.join(DATA)} |", "|---|---|--:|--:|--:|--:|"]
    for row in rows:
        cells = [f"{_number(row.published)} {UNITS[row.metric]}", *(_cell(row, data) for data in DATA)]
        lines.append(f"| {row.source} | {row.setting} | {' | '.join(cells)} |")
    lines.append("")
    for data in DATA:
        errors = [abs(math.log1p(error)) for row in rows if (error := row.error(data)) is not None]
        if errors:
            middle = math.expm1(sorted(errors)[len(errors) // 2])
            close = sum(error <= math.log(1.25) for error in errors)
            lines.append(
                f"{data}: median error a factor of {1 + middle:.2f}, {close} of {len(errors)} within a factor of 1.25"
            )
    return "\n".join(lines)


def acceptance_markdown(checks: Sequence[Check]) -> str:
    """The other table of docs/plan.md."""
    lines = ["| drafter of | task | known | asked | published | predicted |", "|---|---|--:|--:|--:|--:|"]
    for check in checks:
        name = f"{check.target.split('/')[-1]}, {NAMES[check.method]}"
        cells = [f"K {check.longest}", f"K {check.draft}", f"{check.published:.2f}"]
        predicted = f"{check.predicted:.2f} ({check.error:+.0%})"
        lines.append(f"| {name} | {check.task} | {' | '.join(cells)} | {predicted} |")
    return "\n".join(lines)


def _cell(row: Residual, data: str) -> str:
    if data not in row.predicted:
        return "-"
    predicted, error = row.predicted[data], row.error(data)
    return "not that fast" if predicted is None or error is None else f"{_number(predicted)} ({error:+.0%})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
