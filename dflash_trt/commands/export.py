"""`dflash-trt export`: checkpoints and networks of a pair for `trtllm-build`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.markup import escape

from dflash_trt.commands.progress import progress_bar
from dflash_trt.sizes import format_bytes
from dflash_trt.trtllm.export import Exported, export_pair


def export(
    target: Path = typer.Option(..., help="Checkpoint directory of the target.", show_default=False),
    draft: Path = typer.Option(..., help="Checkpoint directory of the drafter.", show_default=False),
    output: Path = typer.Option(..., "--output", "-o", help="Folder to make.", show_default=False),
    tp: int = typer.Option(1, help="Ranks over which both networks are split."),
    dtype: Literal["bfloat16", "float16", "float32"] | None = typer.Option(
        None, help="Of what is not NVFP4; as the target stores it where it is not given.", show_default=False
    ),
    max_batch: int = typer.Option(8, help="Sequences that run at once."),
    max_seq_len: int | None = typer.Option(
        None, help="Longest sequence, prompt and answer; 4096 or what the models can, if less.", show_default=False
    ),
    max_num_tokens: int = typer.Option(8192, help="Tokens of one step, over all sequences."),
    block_size: int | None = typer.Option(
        None, help="Shorter draft block, or the block where the config names none.", show_default=False
    ),
    force: bool = typer.Option(False, "--force", help="Replace an existing export."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Make TensorRT-LLM 1.2 checkpoints of a pair, with the networks and the command lines for trtllm-build.

    Llama and dense Qwen3 targets, as floats or in NVFP4 with activations. It is for machines with TensorRT-LLM 1.2.1.
    """
    with progress_bar() as progress:
        made = export_pair(
            target, draft, output, tp=tp, dtype=dtype, max_batch=max_batch, max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens, block_size=block_size, force=force, progress=progress,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=2))
    else:
        _tell(made)


def _tell(made: Exported) -> None:
    console = Console(highlight=False, soft_wrap=True)
    ranks = f"{made.tp} ranks" if made.tp > 1 else "one rank"
    console.print(
        f"[green]✓[/] [bold]{escape(str(made.path))}[/]: for TensorRT-LLM {made.release}, {made.dtype}, {ranks}"
    )
    for role, network in made.networks.items():
        kind = f"{network.architecture}{', NVFP4' if network.quantization else ''}"
        size = format_bytes(network.rank_bytes)
        console.print(f"  {role}: {kind}, {network.tensors} tensors, {size} a rank")
        for note in network.notes:
            console.print(f"    {note}", markup=False)
    console.print("  build the engines where TensorRT-LLM is:")
    console.print(f"  sh {shlex.quote(str(made.path / 'build.sh'))} ENGINES", markup=False)
