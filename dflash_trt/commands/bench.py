"""`dflash-trt bench`: what the drafter is worth on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console

from dflash_trt.commands.progress import progress_bar
from dflash_trt.engine import open_engine
from dflash_trt.errors import DflashError, UserError
from dflash_trt.measure.lanes import EngineLane
from dflash_trt.measure.machine import describe_machine
from dflash_trt.measure.memory import peak_rss
from dflash_trt.measure.plot import plot as draw
from dflash_trt.measure.prompts import encode_prompts, read_prompts
from dflash_trt.measure.race import race
from dflash_trt.measure.report import make_record, show_record
from dflash_trt.runtime import Tokenizer


def bench(
    directory: Path = typer.Argument(help="An engine directory with a drafter."),
    prompts: Path = typer.Option(..., help="A JSON list of prompts, or one a line."),
    max_new_tokens: int = typer.Option(128, min=1),
    batch: int = typer.Option(1, min=1, help="Prompts answered at once."),
    repeat: int = typer.Option(3, min=1, help="Rounds; the medians count."),
    threads: int = typer.Option(None, min=1, help="Of one operator. Default: all cores."),
    raw: bool = typer.Option(False, "--raw", help="Prompts as plain text, without the chat template."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
    plot: Path = typer.Option(None, help="Also draw acceptance and speed into this .png, .svg or .pdf."),
) -> None:
    """Answer prompts greedily with the drafter and without, in turns, and compare. Exit code 1 if the texts differ."""
    engine = open_engine(directory)
    if engine.manifest.draft is None:
        raise UserError("this engine has no drafter to compare", where=directory, fix="convert again with --draft")
    if batch > engine.limits.max_batch:
        what = f"--batch {batch} is more than the engine's {engine.limits.max_batch}"
        raise UserError(what, where=directory, fix="give less, or convert again with a larger --max-batch")
    ids = encode_prompts(Tokenizer(directory), read_prompts(prompts), raw=raw)
    groups = [ids[first : first + batch] for first in range(0, len(ids), batch)]
    machine = describe_machine(threads)
    with progress_bar() as progress:
        progress("measuring memory", 0)
        job = (directory, groups[0], max_new_tokens)
        peaks = [peak_rss(*job, draft=draft, threads=threads) for draft in (False, True)]
        progress("loading", 0)
        lanes = [EngineLane(engine, draft=draft, threads=threads) for draft in (False, True)]
        results = race(lanes, groups, max_new_tokens, rounds=repeat, progress=progress)
    record = make_record(results, peaks, machine) | {
        "settings": {"max_new_tokens": max_new_tokens, "batch": batch, "rounds": repeat},
    }
    if plot:
        draw(results, plot, f"Speed at batch {batch}: {record['ratio']:.2f}x")
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        show_record(Console(), record)
    if record["differing"]:
        raise typer.Exit(DflashError.exit_code)
