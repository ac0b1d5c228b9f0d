"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]  # what is being done, and which fraction of it (0 … 1) is done


def silent(what: str, fraction: float) -> None:
    """Say nothing."""
