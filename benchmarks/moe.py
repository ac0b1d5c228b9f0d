"""The CPU's mixture of experts computes what was chosen: 128 experts cost a row no more than 8 of the same width.

    python -m benchmarks.moe [--width 1024] [--rounds 20] [--threads 1] [--json FILE]

One layer of random MXFP4 experts, width x width, top 4, as ONNX Runtime runs it; 8 rows choose more different experts
among 128, so there the time for each expert that was touched is compared. Rounds take turns, medians count. Exit code 1
if a goal is missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import typer
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from dflash_trt.checkpoint import read_tensors
from dflash_trt.checkpoint.model import Experts, Rope, TargetConfig
from dflash_trt.checkpoint.mxfp4 import BIAS, BLOCK
from dflash_trt.graph.moe import moe
from dflash_trt.graph.net import Net
from dflash_trt.graph.weights import Weights
from dflash_trt.measure.machine import busy, describe_machine

COUNTS, TOP_K, ROWS = (8, 128), 4, (1, 8)
RATIO = 1.5  # the goal


@dataclass
class Lane:
    """One number of experts, ready to run."""

    session: ort.InferenceSession
    router: np.ndarray  # [E, width]

    def touched(self, x: np.ndarray) -> int:
        """How many different experts the rows choose."""
        return len(np.unique(np.argsort(-(x @ self.router.T), axis=1)[:, :TOP_K]))


def main(
    width: int = typer.Option(1024, help="Of rows and of experts; a multiple of 32. gpt-oss: 2880."),
    rounds: int = typer.Option(20, min=1),
    threads: int = typer.Option(1, min=1, help="Of one operator."),
    json_file: Path = typer.Option(None, "--json", help="Also write the figures here."),
) -> None:
    machine = describe_machine(threads, "onnxruntime")
    with tempfile.TemporaryDirectory() as folder:
        lanes = {count: load(Path(folder), count, width, threads) for count in COUNTS}
        figures = [measure(lanes, rows, width, rounds) for rows in ROWS]
    alone, together = figures
    few, many = COUNTS
    each = {count: together["seconds"][count] / together["touched"][count] for count in COUNTS}
    goals = [
        {"figure": f"1 row, {many} experts against {few}", "is": alone["seconds"][many] / alone["seconds"][few]},
        {"figure": f"{ROWS[1]} rows, the same for each expert touched", "is": each[many] / each[few]},
    ]
    show(Console(), machine, width, figures, goals)
    if json_file:
        record = {"width": width, "rounds": rounds, "figures": figures, "goals": goals, "machine": machine}
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    sys.exit(any(goal["is"] >= RATIO for goal in goals))


def load(folder: Path, count: int, width: int, threads: int) -> Lane:
    directory = folder / str(count)
    directory.mkdir()
    tensors = random_experts(count, width)
    save_file(tensors, directory / "model.safetensors")
    net = Net("float32", native=False, beside=directory)
    x = net.input("x", ir.DataType.FLOAT, ("rows", width))
    weights = Weights(net, "target", dict(read_tensors(directory)))
    y = moe(net, describe(count, width), weights, x, experts=range(count))
    net.output("y", y, ir.DataType.FLOAT, ("rows", width))
    ir.save(net.model("moe"), directory / "moe.onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(directory / "moe.onnx", options, providers=["CPUExecutionProvider"])
    return Lane(session, tensors["mlp.router.weight"])


def random_experts(count: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(count)

    def codes(rows: int) -> np.ndarray:
        return rng.integers(0, 256, (count, rows, width // BLOCK, BLOCK // 2), np.uint8)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    tensors = {"mlp.router.weight": floats(count, width), "mlp.router.bias": np.zeros(count, np.float32)}
    for name, rows in (("gate_up_proj", 2 * width), ("down_proj", width)):
        scales = rng.integers(BIAS - 8, BIAS - 4, (count, rows, width // BLOCK), np.uint8)
        parts = {"blocks": codes(rows), "scales": scales, "bias": floats(count, rows)}
        tensors |= {f"mlp.experts.{name}_{part}": array for part, array in parts.items()}
    return tensors


def describe(count: int, width: int) -> TargetConfig:
    return TargetConfig(
        layers=1, hidden=width, ffn=width, heads=1, kv_heads=1, head_dim=64, vocab=2, rms_eps=1e-5, rope=Rope(1e4),
        max_position=1, attention_bias=True, qk_norm=False, windows=(None,), model_type="gpt_oss", tie_embeddings=False,
        o_bias=True, mlp_bias=True, bos_id=None, eos_ids=(), experts=Experts(count, TOP_K, "mxfp4"), sinks=True,
    )  # fmt: skip


def measure(lanes: dict[int, Lane], rows: int, width: int, rounds: int) -> dict[str, Any]:
    """Median seconds and experts touched in the mean, by number of experts; new rows each round."""
    times: dict[int, list[float]] = {count: [] for count in lanes}
    touched: dict[int, list[int]] = {count: [] for count in lanes}
    rng = np.random.default_rng(rows)
    for counts in range(rounds + 1):
        x = rng.standard_normal((rows, width), np.float32)
        for count, lane in lanes.items():
            start = time.perf_counter()
            lane.session.run(None, {"x": x})
            if counts:  # one untimed round before
                times[count].append(time.perf_counter() - start)
                touched[count].append(lane.touched(x))
    return {
        "rows": rows,
        "seconds": {count: median(seconds) for count, seconds in times.items()},
        "touched": {count: float(np.mean(numbers)) for count, numbers in touched.items()},
    }


def show(
    console: Console, machine: dict[str, Any], width: int, figures: list[dict[str, Any]], goals: list[dict[str, Any]]
) -> None:
    console.print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.2f} before; width {width}")
    table = Table("rows", *(f"{count} experts, {what}" for count in COUNTS for what in ("touched", "ms")))
    for figure in figures:
        cells = (
            text
            for count in COUNTS
            for text in (f"{figure['touched'][count]:.1f}", f"{figure['seconds'][count] * 1e3:.2f}")
        )
        table.add_row(str(figure["rows"]), *cells)
    console.print(table)
    verdicts = Table("figure", "is", "goal", "")
    for goal in goals:
        met = "[green]met[/]" if goal["is"] < RATIO else "[red]missed[/]"
        verdicts.add_row(goal["figure"], f"{goal['is']:.2f}x", f"< {RATIO}x", met)
    console.print(verdicts)
    if why := busy(machine):
        console.print(f"[yellow]Take these with care: {why}.[/]")


if __name__ == "__main__":
    typer.run(main)
