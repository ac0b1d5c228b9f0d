"""`dflash-trt check`: what would go wrong with a TensorRT-LLM deployment, told before it starts."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from dflash_trt.errors import UserError, one_line
from dflash_trt.gpus import parse_gpus
from dflash_trt.recipes import read_recipe
from dflash_trt.sizes import format_bytes
from dflash_trt.trtllm.doctor import doctor, look
from dflash_trt.trtllm.preflight import (
    ERROR,
    NOTE,
    WARNING,
    Deployment,
    Finding,
    count,
    deployment_of_config,
    deployment_of_recipe,
    preflight,
    summary,
)
from dflash_trt.trtllm.rulebook import rows

GOALS = ("latency", "interactive", "throughput")
COLOURS = {ERROR: "red", WARNING: "yellow", NOTE: "cyan"}


def check(
    recipe: str | None = typer.Argument(None, help="A recipe's name or file.", show_default=False),
    config: Path | None = typer.Option(None, help="A YAML for trtllm-serve --config, instead.", show_default=False),
    gpus: str | None = typer.Option(None, help="Of a node, as B300x8. Not given: the recipe's.", show_default=False),
    nodes: int | None = typer.Option(None, min=1, help="How many nodes, with --gpus.", show_default=False),
    target: str | None = typer.Option(
        None, help="Directory of the target, or owner/name of a published one.", show_default=False
    ),
    draft: str | None = typer.Option(None, help="Likewise, of the drafter.", show_default=False),
    release: str | None = typer.Option(None, help="Of TensorRT-LLM, as 1.3.0rc27.", show_default=False),
    goal: str | None = typer.Option(
        None, help="latency, interactive or throughput, with --config.", show_default=False
    ),
    machine: bool = typer.Option(False, "--doctor", help="Look at this machine, too: GPUs, driver, NVLink, limits."),
    port: int = typer.Option(8000, min=1, max=65535, help="That the server will listen on, for --doctor."),
    explain: bool = typer.Option(False, "--why", help="Say of warnings, too, why they matter and who says so."),
    strict: bool = typer.Option(False, "--strict", help="Let warnings count as errors."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    show_list: bool = typer.Option(False, "--list", help="Print the table of all rules."),
) -> None:
    """Check a recipe, or a YAML for TensorRT-LLM, against the pair and the GPUs. Exit code 2 if there are errors."""
    if show_list:
        _print_list(as_json)
        return
    deployment = _deployment(recipe, config, gpus, nodes, target, draft, release, goal)
    findings = preflight(deployment)
    if machine:
        findings = [*findings, *doctor(look(deployment, port, os.environ), deployment)]
    if as_json:
        typer.echo(json.dumps(_as_json(deployment, findings), indent=2))
    else:
        _print(Console(highlight=False), deployment, findings, explain)
    counts = count(findings)
    if counts[ERROR] or (strict and counts[WARNING]):
        raise typer.Exit(UserError.exit_code)


def _deployment(
    recipe: str | None,
    config: Path | None,
    gpus: str | None,
    nodes: int | None,
    target: str | None,
    draft: str | None,
    release: str | None,
    goal: str | None,
) -> Deployment:
    if (recipe is None) == (config is None):
        fix = "dflash-trt check RECIPE, or dflash-trt check --config FILE"
        raise UserError("one thing is checked at a time: a recipe or a file", where="check", fix=fix)
    if nodes is not None and gpus is None:
        raise UserError("--nodes counts what --gpus names", where="--nodes", fix="pass --gpus, too")
    if goal is not None and (goal not in GOALS or recipe is not None):
        fix = "a recipe names its own" if recipe is not None else f"one of {', '.join(GOALS)}"
        raise UserError(f"{goal!r} is no goal here", where="--goal", fix=fix)
    cards = parse_gpus(gpus, nodes=nodes or 1) if gpus is not None else None
    if recipe is not None:
        return deployment_of_recipe(read_recipe(recipe), target, draft, cards, release)
    assert config is not None
    return dataclasses.replace(deployment_of_config(config, cards, target, draft, release), goal=goal)


def _as_json(deployment: Deployment, findings: list[Finding]) -> dict[str, Any]:
    return {
        "file": str(deployment.file),
        "release": deployment.release,
        "gpus": str(deployment.gpus),
        **summary(deployment),
        "counts": count(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _print(console: Console, deployment: Deployment, findings: list[Finding], explain: bool) -> None:
    facts = summary(deployment)
    console.print(f"[bold]{_plain(deployment.file.name)}[/]: {_pair(facts)}")
    console.print(f"on {deployment.gpus} with TensorRT-LLM {deployment.release}{_memory(facts)}")
    for severity, colour in COLOURS.items():
        group = [finding for finding in findings if finding.severity == severity]
        if group:
            console.print(f"\n[bold {colour}]{len(group)} {severity}{'s' if len(group) > 1 else ''}[/]")
            console.print(Padding(_group(group, explain or severity == ERROR), (0, 0, 0, 2)))
    if not findings:
        console.print("\n[green]nothing speaks against it[/]")
    elif not count(findings)[ERROR]:
        console.print("\n[green]no errors[/]" + ("" if explain else "; --why says more"))


def _group(findings: Iterable[Finding], explain: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        place = f"line {finding.line}: " if finding.line else ""
        table.add_row(finding.rule, _plain(place + finding.what))
        if explain:
            table.add_row("", f"[dim]{escape(finding.why)} ({escape(finding.source)})[/]")
        if finding.fix:
            table.add_row("", f"→ {_plain(finding.fix)}")
    return table


def _plain(text: str) -> str:
    """Words of the file as they are, but nothing that a terminal would obey."""
    return escape(one_line(text))


def _pair(facts: dict[str, Any]) -> str:
    names = [_plain(facts[role]["name"] or f"{role} not named") for role in ("target", "drafter")]
    unknown = [role for role in ("target", "drafter") if facts[role]["name"] and not facts[role]["known"]]
    return f"{names[0]} with {names[1]}" + (f" ({' and '.join(unknown)} not known here)" if unknown else "")


def _memory(facts: dict[str, Any]) -> str:
    """`; a GPU of 268.6 GiB: weights 7.834 GiB, KV cache 205.4 GiB, drafter's arena 8.129 GiB in it`"""
    memory = facts["memory"]
    inside = " within it" if memory["arena_in_kv_cache"] else ""
    parts = [
        f"{word} {format_bytes(memory[key])}{after}"
        for key, word, after in (
            ("weights", "weights", ""),
            ("kv_cache", "KV cache", ""),
            ("arena", "drafter's context", inside),
        )
        if memory[key] is not None
    ]
    return f"\neach GPU has {format_bytes(memory['card'])}: about {', '.join(parts)}" if parts else ""


def _print_list(as_json: bool) -> None:
    if as_json:
        listed = [{name: getattr(row, name) for name in ("id", "severity", "title", "why", "source")} for row in rows()]
        typer.echo(json.dumps(listed, indent=2))
        return
    table = Table(box=None, padding=(0, 1), show_header=False)
    for style in ("bold", "", ""):
        table.add_column(style=style, no_wrap=style == "bold")
    for row in rows():
        table.add_row(row.id, f"[{COLOURS[row.severity]}]{row.severity}[/]", escape(row.title))
    Console(highlight=False).print(table)
