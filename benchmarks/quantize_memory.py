"""Quantizing streams: an 8 GB checkpoint becomes NVFP4 in little memory, at the speed of the codec; MXFP4 too.

    python -m benchmarks.quantize_memory [--size-gb 8] [--experts 8] [--folder DIR] [--json FILE]

A target of Llama-3.1-8B's width, as many layers as fill the size, with random weights in 2 GB files, is quantized
weight-only; layers of gpt-oss-120b's width, of fewer experts, are cast, all blocks inside the exponent window and with
blocks outside of it. Each runs in a process of its own, whose peak resident memory must stay below 1 GB + 3 x the
largest tensor.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.convert import HEADS, HIDDEN, KV_HEADS, TARGET_FFN, layer_shapes
from dflash_trt.checkpoint.mxfp4 import BIAS, WINDOW
from dflash_trt.checkpoint.shards import ShardWriter, Slot, name_shards, write_index

VOCAB = 32768
GPT_OSS = {"gate_up_proj": (5760, 90, 16), "down_proj": (2880, 90, 16)}  # blocks of one expert
GPT_OSS_LAYERS = 2
GB, SHARD = 1e9, 2e9
CHUNK = 8 << 20  # values

CHILD = """
import json, sys, time
from pathlib import Path
from dflash_trt.quantize import PRESETS, make_plan, write_checkpoint
start = time.perf_counter()
plan = make_plan(Path(sys.argv[1]), PRESETS[sys.argv[3]])
done = write_checkpoint(plan, Path(sys.argv[2]), None, input_amax=448.0)
seconds = time.perf_counter() - start
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
error, changed = sum(layer.error for layer in done.layers) / len(done.layers), sum(x.changed for x in done.layers)
facts = {"seconds": seconds, "peak_bytes": int(peak.split()[1]) * 1024, "bytes_before": done.bytes_before}
facts |= {"bytes_after": done.bytes_after, "linears": len(done.layers), "mean_error": error, "changed_blocks": changed}
print(json.dumps(facts))
"""


def main(
    size_gb: float = typer.Option(8, "--size-gb", help="Size of the checkpoint; a third more of disk is needed."),
    experts: int = typer.Option(8, help="Experts of a layer to cast; gpt-oss-120b has 128."),
    folder: Path = typer.Option(None, help="Where to write it, instead of the folder for temporary files."),
    json_file: Path = typer.Option(None, "--json", help="Also write the figures here."),
) -> None:
    records = {
        "weight-only": measure("nvfp4-weight-only", lambda source: write_target(source, size_gb * GB), folder),
        "cast": measure("nvfp4-experts", lambda source: write_experts(source, experts, WINDOW), folder),
        "cast, outside": measure("nvfp4-experts", lambda source: write_experts(source, experts, WINDOW + 3), folder),
    }
    table = Table("", *records)
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "checkpoint": lambda record: f"{record['bytes_before'] / GB:.2f} GB",
        "written": lambda record: f"{record['bytes_after'] / GB:.2f} GB",
        "largest tensor": lambda record: f"{record['largest_tensor_bytes'] / 1e6:.0f} MB",
        "peak memory": lambda record: f"{record['peak_bytes'] / 1e6:.0f} MB",
        "goal": lambda record: f"< {record['goal_bytes'] / 1e6:.0f} MB",
        "": lambda record: "[green]met[/]" if _met(record) else "[red]missed[/]",
        "time": lambda record: f"{record['seconds']:.1f} s",
        "read": lambda record: f"{record['bytes_before'] / record['seconds'] / 1e6:.0f} MB/s",
        "relative error": lambda record: f"{record['mean_error']:.2g}",
        "blocks changed": lambda record: f"{record['changed_blocks']:,}",
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, records.values()))
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(records, indent=2) + "\n")
    sys.exit(0 if all(map(_met, records.values())) else 1)


def _met(record: dict[str, Any]) -> bool:
    return record["peak_bytes"] < record["goal_bytes"]


def measure(preset: str, write: Callable[[Path], int], folder: Path | None) -> dict[str, Any]:
    """Quantize the checkpoint that `write` makes; it returns the bytes of its largest tensor."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        source = Path(temporary) / "source"
        largest = write(source)
        command = [sys.executable, "-c", CHILD, str(source), str(Path(temporary) / "output"), preset]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        sys.exit(f"quantizing failed with exit code {child.returncode}")
    return {**json.loads(child.stdout), "largest_tensor_bytes": largest, "goal_bytes": GB + 3 * largest}


def write_target(directory: Path, size: float) -> int:
    directory.mkdir()
    table = 2 * VOCAB * HIDDEN
    layer = sum(2 * math.prod(shape) for shape in layer_shapes(0, TARGET_FFN).values())
    layers = max(1, round((size - 2 * table) / layer))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": TARGET_FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for index in range(layers):
        shapes |= {f"model.{name}": shape for name, shape in layer_shapes(index, TARGET_FFN).items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    files: list[list[Slot]] = [[]]
    for name, shape in shapes.items():
        if sum(slot.nbytes for slot in files[-1]) > SHARD:
            files.append([])
        files[-1].append(Slot(name, "BF16", shape))
    shards = dict(zip(name_shards(len(files)), files, strict=True))
    chunk = (0.02 * np.random.default_rng(0).standard_normal(CHUNK, np.float32)).astype(ml_dtypes.bfloat16)
    for name, slots in shards.items():
        with ShardWriter(directory / name, slots) as writer:
            for slot in slots:
                for piece in repeated(chunk, math.prod(slot.shape)):
                    writer.write(slot.name, piece)
    write_index(directory, shards)
    return max(slot.nbytes for slots in shards.values() for slot in slots)


def write_experts(directory: Path, experts: int, spread: int) -> int:
    """Random blocks whose exponents lie up to `spread` below the largest."""
    directory.mkdir()
    config = {"model_type": "gpt_oss", "hidden_size": 2880, "quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(config))
    slots = []
    for layer, (name, shape) in itertools.product(range(GPT_OSS_LAYERS), GPT_OSS.items()):
        stem = f"model.layers.{layer}.mlp.experts.{name}"
        slots += [Slot(f"{stem}_blocks", "U8", (experts, *shape)), Slot(f"{stem}_scales", "U8", (experts, *shape[:2]))]
    rng = np.random.default_rng(0)
    chunks = {
        "blocks": rng.integers(0, 256, CHUNK, np.uint8),
        "scales": rng.integers(BIAS - spread, BIAS + 1, CHUNK, np.uint8),
    }
    with ShardWriter(directory / "model.safetensors", slots) as writer:
        for slot in slots:
            for piece in repeated(chunks[slot.name.rpartition("_")[2]], slot.nbytes):
                writer.write(slot.name, piece)
    return max(slot.nbytes for slot in slots)


def repeated(chunk: np.ndarray, count: int) -> Iterator[np.ndarray]:
    for begin in range(0, count, len(chunk)):
        yield chunk[: count - begin]


if __name__ == "__main__":
    typer.run(main)
