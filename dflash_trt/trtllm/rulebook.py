"""All rules as one table: for `check --list`, and for docs/preflight.md."""

from __future__ import annotations

from collections.abc import Iterable

from dflash_trt.trtllm.doctor import MACHINE_RULES
from dflash_trt.trtllm.preflight import KEYS
from dflash_trt.trtllm.rules import RULES
from dflash_trt.trtllm.rules.table import Row

TOPICS = {
    "DF00": "Set up at all",
    "DF01": "The block",
    "DF02": "Memory",
    "DF03": "The drafter's attention",
    "DF04": "Precision",
    "DF05": "The pair",
    "DF06": "Ranks",
    "DF07": "What else the server does",
    "DF08": "What else the server does",
    "DM0": "The machine (--doctor)",
}


def rows() -> list[Row]:
    """In the order of their ids."""
    return sorted([KEYS, *RULES.values(), *MACHINE_RULES.values()], key=lambda row: row.id)


def topic(row: Row) -> str:
    return next(title for start, title in TOPICS.items() if row.id.startswith(start))


def markdown(listed: Iterable[Row] | None = None) -> str:
    """A table for each topic."""
    text, current = "", None
    for row in rows() if listed is None else listed:
        if topic(row) != current:
            current = topic(row)
            text += f"\n### {current}\n\n| id | severity | asked for | otherwise | source |\n|---|---|---|---|---|\n"
        cells = (row.id, row.severity, row.title, row.why, row.source)
        text += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    return text.lstrip("\n")
