"""Messages between ranks: MPI point to point, each with a label that says what it belongs to.

MPI's own collectives match by order alone. Ranks that part ways (one sums where the other gathers) then hang, or take
each other's bytes for what they are not. Here the receiver reads the label first and knows who is where.

Nothing blocks inside MPI: a rank that waits looks, yields and sleeps in turn. There may be more ranks than cores, and
the thread that watches the others (`peers.py`) must get its turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from dflash_trt.errors import Failure

LABEL = 128  # bytes of text before the payload; a multiple of every dtype's alignment
_NUMBERS = 32768  # as many tags MPI promises; a message's tag is its number among those from one rank to another
_YIELDS, _SLEEPS = 100, 2000  # looks before sleeping at all, and before sleeping long
_SHORT, _LONG = 50e-6, 1e-3  # seconds


class Parted(Failure):
    """The ranks are not at the same point any more, so no message between them can be trusted."""


class Mail:
    """Sends and receives for one rank. Not thread-safe: one caller at a time, as for a session."""

    def __init__(self, mpi: Any):
        """`mpi`: the module mpi4py.MPI."""
        self._comm, self._byte, self._status = mpi.COMM_WORLD, mpi.BYTE, mpi.Status()
        self._any_tag = mpi.ANY_TAG
        self.rank: int = self._comm.rank
        self._sent = [0] * self._comm.size  # messages so far, by the other's rank
        self._received = [0] * self._comm.size

    def exchange(self, what: str, payload: Any, *, to: Iterable[int], of: Iterable[int]) -> dict[int, memoryview]:
        """Send a contiguous buffer to some ranks and return what some ranks send, by rank.

        All of them must say the same `what`. Raises Parted naming the rank that is elsewhere.
        """
        to, waiting = list(to), list(of)
        label = what.encode()[:LABEL].ljust(LABEL, b"\0")
        content = [b"".join((label, payload)), self._byte]
        sends = []
        for rank in to:
            sends.append(self._comm.Isend(content, dest=rank, tag=self._sent[rank] % _NUMBERS))
            self._sent[rank] += 1
        received: dict[int, memoryview] = {}
        wait = _Wait()
        while waiting:
            come = {rank: found for rank in waiting if (found := self._receive(rank)) is not None}
            received |= {rank: self._open(rank, *found, label) for rank, found in come.items()}
            waiting = [rank for rank in waiting if rank not in come]
            wait.turn(bool(come))
        self._finish(sends)
        return received

    def _receive(self, rank: int) -> tuple[int, bytearray] | None:
        """Number and bytes of the next message of `rank`, if it has come."""
        found = self._comm.Improbe(source=rank, tag=self._any_tag, status=self._status)
        if found is None:
            return None
        number, message = self._status.Get_tag(), bytearray(self._status.Get_count(self._byte))
        self._finish([found.Irecv([message, self._byte])])
        return number, message

    def _open(self, rank: int, number: int, message: bytearray, label: bytes) -> memoryview:
        expected, found = self._received[rank] % _NUMBERS, bytes(message[:LABEL])
        if (number, found) != (expected, label):
            theirs, ours = (text.rstrip(b"\0").decode(errors="replace") for text in (found, label))
            raise Parted(
                f"rank {rank} is at {theirs!r} (message {number}), but rank {self.rank} is at {ours!r} "
                f"(message {expected}) — between ranks — convert again, and start all ranks alike"
            )
        self._received[rank] += 1
        return memoryview(message)[LABEL:]

    def _finish(self, requests: list[Any]) -> None:
        wait = _Wait()
        while requests := [request for request in requests if not request.Test()]:
            wait.turn(False)


class _Wait:
    """Yields, then short sleeps, then long ones; from the start again after something came."""

    def __init__(self) -> None:
        self._turns = 0

    def turn(self, progress: bool) -> None:
        if progress:
            self._turns = 0
            return
        self._turns += 1
        if self._turns <= _YIELDS:
            os.sched_yield()
        else:
            time.sleep(_SHORT if self._turns <= _SLEEPS else _LONG)
