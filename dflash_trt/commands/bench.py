"""`dflash-trt bench`: what the drafter is worth on this machine, and how engines compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from dflash_trt.commands.progress import progress_bar
from dflash_trt.engine import Engine
from dflash_trt.errors import DflashError, UserError
from dflash_trt.measure.compare import Prompts, check_comparable
from dflash_trt.measure.compare import compare as run_comparison
from dflash_trt.measure.lanes import EngineLane
from dflash_trt.measure.machine import describe_machine
from dflash_trt.measure.memory import peak_rss
from dflash_trt.measure.plot import plot as draw
from dflash_trt.measure.plot import plot_comparison
from dflash_trt.measure.prompts import encode_prompts, read_prompts
from dflash_trt.measure.race import race
from dflash_trt.measure.report import make_record, show_comparison, show_record
from dflash_trt.runtime import Tokenizer
from dflash_trt.runtime.open import open_engine_alone


def bench(
    directories: list[Path] = typer.Argument(help="An engine directory with a drafter; for --compare two or more."),
    prompts: Path = typer.Option(..., help="A JSON list of prompts, or one a line."),
    compare: bool = typer.Option(False, "--compare", help="Compare engines with each other: the first with the rest."),
    max_new_tokens: int = typer.Option(128, min=1),
    batch: int = typer.Option(1, min=1, help="Prompts answered at once."),
    repeat: int = typer.Option(3, min=1, help="Rounds; the medians count."),
    threads: int = typer.Option(None, min=1, help="Of one operator. Default: all cores."),
    raw: bool = typer.Option(False, "--raw", help="Prompts as plain text, without the chat template."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
    plot: Path = typer.Option(None, help="Also draw acceptance and speed, or agreement, into this .png, .svg or .pdf."),
) -> None:
    """Answer prompts greedily with the drafter and without, in turns, and compare. Exit code 1 if the texts differ.

    With --compare every engine answers with its drafter. Then exit code 1 means that engines of one target differ;
    engines of different targets may.
    """
    if compare != (len(directories) > 1):
        what = f"{len(directories)} engine directories given"
        fix = "--compare needs two or more" if compare else "give one, or add --compare to compare them with each other"
        raise UserError(what.replace("1 engine directories", "one engine directory"), where="bench", fix=fix)
    engines = [_open(directory, batch) for directory in directories]
    ids = encode_prompts(Tokenizer(directories[0]), read_prompts(prompts), raw=raw)
    groups = [ids[first : first + batch] for first in range(0, len(ids), batch)]
    machine = describe_machine(threads)
    settings = {"max_new_tokens": max_new_tokens, "batch": batch, "rounds": repeat}
    if compare:
        check_comparable(engines, ids, max_new_tokens)
        with progress_bar() as progress:
            record = run_comparison(
                engines, groups, max_new_tokens, rounds=repeat, threads=threads, progress=progress
            ) | {"machine": machine, "settings": settings}
        failed = any(not entry["rounds_activations"] for entry in record["broken"])
        if plot:
            plot_comparison(record, plot)
    else:
        record = _race(engines[0], groups, settings, threads, machine, plot)
        failed = bool(record["differing"]) and not record["rounds_activations"]
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        (show_comparison if compare else show_record)(Console(), record)
    if failed:
        raise typer.Exit(DflashError.exit_code)


def _open(directory: Path, batch: int) -> Engine:
    engine = open_engine_alone(directory)
    if engine.manifest.draft is None:
        raise UserError("this engine has no drafter to compare", where=directory, fix="convert again with --draft")
    if batch > engine.limits.max_batch:
        what = f"--batch {batch} is more than the engine's {engine.limits.max_batch}"
        raise UserError(what, where=directory, fix="give less, or convert again with a larger --max-batch")
    return engine


def _race(
    engine: Engine,
    groups: Sequence[Prompts],
    settings: dict[str, int],
    threads: int | None,
    machine: dict[str, Any],
    picture: Path | None,
) -> dict[str, Any]:
    """The figures of the drafter against the target alone."""
    max_new_tokens = settings["max_new_tokens"]
    with progress_bar() as progress:
        progress("measuring memory", 0)
        job = (engine.path, groups[0], max_new_tokens)
        peaks = [peak_rss(*job, draft=draft, threads=threads) for draft in (False, True)]
        progress("loading", 0)
        lanes = [EngineLane(engine, draft=draft, threads=threads) for draft in (False, True)]
        results = race(lanes, groups, max_new_tokens, rounds=settings["rounds"], progress=progress)
    record = make_record(results, peaks, machine) | {
        "settings": settings,
        "rounds_activations": engine.manifest.rounds_activations,
    }
    if picture:
        draw(results, picture, f"Speed at batch {settings['batch']}: {record['ratio']:.2f}x")
    return record
