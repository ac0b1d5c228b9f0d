"""A picture of what users share: each point is a number of users, further right is faster for one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.load import Load
from dflash_trt.picture import ACCENT, MUTED, picture


def plot(lanes: Mapping[str, Sequence[Load]], path: Path, title: str) -> None:
    """Write a picture (format by suffix) of all tokens per second against those of one user."""
    with picture(path, size=(6.4, 4.2)) as (_, panel):
        for (name, loads), color in zip(lanes.items(), (MUTED, ACCENT), strict=True):
            x = [load.tokens_per_second_per_user for load in loads]
            y = [load.tokens_per_second for load in loads]
            panel.plot(x, y, color=color, marker="o", linewidth=1.8, label=name)
            for load, point in zip(loads, zip(x, y, strict=True), strict=True):
                panel.annotate(str(load.users), point, (5, 5), textcoords="offset points", color=color, fontsize=8)
        panel.set(xlabel="tokens per second of one user", ylabel="tokens per second of all users", ylim=(0, None))
        panel.set_xlim(0, None)
        panel.set_title(title, loc="left", fontsize=10)
        panel.legend(frameon=False, title="points: users at once", title_fontsize=8)
