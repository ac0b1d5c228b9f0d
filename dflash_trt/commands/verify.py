"""`dflash-trt verify`: does this engine, on this machine, say what transformers and z-lab's wheel say?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from dflash_trt.commands.progress import progress_bar
from dflash_trt.errors import DflashError
from dflash_trt.measure.agreement import TIE, TOLERANCE, Agreement
from dflash_trt.measure.prompts import encode_prompts, read_prompts
from dflash_trt.measure.verify import Verdict
from dflash_trt.measure.verify import verify as run
from dflash_trt.runtime import Tokenizer
from dflash_trt.runtime.open import open_engine_alone

PROMPTS = ["Why is the sky blue?", "Write a short story about a lighthouse.", "List five uses of a paper clip."]


def verify(
    directory: Path = typer.Argument(help="An engine directory."),
    prompts: Path = typer.Option(None, help="A JSON list of prompts, or one a line. Default: three built in."),
    max_new_tokens: int = typer.Option(32, min=1, help="Tokens compared for each prompt."),
    no_draft: bool = typer.Option(False, "--no-draft", help="Check the target alone."),
    raw: bool = typer.Option(False, "--raw", help="Prompts as plain text, without the chat template."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a table."),
) -> None:
    """Compare the engine with its references, in float32 on the CPU. Exit code 1 if they disagree.

    The target is compared with transformers, the drafter with the wheel `dflash`; only this command needs them.
    """
    engine = open_engine_alone(directory)
    texts = read_prompts(prompts) if prompts else PROMPTS
    ids = encode_prompts(Tokenizer(directory), texts, raw=raw)
    draft = engine.manifest.draft is not None and not no_draft
    with progress_bar() as progress:
        verdict = run(engine, ids, max_new_tokens, draft=draft, progress=progress)
    if as_json:
        typer.echo(json.dumps(_record(verdict), indent=2))
    else:
        _show(Console(), verdict)
    if not verdict.holds:
        raise typer.Exit(DflashError.exit_code)


def _record(verdict: Verdict) -> dict[str, Any]:
    halves = {"target": verdict.target} | ({"draft": verdict.draft} if verdict.draft else {})
    return {
        "holds": verdict.holds,
        "prompts": verdict.prompts,
        "differing": verdict.differing,
        **{name: asdict(half) | {"relative": half.relative, "holds": half.holds} for name, half in halves.items()},
    }


def _show(console: Console, verdict: Verdict) -> None:
    halves = {"target": verdict.target} | ({"drafter": verdict.draft} if verdict.draft else {})
    table = Table("", *halves)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(title: str, text: Callable[[Agreement], str]) -> None:
        table.add_row(title, *map(text, halves.values()))

    table.add_row("compared with", *("transformers", "dflash wheel")[: len(halves)])
    row("logits differ by at most", lambda half: f"{half.difference:.1e}")
    row("… of the largest logit", lambda half: f"{half.relative:.1e}")
    row("tokens compared", lambda half: str(half.tokens))
    row("equal", lambda half: str(half.tokens - half.ties - half.wrong - half.stepped))
    row("ties", lambda half: str(half.ties))
    row("wrong", lambda half: str(half.wrong))
    if any(half.rounded for half in halves.values()):
        row("behind a rounding step", lambda half: str(half.stepped) if half.rounded else "-")
    row("", lambda half: "[green]agrees[/]" if half.holds else "[red]disagrees[/]")
    console.print(table)
    same = verdict.prompts - verdict.differing
    console.print(f"Answers alone and batched are the same for {same} of {verdict.prompts} prompts.")
    console.print(f"[dim]Allowed: {TOLERANCE:.0e} of the largest logit; a tie is two logits within {TIE:.0e}.[/]")
