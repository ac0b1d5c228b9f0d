"""Does the engine get on? Told by what it answers when it is asked for its metrics, again and again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

SILENCE = 30.0  # seconds without an answer: its process hangs
STANDSTILL = 300.0  # seconds in which requests ran and no step ended: its device hangs, or another rank

_STEPS = re.compile(r"^dflash_steps_total (\S+)$", re.MULTILINE)
_RUNNING = re.compile(r"^dflash_requests_running (\S+)$", re.MULTILINE)


class Pulse:
    """Felt from one thread and read from any. `now` is a clock in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._heard = self._moved = now()
        self._steps = ""

    def hear(self, metrics: str | None) -> None:
        """The answer in Prometheus' text format, or None if there was none."""
        if metrics is None:
            return
        self._heard = self._now()
        steps, running = _STEPS.search(metrics), _RUNNING.search(metrics)
        said = steps[1] if steps else ""
        if said != self._steps or not running or float(running[1]) == 0:
            self._steps, self._moved = said, self._heard

    @property
    def trouble(self) -> str:
        """What the engine has not done for too long; empty if it gets on."""
        now = self._now()
        if now - self._heard > SILENCE:
            return f"has not answered for {SILENCE:.0f} seconds"
        if now - self._moved > STANDSTILL:
            return f"has requests and has made no step for {STANDSTILL:.0f} seconds"
        return ""
