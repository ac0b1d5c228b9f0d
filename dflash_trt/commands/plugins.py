"""`dflash-trt plugins`: list, compile and report the kernels of the TensorRT plugins, on any machine."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from dflash_trt.commands.progress import progress_bar
from dflash_trt.errors import UserError


class Action(str, Enum):
    LIST = "list"
    COMPILE = "compile"
    REPORT = "report"


def plugins(
    action: Action = typer.Argument(help="list: what there is. compile: PTX into the cache. report: what it uses."),
    sm: list[int] = typer.Option([], help="Compile for this SM alone; may be given twice. Not given: all."),
    op: list[str] = typer.Option([], help="These ops alone; may be given twice."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compile the plugins' kernels for every SM, without a GPU, and show registers, spills and tensor cores."""
    from dflash_trt.plugins import kernels  # imports Triton on use
    from dflash_trt.plugins.compile import SMS, cache_folder, compile_all

    for number in sm:
        if number not in SMS:
            raise UserError(f"kernels are not compiled for SM{number}", where="--sm", fix=f"choose {_listed(SMS)}")
    found = {kernel: models for kernel, models in kernels.shipped().items() if not op or kernel.op in op}
    if not found:
        known = ", ".join(dict.fromkeys(kernel.op for kernel in kernels.shipped()))
        raise UserError(f"there is no op {', '.join(op)}", where="--op", fix=f"choose from {known}")
    if action is Action.LIST:
        _list(found, as_json)
        return

    from dflash_trt.plugins.report import row, show

    sms = sorted(set(sm)) or list(SMS)
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        said = _counted(progress, len(found) * len(sms))
        for kernel, compiled in compile_all(found, sms, said):
            rows.append(row(kernel, found[kernel], compiled))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif action is Action.REPORT:
        show(Console(), rows)
    else:
        typer.echo(f"{len(rows)} kernels for SM {_listed(sms)} are in {cache_folder()}")


def _counted(progress: Any, total: int) -> Any:
    """A callback that advances the bar by one kernel each time."""
    done = 0

    def said(text: str) -> None:
        nonlocal done
        progress(text, done / total)
        done += 1

    return said


def _list(found: dict[Any, list[str]], as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "op": kernel.op,
                "kernel": kernel.name,
                "models": models,
                "arguments": [f"{a.name}: {a.type}" for a in kernel.arguments],
                "grid": list(kernel.grid),
                "warps": kernel.num_warps,
            }
            for kernel, models in found.items()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("op", "kernel", "models", "grid")  # arguments are in --json
    for column in table.columns:
        column.overflow = "fold"
    previous = None
    for kernel, models in found.items():
        new = kernel.op != previous
        if new and previous:
            table.add_section()
        table.add_row(kernel.op if new else "", kernel.name, ", ".join(models), " × ".join(kernel.grid))
        previous = kernel.op
    Console().print(table)


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, numbers))
