"""Sizes for people."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """`1.5 GiB`: four digits at most, in the largest unit that leaves one before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"
