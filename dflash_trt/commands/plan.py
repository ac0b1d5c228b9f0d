"""`dflash-trt plan`: what a pair would do on a machine, before anybody rents it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console

from dflash_trt.durable import check_parent
from dflash_trt.errors import UserError
from dflash_trt.gpus import Card
from dflash_trt.plan.acceptance import check_constant_rate
from dflash_trt.plan.measured import Measured
from dflash_trt.plan.models import Split
from dflash_trt.plan.report import Result, finish, make_record, show
from dflash_trt.plan.residuals import acceptance_markdown, markdown, residuals
from dflash_trt.plan.roofline import Roofline
from dflash_trt.plan.source import (
    MOST_DRAFT,
    Order,
    check_drafts,
    order_of_checkpoints,
    order_of_recipe,
    parse_acceptance,
    parse_numbers,
)
from dflash_trt.plan.steps import NAMES
from dflash_trt.plan.sweep import Goal, Point, sweep

MOST_BATCH = 8192
PICTURES = (".png", ".svg", ".pdf")


def plan(
    recipe: str | None = typer.Argument(None, help="A recipe's name or file; or give --target and --gpus."),
    target: str | None = typer.Option(None, help="A published checkpoint (openai/gpt-oss-120b) or a directory."),
    draft: str | None = typer.Option(None, help="Its DFlash drafter, likewise. Default: the published one."),
    gpus: str | None = typer.Option(None, help="The card and how many a node has: B300x8."),
    tp: int | None = typer.Option(None, min=1, help="GPUs that share a layer. Default: try all."),
    ep: int | None = typer.Option(None, min=1, help="Groups that share the experts; with --tp. Default: 1."),
    attention_dp: bool = typer.Option(False, "--attention-dp", help="Each GPU attends for its own rows; with --tp."),
    search: bool = typer.Option(False, "--search", help="Of a recipe: try all splits, not only its own."),
    precision: str | None = typer.Option(
        None, help="Of the target's weights: bf16, fp8, mxfp4 or nvfp4. Default: its own."
    ),
    kv_dtype: str | None = typer.Option(None, help="Of the target's KV cache: bf16 (default), fp8 or nvfp4."),
    goal: Goal | None = typer.Option(None, help="What to choose for."),
    per_user: float | None = typer.Option(
        None, min=0, max=1e6, help="Tokens/s that each user must get at least. Default: the goal's."
    ),
    batch: str | None = typer.Option(None, help="Batches to try: 1,2,4 or 1-16."),
    draft_length: str | None = typer.Option(
        None, help="K of DFlash to try: 4,9 or 1-9. Default: all that a block holds."
    ),
    context: int = typer.Option(2048, min=1, help="Tokens in a row's cache, on average over its answer."),
    sequence: int | None = typer.Option(
        None, min=1, help="Tokens of the longest row. Default: the recipe's, or 4 contexts, as far as the target knows."
    ),
    category: str = typer.Option("coding", help="Of published acceptance lengths: coding, math, chat, mean or a task."),
    tau: str | None = typer.Option(None, help="Acceptance length of DFlash instead, at its K: 4.4@9 or 3.1@3,4.4@9."),
    eagle3_tau: str | None = typer.Option(None, "--eagle3-tau", help="Likewise of EAGLE-3: 2.8@7."),
    gap: float = typer.Option(0.0, min=0, max=1000, help="Milliseconds of a step in which the GPUs wait."),
    data: Literal["measured", "roofline"] | None = typer.Option(None, help="Default: measured, where it is installed."),
    output: Path | None = typer.Option(None, help="Draw the Pareto front into this .png, .svg or .pdf."),
    force: bool = typer.Option(False, "--force", help="Overwrite the picture."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
    show_residuals: bool = typer.Option(False, "--residuals", help="Compare with published measurements instead."),
) -> None:
    """Predict speed and memory of AR, EAGLE-3 and DFlash on GPUs, and choose a setting.

    All that it knows are sizes, data sheets or measured kernels, and published acceptance lengths; docs/plan.md says
    how far off that is.
    """
    if show_residuals:
        if recipe or target or output:
            raise UserError("--residuals is about all that is published", where="plan", fix="give it alone, or --json")
        _show_residuals(as_json)
        return
    if output:
        _check_picture(output, force)
    if recipe:
        given = {"--target": target, "--draft": draft, "--gpus": gpus, "--tp": tp, "--ep": ep, "--precision": precision}
        given |= {"--kv-dtype": kv_dtype, "--attention-dp": True if attention_dp else None}
        if extra := next((name for name, value in given.items() if value is not None), None):
            raise UserError(f"{extra} beside a recipe", where=recipe, fix="leave it out, the recipe has it")
        order = order_of_recipe(recipe, category, context, sequence, search)
    else:
        if not target or not gpus:
            fix = "as in plan --target openai/gpt-oss-120b --gpus B300x8"
            raise UserError("give a recipe, or --target and --gpus", where="plan", fix=fix)
        if search:
            fix = "leave it out: without --tp all splits are tried"
            raise UserError("--search is about a recipe", where="plan", fix=fix)
        if tp is None and (ep or attention_dp):
            raise UserError("--ep and --attention-dp are about a --tp", where="plan", fix="give --tp, too")
        splits = None if tp is None else [Split(tp, ep or 1, attention_dp)]
        cache = kv_dtype or "bf16"
        order = order_of_checkpoints(target, draft, gpus, splits, category, context, sequence, cache, precision)
    result = _sweep(_refine(order, goal, batch, draft_length, tau, eagle3_tau, gap), per_user, data)
    if output:
        from dflash_trt.plan.picture import draw  # loads matplotlib

        draw(result, output)
    record = make_record(result)
    if as_json:
        typer.echo(json.dumps(record, indent=2))
    else:
        show(Console(), record)


def _check_picture(output: Path, force: bool) -> None:
    check_parent(output)
    if output.is_dir() or output.suffix.lower() not in PICTURES:
        raise UserError("that is no name of a picture", where=output, fix=f"end it with {' or '.join(PICTURES)}")
    if os.path.lexists(output) and not force:
        raise UserError("the picture exists", where=output, fix="pass --force to overwrite it")


def _show_residuals(as_json: bool) -> None:
    found, checks = residuals(), check_constant_rate()
    if as_json:
        both = {"points": [row.record() for row in found], "acceptance": [asdict(check) for check in checks]}
        typer.echo(json.dumps(both, indent=2))
    else:
        typer.echo(f"{markdown(found)}\n\n{acceptance_markdown(checks)}")


def _refine(
    order: Order,
    goal: Goal | None,
    batch: str | None,
    drafts: str | None,
    tau: str | None,
    eagle: str | None,
    gap: float,
) -> Order:
    """What options say about any source. Raises UserError for what does not fit it."""
    if batch:
        order = replace(order, batches=parse_numbers(batch, "--batch", MOST_BATCH))
    if drafts:
        order = replace(order, drafts=parse_numbers(drafts, "--draft-length", MOST_DRAFT))
        check_drafts(order.model, order.drafts or ())
    accepted = dict(order.accepted)
    if tau:
        accepted["dflash"] = parse_acceptance(tau, "--tau")
    if eagle:
        accepted["eagle3"] = parse_acceptance(eagle, "--eagle3-tau")
    notes = list(order.notes)
    if order.model.dflash is None:
        notes.append("no DFlash drafter of it is known here; give one with --draft")
    elif "dflash" not in accepted:
        fix = "pass --tau with what you measured, as in 4.4@9"
        raise UserError("no acceptance length of DFlash is published for it", where=order.model.name, fix=fix)
    if "eagle3" not in accepted:
        notes.append("EAGLE-3 is left out: no acceptance length of it is published; pass --eagle3-tau")
    workload = replace(order.workload, gap=gap / 1e3)
    return replace(order, accepted=accepted, notes=tuple(notes), workload=workload, goal=goal or order.goal)


def _sweep(order: Order, per_user: float | None, data: str | None) -> Result:
    clock, missing = _clock(order.gpus.card, data)
    order = replace(order, notes=(*order.notes, *missing))
    if order.searched and isinstance(clock, Measured):
        order = replace(order, splits=clock.covered(order.model, order.splits))
    points = sweep(
        order.model,
        order.splits,
        order.gpus.card,
        clock,
        order.workload,
        order.accepted,
        order.batches,
        order.drafts,
    )
    if not any(point.memory.fits for point in points):
        raise _too_large(order, points)
    fallbacks = clock.fallbacks if isinstance(clock, Measured) else {}
    name = "measured" if isinstance(clock, Measured) else "roofline"
    return finish(order, points, per_user, name, fallbacks)


def _too_large(order: Order, points: Sequence[Point]) -> UserError:
    """Tells the largest batch of each method that fits, if any does."""
    largest: dict[str, int] = {}
    for point in points:
        name = NAMES[point.method]
        largest[name] = max(largest.get(name, 0), point.memory.largest_batch)
    rows = ", ".join(f"{name} {batch:,}" for name, batch in largest.items())
    fix = f"the largest batch is {rows}; lower --batch or --sequence"
    if not any(largest.values()):
        fix = "not even one row does; take more GPUs, a larger --tp or a shorter --sequence"
    what = f"nothing fits in {order.gpus.card.name}'s memory with rows of {order.workload.sequence:,} tokens"
    return UserError(what, where=order.model.name, fix=fix)


def _clock(card: Card, data: str | None) -> tuple[Measured | Roofline, tuple[str, ...]]:
    """And why it is not the better one, if nobody asked for the roofline."""
    if data == "roofline":
        return Roofline(card), ()
    try:
        return Measured(card), ()
    except UserError as error:
        if data == "measured":
            raise
        return Roofline(card), (str(error),)
