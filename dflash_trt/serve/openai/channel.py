"""From the thread that makes text to the coroutine that sends it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial

from dflash_trt.errors import DflashError
from dflash_trt.runtime.request import Output
from dflash_trt.serve.loop import Sink


class Channel:
    """Takes outputs at any rate and never waits; whoever reads slowly gets more of them at once.

    What it holds is bounded by the longest answers the engine gives. To be made and read in one event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._filled = asyncio.Event()
        self._lock = threading.Lock()
        self._items: list[tuple[int, Output | DflashError]] = []

    def sink(self, index: int) -> Sink:
        """What puts things in, marked with `index`. From any thread."""
        return partial(self._put, index)

    def _put(self, index: int, item: Output | DflashError) -> None:
        with self._lock:
            self._items.append((index, item))
            first = len(self._items) == 1
        if first:  # one call of the loop, however many items follow before it gets there
            with suppress(RuntimeError):  # the loop has ended, and all readers with it
                self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self) -> list[tuple[int, Output | DflashError]]:
        """All that came since the last call; waits for something."""
        while True:
            await self._filled.wait()
            with self._lock:
                self._filled.clear()
                items, self._items = self._items, []
            if items:
                return items
