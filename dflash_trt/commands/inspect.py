"""`dflash-trt inspect`: a card of a drafter, a target or an engine directory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import track
from rich.table import Table
from rich.text import Text

from dflash_trt.checkpoint import describe_checkpoint, read_tensors, scan
from dflash_trt.errors import UserError


def inspect(
    path: Path = typer.Argument(help="A drafter, a target or an engine directory."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a card."),
    scan_weights: bool = typer.Option(False, "--scan", help="Read all weights and report NaN and Inf."),
    block_size: int = typer.Option(None, "--block-size", help="For drafters whose config does not tell it."),
) -> None:
    """Show what a directory holds: sizes, attention, memory per sequence and problems. Exit code 2 if there are any."""
    card = _describe(path, block_size)
    if scan_weights:
        card["problems"] += _scan(path)
    if as_json:
        typer.echo(json.dumps(card, indent=2))
    else:
        Console().print(_panel(card))
    if card["problems"]:
        raise typer.Exit(UserError.exit_code)


def _describe(path: Path, block_size: int | None) -> dict[str, Any]:
    if not (path / "manifest.json").exists():
        return describe_checkpoint(path, block_size)
    from dflash_trt.engine.card import describe_engine  # loads the compilers' bindings

    return describe_engine(path)


def _scan(path: Path) -> list[str]:
    try:
        refs = read_tensors(path).values()
    except UserError:
        return []  # the card already says so
    return [str(found) for ref in track(refs, "Scanning", console=Console(stderr=True)) if (found := scan(ref))]


def _panel(card: dict[str, Any]) -> Panel:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    for key, value in card.items():
        if key not in ("kind", "problems"):
            rows.add_row(key.replace("_", " "), Text(_text(value, bytes="bytes" in key)))
    for problem in card["problems"]:
        rows.add_row("[red]problem[/]", Text(problem, style="red"))
    return Panel(rows, title=card["kind"], title_align="left", border_style="red" if card["problems"] else "green")


def _text(value: Any, bytes: bool = False) -> str:
    match value:
        case dict():
            return ", ".join(f"{key} {_text(item, bytes)}" for key, item in value.items())
        case [str(), *_]:
            return _runs(value)
        case list() | tuple():
            return ", ".join(_text(item) for item in value)
        case bool():
            return "yes" if value else "no"
        case None:
            return "-"
        case int() if bytes:
            return _size(value)
        case int():
            return f"{value:,}"
    return str(value)


def _runs(values: list[str]) -> str:
    """One line for each run of equal values: "0-3: window 2048, causal"."""
    runs, position = [], 0
    for value, group in itertools.groupby(values):
        last = position + len(list(group)) - 1
        runs.append(f"{position}-{last}: {value}" if last > position else f"{position}: {value}")
        position = last + 1
    return "\n".join(runs)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"
