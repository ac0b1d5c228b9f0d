"""The figures of a race as JSON, and those of races and comparisons as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_trt.measure.machine import busy
from dflash_trt.measure.race import Result, differing


def make_record(results: Sequence[Result], peaks: Sequence[int | None], machine: dict[str, Any]) -> dict[str, Any]:
    """JSON-able figures of lanes, the autoregressive one first and DFlash last.

    `peaks` are bytes of memory, `machine` what `describe_machine` said before the race.
    """
    return {
        "lanes": [result.as_json() | {"peak_rss": peak} for result, peak in zip(results, peaks, strict=True)],
        "ratio": results[-1].tokens_per_second / results[0].tokens_per_second,
        "prompts": len(results[0].answers),
        "differing": differing(results),
        "machine": machine,
    }


ROUNDING = (
    "The target rounds its activations to 4 bits (W4A4): the last bit of a sum can decide such a rounding, "
    "so texts may differ with the shape of a call."
)


def show_record(console: Console, record: dict[str, Any]) -> None:
    """One column a lane, acceptance by block position, and what it comes to."""
    lanes = record["lanes"]
    table = Table("", *(lane["lane"] for lane in lanes))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("tokens/s", *(f"{lane['tokens_per_second']:.1f}" for lane in lanes))
    table.add_row("tokens a step (tau)", *(_text(lane.get("tau", 1), ".2f") for lane in lanes))
    table.add_row("engine, ms a step", *(f"{lane['step']['engine_ms']:.1f}" for lane in lanes))
    table.add_row("host, ms a step", *(f"{lane['step']['host_ms']:.2f}" for lane in lanes))
    table.add_row("host's share of the time", *(f"{lane['step']['host_share']:.1%}" for lane in lanes))
    if lanes[0]["peak_rss"]:
        table.add_row("peak memory, MiB", *(f"{lane['peak_rss'] / 2**20:.0f}" for lane in lanes))
    console.print(table)

    acceptance = lanes[-1]["acceptance"]
    shares = Table("block position", *map(str, range(1, len(acceptance) + 1)))
    shares.add_row("drafts accepted", *(_text(share, ".0%") for share in acceptance))
    console.print(shares)

    if record["differing"]:
        colour = "yellow" if record["rounds_activations"] else "red"
        verdict = f"[{colour}]different tokens for {record['differing']} of {record['prompts']} prompts[/{colour}]"
    else:
        verdict = f"[green]same tokens for all {record['prompts']} prompts[/]"
    console.print(f"DFlash is [bold]{record['ratio']:.2f}x[/] as fast as the target alone; {verdict}.")
    if record["differing"] and record["rounds_activations"]:
        console.print(f"[yellow]{ROUNDING}[/]")
    if why := busy(record["machine"]):
        console.print(f"[yellow]Do not rely on the speeds: {why}.[/]")


def show_comparison(console: Console, record: dict[str, Any]) -> None:
    """One row an engine: figures, acceptance by block position, and agreement with the first engine."""
    engines, comparisons = record["engines"], record["comparisons"]
    table = _figures("", ["tau", "tokens/s", "target, MiB", "drafter, MiB"])
    for engine in engines:
        sizes = (f"{engine['weight_bytes'][role] / 2**20:,.1f}" for role in ("target", "draft"))
        speed = f"{engine['tokens_per_second']:.1f}"
        table.add_row(escape(engine["name"]), _text(engine["tau"], ".2f"), speed, *sizes)
    console.print(table)

    positions = max(len(engine["acceptance"]) for engine in engines)
    shares = _figures("drafts accepted at block position", [str(number + 1) for number in range(positions)])
    for engine in engines:
        accepted = [_text(share, ".0%") for share in engine["acceptance"]]
        shares.add_row(escape(engine["name"]), *accepted, *[""] * (positions - len(accepted)))
    console.print(shares)

    table = _figures(f"same as {engines[0]['name']}", ["target", "next token", "position", "prefix", "answers", "tau"])
    for entry in comparisons:
        target = "yes" if entry["same_target"] else "no"
        shares_of = (entry[f"{kind}_share"] for kind in ("next_token", "position", "prefix"))
        answers = f"{entry['identical']} of {record['prompts']}"
        ratio = _text(entry["tau_ratio"], ".2f", "x")
        agreement = [_text(share, ".1%") for share in shares_of]
        table.add_row(escape(entry["engines"][1]), target, *agreement, answers, ratio)
    console.print(table)
    for entry in comparisons:
        if entry["identical"] < record["prompts"]:
            places = " ".join("=" if place is None else str(place + 1) for place in entry["first_difference"])
            console.print(f"First token in which {escape(entry['engines'][1])} differs, by prompt (=: none): {places}")

    for entry in record["broken"]:
        who = " and ".join(map(escape, entry["engines"]))
        trouble = f"different tokens for {entry['differing']} of {record['prompts']} prompts"
        if entry["rounds_activations"]:
            console.print(f"[yellow]{trouble} under one target: {who}. {ROUNDING}[/]")
        else:
            console.print(f"[red]{trouble} under one target: {who}.[/]")
    if not record["broken"] and any(entry["same_target"] for entry in comparisons):
        console.print(f"[green]Engines of one target gave the same tokens for all {record['prompts']} prompts.[/]")
    if why := busy(record["machine"]):
        console.print(f"[yellow]Do not rely on the speeds: {why}.[/]")


def _figures(title: str, columns: Sequence[str]) -> Table:
    table = Table(escape(title), *map(escape, columns))
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit
