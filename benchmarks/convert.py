"""Converting refers to weights and never copies them: a 16 GB target in seconds, whatever the memory.

    python -m benchmarks.convert [--json FILE]

Target (Llama-3.1-8B's shapes, in four files) and drafter (eight layers) are real headers over holes: sparse files that
take no room on the disk. `dflash-trt convert` runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 4096, 128256, 32, 8, 128
TARGET_LAYERS, TARGET_FFN, SHARDS = 32, 14336, 4
DRAFT_LAYERS, DRAFT_FFN, TAPS = 8, 12288, [1, 8, 15, 22, 29]
SECONDS, MEGABYTES = 30, 700  # the goals

Shapes = dict[str, tuple[int, ...]]
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def main(json_file: Path = typer.Option(None, "--json", help="Also write the figures here.")) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        size = write_target(root / "target") + write_draft(root / "draft")
        seconds, megabytes, written = convert(root)
    record = {"checkpoint_bytes": size, "seconds": seconds, "peak_rss_mb": megabytes, "written_bytes": written}
    table = Table("figure", "is", "goal", "")
    table.add_row("checkpoints", f"{size / 1e9:.1f} GB", "", "")
    for figure, value, goal, unit in (
        ("time", seconds, SECONDS, "s"),
        ("peak memory", megabytes, MEGABYTES, "MB"),
        ("written", written / 1e6, None, "MB"),
    ):
        verdict = "" if goal is None else "[green]met[/]" if value < goal else "[red]missed[/]"
        table.add_row(figure, f"{value:.1f} {unit}", f"< {goal} {unit}" if goal else "", verdict)
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(record, indent=2) + "\n")


def convert(root: Path) -> tuple[float, float, int]:
    """Seconds, peak resident megabytes and bytes written of `dflash-trt convert`."""
    output = root / "engine"
    models = ["--target", str(root / "target"), "--draft", str(root / "draft")]
    command = [
        sys.executable,
        "-c",
        "from dflash_trt.cli import main; main()",
        "convert",
        *models,
        "--output",
        str(output),
    ]
    start = time.perf_counter()
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"convert failed with exit code {os.waitstatus_to_exitcode(status)}")
    written = sum(file.lstat().st_size for file in output.rglob("*") if file.is_file() and not file.is_symlink())
    return seconds, usage.ru_maxrss * 1024 / 1e6, written


def write_target(directory: Path) -> int:
    directory.mkdir()
    config = COMMON | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": TARGET_LAYERS,
        "intermediate_size": TARGET_FFN,
        "eos_token_id": [128001, 128008, 128009],
    }
    (directory / "config.json").write_text(json.dumps(config))
    table = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    shapes = table | {f"model.{n}": s for i in range(TARGET_LAYERS) for n, s in layer_shapes(i, TARGET_FFN).items()}
    names = list(shapes)
    weight_map, total = {}, 0
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = {name: shapes[name] for name in names[shard::SHARDS]}
        total += write_sparse(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def write_draft(directory: Path) -> int:
    directory.mkdir()
    config = COMMON | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFT_LAYERS,
        "intermediate_size": DRAFT_FFN,
        "block_size": 10,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"mask_token_id": 128002, "target_layer_ids": TAPS},
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes: Shapes = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for i in range(DRAFT_LAYERS):
        shapes |= layer_shapes(i, DRAFT_FFN)
        shapes |= {f"layers.{i}.self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    return write_sparse(directory / "model.safetensors", shapes)


def layer_shapes(index: int, ffn: int) -> Shapes:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (ffn, HIDDEN),
        "mlp.up_proj": (ffn, HIDDEN),
        "mlp.down_proj": (HIDDEN, ffn),
    }
    return {f"layers.{index}.{name}.weight": shape for name, shape in shapes.items()}


def write_sparse(file: Path, shapes: Shapes) -> int:
    """A safetensors file of bfloat16 tensors whose data is one hole; returns its size."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return 8 + len(text) + end


if __name__ == "__main__":
    typer.run(main)
