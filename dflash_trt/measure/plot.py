"""Pictures of how far drafts reach: what that is worth to one engine, or how several engines compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_trt.measure.race import Result
from dflash_trt.picture import ACCENT, MUTED, WARM, picture

# The first is what others are compared with.
ENGINES = (MUTED, ACCENT, WARM, "#3f6fb0", "#a1496b", "#59504a", "#7fb8ad", "#c7b042", "#8d7cc3")
SHARES = {  # of a comparison, from the finest measure to the coarsest
    "next_token_share": "same next token\non the same text",
    "position_share": "same token\nat a position",
    "prefix_share": "same up to the\nfirst difference",
    "identical_share": "same answers",
}
MAX_LABELS = 20  # bars of one panel that are few enough for a number on each


def plot(results: Sequence[Result], path: Path, title: str) -> None:
    """Write a picture (format by suffix) of acceptance per block position and tokens per second."""
    drafting = next(r for r in results if r.statistics and r.statistics.block_size > 1)
    assert drafting.statistics is not None
    with picture(path, 2, size=(10, 3.6)) as (_, (left, right)):
        shares = [100 * share for share in drafting.statistics.acceptance]
        bars = left.bar(range(1, len(shares) + 1), shares, color=ACCENT, width=0.7)
        left.bar_label(bars, fmt="%.0f", padding=2)
        left.set(xlabel="position in the block", ylabel="drafts accepted, %", ylim=(0, 108))
        left.set_xticks(range(1, len(shares) + 1))
        left.set_title(f"Acceptance, tau {drafting.statistics.tau:.2f}", loc="left")

        colors = [ACCENT if result is drafting else MUTED for result in results]
        bars = right.barh([r.lane for r in results], [r.tokens_per_second for r in results], color=colors, height=0.55)
        right.bar_label(bars, fmt="%.1f", padding=4)
        right.invert_yaxis()
        right.set(xlabel="tokens per second", xlim=(0, 1.15 * max(r.tokens_per_second for r in results)))
        right.set_title(title, loc="left")


def plot_comparison(record: dict[str, Any], path: Path) -> None:
    """Write a picture of what `compare` found: acceptance per block position, and agreement with the first engine."""
    engines, comparisons = record["engines"], record["comparisons"]
    colors = {engine["name"]: ENGINES[index % len(ENGINES)] for index, engine in enumerate(engines)}
    with picture(path, 2, size=(10, 3.8 + 0.3 * len(comparisons))) as (figure, (left, right)):
        width = 0.8 / len(engines)
        positions = max(len(engine["acceptance"]) for engine in engines)
        for index, engine in enumerate(engines):
            shares = [100 * (share or 0) for share in engine["acceptance"]]
            places = [n + 1 + (index - (len(engines) - 1) / 2) * width for n in range(len(shares))]
            tau = "-" if engine["tau"] is None else format(engine["tau"], ".2f")
            name = f"{_short(engine['name'])}, tau {tau}"
            bars = left.bar(places, shares, color=colors[engine["name"]], width=0.92 * width, label=name)
            if positions * len(engines) <= MAX_LABELS:
                left.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
        left.set(xlabel="position in the block", ylabel="drafts accepted, %", ylim=(0, 108))
        left.set_xticks(range(1, positions + 1))
        left.set_title("Acceptance", loc="left")
        columns = max(1, 90 // max(len(_short(engine["name"])) + 10 for engine in engines))
        figure.legend(frameon=False, loc="outside lower center", ncols=columns)

        height = 0.8 / len(comparisons)
        for index, comparison in enumerate(comparisons):
            name = comparison["engines"][1]
            places = [n + (index - (len(comparisons) - 1) / 2) * height for n in range(len(SHARES))]
            shares = [100 * (comparison[key] or 0) for key in SHARES]
            bars = right.barh(places, shares, color=colors[name], height=0.85 * height)
            right.bar_label(bars, fmt="%.1f", padding=4, fontsize=9 if len(comparisons) < 3 else 8)
        right.set_yticks(range(len(SHARES)), list(SHARES.values()))
        right.invert_yaxis()
        right.set(xlabel=f"%, over {record['prompts']} prompts", xlim=(0, 115), xticks=range(0, 101, 20))
        right.set_title(f"Agreement with {_short(engines[0]['name'])}", loc="left")


def _short(name: str) -> str:
    """Of a long path the end, which tells engines apart."""
    return name if len(name) <= 26 else f"…{name[-25:]}"
