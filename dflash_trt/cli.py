"""The command line: finds the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from dflash_trt import __version__
from dflash_trt.errors import UserError, explain
from dflash_trt.launcher import find_place, leave_it_to_rank_0

COMMANDS = {  # in the order of a first session; each is the function of that name in dflash_trt/commands/<name>.py
    "inspect": "Show what a drafter, a target or an engine directory holds.",
    "quantize": "Make NVFP4 checkpoints of a target, a drafter or both, through NVIDIA ModelOpt.",
    "convert": "Make an engine directory of a target and its drafter; weights stay where they are.",
    "build": "Compile an engine directory with TensorRT, or ahead of time with TensorRT-RTX.",
    "generate": "Answer prompts, with the drafter or without.",
    "serve": "Serve an engine over HTTP, as OpenAI's API.",
    "deploy": "Make what another server needs to serve an engine: a model repository for Triton.",
    "verify": "Compare an engine with its references on this machine.",
    "bench": "Measure decoding with the drafter against decoding without it.",
    "recipe": "List, show, render and launch recipes: a pair on a machine, for a goal, through TensorRT-LLM.",
    "check": "Say why a TensorRT-LLM configuration would fail or draft badly, before it touches a GPU.",
    "plan": "Predict speed and memory of a pair on GPUs, and choose batch and draft length for a goal.",
    "export": "Make TensorRT-LLM 1.2 checkpoints of a pair, for trtllm-build.",
    "plugins": "Compile the plugins' kernels for every SM, without a GPU, and show what they use.",
}
EXTRAS = {"serve": "serve", "deploy": "serve"}  # what commands import that a plain installation may lack
RANKED = ("generate", "serve")  # may be run by mpirun
INTERRUPTED = 128 + signal.SIGINT


class LazyGroup(TyperGroup):
    """Imports a command when it is run, so that `--help` does not wait for ONNX and numpy."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        if not name or not listed:
            return name, listed, rest
        if name not in RANKED and (ranks := find_place().size) > 1:
            fix = "start it without mpirun, for verify and bench on an engine that was converted without --tp and --ep"
            raise UserError(f"{name} is a command for one process, but {ranks} ranks started", where="mpirun", fix=fix)
        try:
            module = importlib.import_module(f"dflash_trt.commands.{name}")
        except ModuleNotFoundError as error:
            if name not in EXTRAS:
                raise
            fix = f"pip install 'dflash-trt[{EXTRAS[name]}]'"
            raise UserError(f"{error.name} is not installed", where=name, fix=fix) from None
        single = typer.Typer(add_completion=False, context_settings=CONTEXT)
        single.command(name)(getattr(module, name))
        return name, typer.main.get_command(single), rest


CONTEXT = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(cls=LazyGroup, add_completion=False, rich_markup_mode="rich", context_settings=CONTEXT)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dflash-trt {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def about(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """DFlash speculative decoding as one engine: a target and its block-diffusion drafter, on TensorRT or a CPU."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line. Exit codes: 2 for the user's mistakes, 1 for failures, 130 after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that cleaning up happens
    if find_place().rank:  # rank 0 speaks for all
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        sys.exit(app(standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if os.environ.get("DFLASH_TRT_TRACEBACK"):
            raise
        message, code = _explain(error)
        leave_it_to_rank_0()
        print(message, file=sys.stderr)
        sys.exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, TyperException):  # wrong usage
        return f"error: {error.format_message()} — see dflash-trt --help", error.exit_code
    return explain(error)
