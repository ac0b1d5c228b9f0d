"""A picture of what users share: each point is a number of users, further right is faster for one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.load import Load
from dflash_trt.errors import Failure
from dflash_trt.measure.plot import ACCENT, INK, MUTED


def plot(lanes: Mapping[str, Sequence[Load]], path: Path, title: str) -> None:
    """Write a picture (format by suffix) of all tokens per second against those of one user."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"text.color": INK, "axes.labelcolor": INK}):
        figure, panel = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
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
        panel.spines[["top", "right"]].set_visible(False)
        try:
            figure.savefig(path, dpi=160)
        except (OSError, ValueError) as error:
            what = f"the picture cannot be written: {error} — {path} — give a writable .png, .svg or .pdf"
            raise Failure(what) from None
        finally:
            pyplot.close(figure)
