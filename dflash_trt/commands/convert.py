"""`dflash-trt convert`: checkpoints in, engine directory out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console

from dflash_trt.commands.progress import progress_bar
from dflash_trt.launcher import mpirun
from dflash_trt.sizes import format_bytes


def convert(
    target: Path = typer.Option(..., help="Checkpoint directory of the target.", show_default=False),
    output: Path = typer.Option(..., "--output", "-o", help="The engine directory to make.", show_default=False),
    draft: Path | None = typer.Option(
        None, help="Checkpoint directory of the drafter; without it the engine is autoregressive.", show_default=False
    ),
    dtype: Literal["bfloat16", "float16", "float32"] = typer.Option(
        "bfloat16", help="What TensorRT computes in. On a CPU it is always float32; TensorRT compiles no float32."
    ),
    max_batch: int = typer.Option(8, help="Sequences that run at once."),
    max_seq_len: int | None = typer.Option(
        None, help="Longest sequence, prompt and answer; 4096 or what the models can, if less.", show_default=False
    ),
    max_query: int = typer.Option(256, help="Longest prefill chunk."),
    block_size: int | None = typer.Option(
        None, help="Shorter draft block, or the block where the config names none.", show_default=False
    ),
    tp: int = typer.Option(1, help="Ranks over which attention, MLPs and the vocabulary are split."),
    ep: int | None = typer.Option(
        None, help="Ranks over which a mixture of experts is split by expert; all of them.", show_default=False
    ),
    ops: Literal["native", "plugin"] = typer.Option(
        "native",
        help="Attention, caches and acceptance by TensorRT's own layers, or by our plugins; a CPU runs either.",
    ),
    moe: Literal["native", "layer"] = typer.Option(
        "native",
        help="Experts by TensorRT's general layers, all at hand, or by its MOE layer, chosen ones.",
    ),
    force: bool = typer.Option(False, "--force", help="Replace an existing engine directory."),
    as_json: bool = typer.Option(False, "--json", help="Print the manifest as JSON."),
) -> None:
    """Make an engine directory of a target and its drafter; weights stay where they are."""
    from dflash_trt import engine

    with progress_bar() as progress:
        made = engine.convert(
            target, draft, output, dtype=dtype, max_batch=max_batch, max_seq_len=max_seq_len, max_query=max_query,
            block_size=block_size, tp=tp, ep=ep, ops=ops, moe=moe, force=force, progress=progress,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(made.manifest.as_json(), indent=2))
    else:
        _tell(made)


def _tell(made: Any) -> None:
    manifest, limits = made.manifest, made.manifest.limits
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[green]✓[/] [bold]{made.path}[/]: {manifest.pair}, {manifest.dtype}")
    console.print(
        f"  up to {limits.max_batch} sequences of {limits.max_seq_len} tokens, block {limits.block_size}, "
        f"prefill chunks of {limits.max_query}"
    )
    console.print(f"  {_tell_weights(manifest)}")
    if (mapping := manifest.mapping).world > 1:
        console.print(f"  {mapping.world} ranks, tp {mapping.tp}, ep {mapping.ep}; run it so:")
        console.print(f"  {mpirun(mapping.world)} dflash-trt generate {made.path} …")


def _tell_weights(manifest: Any) -> str:
    """`5 weight files referred to; written for 8 ranks: 1.3 GiB, 2.1 % of them`"""
    referred, written = sum(file.size for file in manifest.weights.values()), manifest.written.values()
    known = f"{len(manifest.weights)} weight files referred to"
    if not written:
        return f"{known}, none copied"
    share, ranks = sum(written) / referred, f"{len(written)} ranks" if len(written) > 1 else "one rank"
    return f"{known}; written for {ranks}: {format_bytes(sum(written))}, {share:.1%} of them"
