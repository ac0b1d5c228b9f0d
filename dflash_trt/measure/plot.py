"""One picture of a race: how far drafts reach, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_trt.errors import Failure
from dflash_trt.measure.race import Result

INK, MUTED, ACCENT = "#222222", "#9aa5b1", "#2f7d4f"


def plot(results: Sequence[Result], path: Path, title: str) -> None:
    """Write a picture (format by suffix) of acceptance per block position and tokens per second."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    drafting = next(r for r in results if r.statistics and r.statistics.block_size > 1)
    assert drafting.statistics is not None
    with pyplot.rc_context({"text.color": INK, "axes.labelcolor": INK}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
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
        for panel in (left, right):
            panel.spines[["top", "right"]].set_visible(False)
        try:
            figure.savefig(path, dpi=160)
        except (OSError, ValueError) as error:
            what = f"the picture cannot be written: {error} — {path} — give a writable .png, .svg or .pdf"
            raise Failure(what) from None
        finally:
            pyplot.close(figure)
