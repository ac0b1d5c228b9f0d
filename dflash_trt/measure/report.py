"""The figures of a race, as JSON and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
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
        verdict = f"[red]different tokens for {record['differing']} of {record['prompts']} prompts[/]"
    else:
        verdict = f"[green]same tokens for all {record['prompts']} prompts[/]"
    console.print(f"DFlash is [bold]{record['ratio']:.2f}x[/] as fast as the target alone; {verdict}.")
    if why := busy(record["machine"]):
        console.print(f"[yellow]Do not rely on the speeds: {why}.[/]")


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
