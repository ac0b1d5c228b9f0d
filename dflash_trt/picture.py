"""What all pictures have in common: their colours, and how one is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_trt.errors import Failure

INK, MUTED, ACCENT, WARM = "#222222", "#8792a0", "#2f7d4f", "#d98e32"


@contextmanager
def picture(path: Path, columns: int = 1, *, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, Any]]:
    """(figure, its panels) to draw on, written to `path` at the end, in the format of its suffix.

    Raises Failure if it cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"text.color": INK, "axes.labelcolor": INK}):
        figure, panels = pyplot.subplots(1, columns, figsize=size, layout="constrained", **options)
        try:
            yield figure, panels
            for panel in figure.axes:
                panel.spines[["top", "right"]].set_visible(False)
            _save(figure, path)
        finally:
            pyplot.close(figure)


def _save(figure: Any, path: Path) -> None:
    """Under another name first, so that an older picture is whole until the new one is."""
    staged = path.with_name(f".partial-{path.name}")
    try:
        figure.savefig(staged, dpi=160, format=path.suffix[1:] or "png")
        staged.replace(path)
    except (OSError, ValueError) as error:
        staged.unlink(missing_ok=True)
        what = f"the picture cannot be written: {error} — {path} — give a writable .png, .svg or .pdf"
        raise Failure(what) from None
