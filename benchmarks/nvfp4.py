"""The codecs against ModelOpt's own CPU path, and the MXFP4 cast against a plain copy of the same bytes.

    python -m benchmarks.nvfp4 [--rounds 5] [--json FILE]

One process and one thread for each; the lanes of a table take turns and the medians count. Weights are 4096 x 4096
random bfloat16, the expert is gpt-oss's gate and up (5760 x 2880) with exponents over the whole window of 17. Exit code
1 if a goal is missed or a result is not ModelOpt's.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # read when torch starts

import ml_dtypes
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from dflash_trt.checkpoint import mxfp4, nvfp4
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.measure.machine import busy, describe_machine
from dflash_trt.quantize.source import check_finite

ROWS, COLUMNS = 4096, 4096
OUT, IN = 5760, 2880
ENCODE, CAST = 3.0, 0.5  # the goals
SHORT = 20  # rounds of the lanes that take less than some milliseconds, for each of the others

Lanes = dict[str, Callable[[], Any]]


def main(
    rounds: int = typer.Option(5, min=1), json_file: Path = typer.Option(None, "--json", help="Also write it here.")
) -> None:
    machine = describe_machine(1, "ml_dtypes", "torch", "nvidia-modelopt")
    torch.set_num_threads(1)
    weights = measure_weights(rounds)
    expert = measure_expert(rounds)
    goals = [
        {"figure": "encode against ModelOpt", "is": weights["modelopt"] / weights["encode"], "at_least": ENCODE},
        {"figure": "cast against a copy", "is": expert["copy"] / expert["cast"], "at_least": CAST},
    ]
    record = {"weights": weights, "expert": expert, "goals": goals, "machine": machine, "rounds": rounds}
    show(Console(), record)
    if json_file:
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    met = all(goal["is"] >= goal["at_least"] for goal in goals)
    sys.exit(not (met and weights["same"] and expert["same"]))


def measure_weights(rounds: int) -> dict[str, Any]:
    quantizer = modelopt("torch.quantization.qtensor").NVFP4QTensor
    values = (np.random.default_rng(0).normal(size=(ROWS, COLUMNS)) * 0.02).astype(ml_dtypes.bfloat16)
    tensor = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    ref = TensorRef("weight", Path(), 0, values.nbytes, "BF16", values.shape)
    scale = nvfp4.global_scale(find_amax(values, ref))
    codes, scales = nvfp4.encode(values, scale)
    theirs, their_scales, their_scale = quantizer.quantize(tensor, nvfp4.BLOCK)
    same = (
        scale == their_scale.numpy()
        and np.array_equal(codes, theirs._quantized_data.numpy())
        and np.array_equal(scales.view(np.uint8), their_scales.view(torch.uint8).numpy())
    )
    given = torch.tensor(scale)
    lanes: Lanes = {
        "encode": lambda: nvfp4.encode(values, scale),
        "amax and encode": lambda: nvfp4.encode(values, nvfp4.global_scale(find_amax(values, ref))),
        "decode": lambda: nvfp4.decode(codes, scales, scale),
        "modelopt": lambda: quantizer.quantize(tensor, nvfp4.BLOCK, None, given),
    }
    return {"bytes": values.nbytes, "same": bool(same), **race(lanes, rounds)}


def measure_expert(rounds: int) -> dict[str, Any]:
    lossless = modelopt("torch.export.shard_cast_utils").quantize_mxfp4_to_nvfp4_lossless
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (OUT, IN // mxfp4.BLOCK, mxfp4.BLOCK // 2), dtype=np.uint8)
    scales = rng.integers(-mxfp4.WINDOW, 1, (OUT, IN // mxfp4.BLOCK)) + mxfp4.BIAS - 4
    scales = scales.astype(np.uint8)
    k_max = mxfp4.largest_exponent(scales)
    out = np.zeros((OUT, IN // 2), np.uint8), np.zeros((OUT, IN // nvfp4.BLOCK), nvfp4.FLOAT8)
    turned, copied = np.zeros((IN // 2, OUT), np.uint8), np.zeros_like(scales)
    tensors = torch.from_numpy(blocks.reshape(OUT, -1)), torch.from_numpy(scales)

    def copy() -> None:
        np.copyto(out[0].reshape(blocks.shape), blocks)
        np.copyto(copied, scales)

    def theirs() -> Any:
        return lossless(*tensors, k_max, "cpu")

    times = race(
        {
            "copy": copy,
            "cast": lambda: mxfp4.to_nvfp4(blocks, scales, k_max, out),
            "cast without copying codes": lambda: mxfp4.to_nvfp4(blocks, scales, k_max),
            "transpose": lambda: mxfp4.transpose_bytes(out[0], turned),
            "transpose by numpy": lambda: np.copyto(turned, out[0].T),
        },
        rounds * SHORT,
    )
    times |= race({"modelopt": theirs}, min(rounds, 3))
    cast, (codes, block_scales, *_) = mxfp4.to_nvfp4(blocks, scales, k_max, out), theirs()
    scale = mxfp4.nvfp4_scale(k_max)
    same = (  # ModelOpt turns -0 into 0, which compares equal
        cast.changed == 0
        and np.array_equal(cast.scales.view(np.uint8), block_scales.view(torch.uint8).numpy())
        and np.array_equal(
            nvfp4.decode(cast.codes, cast.scales, scale), nvfp4.decode(codes.numpy(), cast.scales, scale)
        )
    )
    return {"bytes": blocks.nbytes + scales.nbytes, "same": bool(same), **times}


def find_amax(values: np.ndarray, ref: TensorRef) -> float:
    return max(check_finite(values[row : row + 64], ref) for row in range(0, len(values), 64))


def race(lanes: Lanes, rounds: int) -> dict[str, float]:
    """Median seconds of each, one untimed round before."""
    times: dict[str, list[float]] = {name: [] for name in lanes}
    for counts in range(rounds + 1):
        for name, lane in lanes.items():
            start = time.perf_counter()
            lane()
            if counts:
                times[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in times.items()}


def modelopt(module: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(f"modelopt.{module}")
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: this compares with ModelOpt; install requirements-dev.txt")


def show(console: Console, record: dict[str, Any]) -> None:
    machine = record["machine"]
    console.print(f"{machine['cpu']}, 1 thread of {machine['cores']} cores, load {machine['load']:.2f} before")
    for title, key in ((f"{ROWS} x {COLUMNS} bfloat16", "weights"), (f"MXFP4 expert {OUT} x {IN}", "expert")):
        figures = dict(record[key])
        size, same = figures.pop("bytes"), figures.pop("same")
        table = Table(title, "ms", "MB/s of the source")
        for name, seconds in figures.items():
            table.add_row(name, f"{seconds * 1e3:.2f}", f"{size / seconds / 1e6:.0f}")
        console.print(table)
        console.print("[green]The result is ModelOpt's.[/]" if same else "[red]The result is not ModelOpt's.[/]")
    goals = Table("figure", "is", "goal", "")
    for goal in record["goals"]:
        verdict = "[green]met[/]" if goal["is"] >= goal["at_least"] else "[red]missed[/]"
        goals.add_row(goal["figure"], f"{goal['is']:.2f}x", f"≥ {goal['at_least']:.2g}x", verdict)
    console.print(goals)
    if why := busy(machine):
        console.print(f"[yellow]Take these with care: {why}.[/]")


if __name__ == "__main__":
    typer.run(main)
