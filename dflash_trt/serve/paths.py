"""Paths and numbers of the command line that no system takes, refused in one line."""

from __future__ import annotations

import math
import os
from pathlib import Path

from dflash_trt.errors import UserError, one_line

MOST_WAITING = 1_000_000  # requests; more than that is no queue
LONGEST_GRACE = 1e9  # seconds, thirty years: timers of Python and of Triton hold a little more
_SHOWN = 100  # characters


def check_reachable(path: Path, option: str) -> None:
    """Raise UserError for a path that cannot exist (a name that is too long, links in a circle) or takes two lines."""
    if "\n" in os.fspath(path):
        raise UserError("the path has a line break", where=f"{option}: {printable(path)}", fix="rename it")
    try:
        path.stat()
        path.resolve()
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(what, where=f"{option}: {printable(path)}", fix="give another path") from None


def check_grace(seconds: float) -> None:
    """Raise UserError for what is no time to wait."""
    if not math.isfinite(seconds) or not 0 <= seconds <= LONGEST_GRACE:
        fix = f"give a number of seconds from 0 to {LONGEST_GRACE:.0f}"
        raise UserError(f"grace is {seconds}", where="--grace", fix=fix)


def printable(path: str | os.PathLike[str]) -> str:
    """On one line, and not a page long."""
    text = one_line(os.fspath(path))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
