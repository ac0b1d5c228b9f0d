"""`dflash-trt deploy`: what another server needs to serve an engine."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from typer.exceptions import TyperException

from dflash_trt.commands.serve import serve
from dflash_trt.errors import UserError
from dflash_trt.serve.paths import MOST_WAITING, check_grace
from dflash_trt.serve.repository import write_repository


def deploy(
    kind: Literal["triton"] = typer.Argument(help="triton: a model repository of Triton Inference Server."),
    directory: Path = typer.Argument(help="An engine directory.", show_default=False),
    options: list[str] | None = typer.Argument(None, help="After --: options of the `dflash-trt serve` that it runs."),
    output: Path = typer.Option(..., "--output", "-o", help="The model repository to make.", show_default=False),
    name: str = typer.Option("dflash", help="What the model is called."),
    socket: Path | None = typer.Option(
        None, help="Attach to the server of this Unix socket, `dflash-trt serve --socket`.", show_default=False
    ),
    max_waiting: int = typer.Option(
        256, min=1, max=MOST_WAITING, help="Requests that may wait for a slot; further ones are refused."
    ),
    grace: float = typer.Option(30, min=0, help="Seconds running requests have to end when the server stops."),
    force: bool = typer.Option(False, "--force", help="Replace an existing model repository."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Make a model repository that tritonserver serves, with a script that starts it."""
    check_grace(grace)
    _check(options or ())
    made = write_repository(
        directory, output, name=name, socket=socket, max_waiting=max_waiting, grace=grace,
        arguments=options or (), force=force,
    )  # fmt: skip
    if as_json:
        values = dataclasses.asdict(made) | {"start": made.start}
        typer.echo(json.dumps(values, default=str, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    ranks = f", {made.ranks} ranks" if made.ranks > 1 else ""
    console.print(f"[green]✓[/] [bold]{made.path}[/]: model {made.name}{ranks}; the engine stays in {made.engine}")
    console.print("  start it, in NVIDIA's container or with the Python of the wheel nvidia-pytriton, and ask it:")
    console.print(f"  python {shlex.quote(str(made.start))}", markup=False)
    question = '{"text_input": "The capital of France is", "max_tokens": 16}'
    console.print(f"  curl -s localhost:8000/v2/models/{made.name}/generate -d '{question}'", markup=False)


def _check(options: Sequence[str]) -> None:
    """Raise UserError for what `dflash-trt serve` will not take: better now than when Triton starts it."""
    single = typer.Typer(add_completion=False, context_settings={"help_option_names": []})
    single.command("serve")(serve)
    try:
        typer.main.get_command(single).make_context("serve", ["ENGINE", *options])
    except TyperException as error:
        what, fix = error.format_message().rstrip("."), "dflash-trt serve --help lists what there is"
        raise UserError(what, where="options behind --", fix=fix) from None
