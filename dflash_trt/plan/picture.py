"""The Pareto picture: tokens a second of a GPU over tokens a second for each user, one line a method."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.picture import ACCENT, MUTED, WARM, picture
from dflash_trt.plan.compare import CLAIM, fronts_of
from dflash_trt.plan.report import Result
from dflash_trt.plan.steps import NAMES

SHADE = "#f2ead9"
COLORS = {"ar": MUTED, "eagle3": WARM, "dflash": ACCENT}
MARKED = (1, 4, 16, 64, 256, 1024)  # batches that are written beside a line


def draw(result: Result, path: Path) -> None:
    """Write the picture; the format is that of the suffix."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    order = result.order
    with picture(path, size=(9, 5.6)) as (_, panel):
        for method, front in fronts_of(result.points).items():
            color = COLORS[method]
            label = NAMES[method]
            if method in order.accepted:
                one = order.accepted[method]
                drafts = sorted({point.draft for point in front})
                most = drafts[-1]
                span = f"K {drafts[0]}-{most}" if drafts[0] < most else f"K {most}"
                label += f", {span}: {one.tokens(most):.1f} tokens a step at {most} ({one.task})"
            xs, ys = [p.per_user for p in front], [p.per_gpu for p in front]
            panel.plot(xs, ys, color=color, linewidth=1.8, marker="o", markersize=3.5, label=label)
            seen: set[int] = set()
            for point in front:
                if point.batch in MARKED and point.batch not in seen:
                    seen.add(point.batch)
                    at = (point.per_user, point.per_gpu)
                    panel.annotate(
                        f"{point.batch}", at, textcoords="offset points", xytext=(5, 4), fontsize=8, color=color
                    )
        low, high = CLAIM.per_user[0], CLAIM.per_user[-1]
        left, right = panel.get_xlim()
        if left < low and right > high:
            panel.axvspan(low, high, color=SHADE, zorder=0, label=f"{low:g} to {high:g} tokens/s for each user")
        if chosen := result.choice:
            place = ([chosen.per_user], [chosen.per_gpu])
            text = f"chosen for {order.goal}: {NAMES[chosen.method]}, batch {chosen.batch}"
            text += f", K {chosen.draft}" if chosen.draft else ""
            panel.plot(*place, marker="*", markersize=15, color="#b03a2e", linestyle="none", zorder=5, label=text)
        panel.set(xscale="log", yscale="log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axis.set_minor_formatter(NullFormatter())
        panel.set_xlabel("tokens/s for each user")
        panel.set_ylabel("tokens/s of a GPU")
        how = "from measured kernels" if result.data == "measured" else "by a roofline"
        panel.set_title(f"{order.model.name} on {order.gpus}, predicted {how}", loc="left")
        panel.grid(color="#e6e6e6", linewidth=0.6)
        panel.legend(frameon=False, loc="lower left", fontsize=9, title="numbers: batch", alignment="left")
