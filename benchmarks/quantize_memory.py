"""Quantizing streams: an 8 GB checkpoint becomes NVFP4 in little memory, at the speed of the codec.

    python -m benchmarks.quantize_memory [--size-gb 8] [--folder DIR] [--json FILE]

A target of Llama-3.1-8B's width, as many layers as fill the size, with random weights in 2 GB files. Weight-only
quantization runs in a process of its own, whose peak resident memory must stay below 1 GB + 3 x the largest tensor.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dflash_trt.checkpoint.shards import ShardWriter, Slot, name_shards, write_index

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 32768
GB, SHARD = 1e9, 2e9
CHUNK = 8 << 20  # values

CHILD = """
import json, sys, time
from pathlib import Path
from dflash_trt.quantize import PRESETS, make_plan, write_checkpoint
start = time.perf_counter()
done = write_checkpoint(make_plan(Path(sys.argv[1]), PRESETS["nvfp4-weight-only"]), Path(sys.argv[2]), None)
seconds = time.perf_counter() - start
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
error = sum(layer.error for layer in done.layers) / len(done.layers)
facts = {"seconds": seconds, "peak_bytes": int(peak.split()[1]) * 1024, "bytes_before": done.bytes_before}
print(json.dumps(facts | {"bytes_after": done.bytes_after, "linears": len(done.layers), "mean_error": error}))
"""


def main(
    size_gb: float = typer.Option(8, "--size-gb", help="Size of the checkpoint; a third more of disk is needed."),
    folder: Path = typer.Option(None, help="Where to write it, instead of the folder for temporary files."),
    json_file: Path = typer.Option(None, "--json", help="Also write the figures here."),
) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        source = Path(temporary) / "source"
        largest = write_target(source, size_gb * GB)
        command = [sys.executable, "-c", CHILD, str(source), str(Path(temporary) / "output")]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        sys.exit(f"quantizing failed with exit code {child.returncode}")
    goal = GB + 3 * largest
    record = {**json.loads(child.stdout), "largest_tensor_bytes": largest, "goal_bytes": goal}
    met = record["peak_bytes"] < goal
    table = Table("figure", "is", "goal", "")
    table.add_row("checkpoint", f"{record['bytes_before'] / GB:.2f} GB", "", "")
    table.add_row("written", f"{record['bytes_after'] / GB:.2f} GB", "", "")
    verdict = "[green]met[/]" if met else "[red]missed[/]"
    table.add_row("peak memory", f"{record['peak_bytes'] / 1e6:.0f} MB", f"< {goal / 1e6:.0f} MB", verdict)
    speed = record["bytes_before"] / record["seconds"]
    table.add_row("time", f"{record['seconds']:.1f} s ({speed / 1e6:.0f} MB/s read)", "", "")
    table.add_row("relative error of the weights", f"{record['mean_error']:.2%}", "", "")
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    sys.exit(0 if met else 1)


def write_target(directory: Path, size: float) -> int:
    """Returns the bytes of the largest tensor."""
    directory.mkdir()
    table = 2 * VOCAB * HIDDEN
    layer = sum(2 * math.prod(shape) for shape in layer_shapes(0).values())
    layers = max(1, round((size - 2 * table) / layer))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for index in range(layers):
        shapes |= layer_shapes(index)
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


def layer_shapes(index: int) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    return {f"model.layers.{index}.{name}.weight": shape for name, shape in shapes.items()}


def repeated(chunk: np.ndarray, count: int) -> Iterator[np.ndarray]:
    for begin in range(0, count, len(chunk)):
        yield chunk[: count - begin]


if __name__ == "__main__":
    typer.run(main)
