"""`dflash-trt build`: compile an engine directory's graphs for one GPU architecture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console

from dflash_trt.commands.progress import progress_bar


def build(
    directory: Path = typer.Argument(help="An engine directory made by `convert`.", show_default=False),
    backend: Literal["auto", "tensorrt", "tensorrt-rtx"] = typer.Option(
        "auto", help="auto is tensorrt where it can build for --sm, else tensorrt-rtx."
    ),
    sm: int | None = typer.Option(
        None, help="GPU architecture, such as 89 or 120; this machine's GPU if not given.", show_default=False
    ),
    force: bool = typer.Option(False, "--force", help="Compile again what the same compiler has built before."),
    as_json: bool = typer.Option(False, "--json", help="Print the engines as JSON."),
) -> None:
    """Compile an engine directory with TensorRT, or with TensorRT-RTX ahead of time on a machine without a GPU."""
    from dflash_trt import engine

    with progress_bar() as progress:
        built = engine.build(directory, backend=backend, sm=sm, force=force, progress=progress)
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in built], indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for item in built:
        native = " and ".join(f"{item.layers.get(kind, 0)} {kind}" for kind in ("KV_CACHE_UPDATE", "ATTENTION"))
        size, seconds = f"{item.size / 2**20:.1f} MiB", f"{item.seconds:.1f} s"
        console.print(f"[green]✓[/] [bold]{directory / item.file}[/]: {size} in {seconds}")
        console.print(f"  {item.precision}, {native} layers, {item.compiler} {item.version}")
