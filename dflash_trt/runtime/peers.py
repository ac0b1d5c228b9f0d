"""Notices that another rank's process is gone, whatever this one is doing.

A rank may be deep in a step, or blocked in a GPU's queue behind a collective that will never complete. So a thread
looks once a second, touches neither MPI nor the GPU, and ends the process from outside.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.errors import DflashError

_PERIOD = 1.0  # seconds


@dataclass(frozen=True)
class Peer:
    """One rank's process. A pid may be given again; pid and start time together are one process."""

    rank: int
    pid: int
    started: str  # clock ticks since boot
    host: tuple[str, str]  # machine and pid namespace: within one, pids mean the same

    @property
    def alive(self) -> bool:
        """Only meaningful on the peer's host. A zombie is not alive."""
        stat = _stat(self.pid)
        return stat is not None and stat[0] not in "ZX" and stat[19] == self.started


def this_process(rank: int) -> Peer:
    peer = find_process(os.getpid(), rank)
    assert peer is not None
    return peer


def find_process(pid: int, rank: int = 0) -> Peer | None:
    """The process that has this pid now; None if there is none."""
    stat = _stat(pid)
    if stat is None:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Peer(rank, pid, stat[19], (boot, str(Path("/proc/self/ns/pid").readlink())))


class Watch:
    """The thread, for as long as it is not stopped."""

    def __init__(self, own: Peer, peers: Sequence[Peer]):
        self._own = own
        self._near = [peer for peer in peers if peer.host == own.host and peer != own]
        self._launcher = os.getppid()
        self._stopped = threading.Event()
        self.before_end: Callable[[str], None] = lambda message: None  # last words, said from the thread
        threading.Thread(target=self._run, name="watch ranks", daemon=True).start()

    def stop(self) -> None:
        """From now on others may go."""
        self._stopped.set()

    def lost(self) -> list[Peer]:
        """Those that are gone at this moment."""
        return [peer for peer in self._near if not peer.alive]

    def _run(self) -> None:
        while not self._stopped.wait(_PERIOD):
            gone = self.lost()
            if os.getppid() != self._launcher:
                self._end(f"the launcher of rank {self._own.rank} (pid {self._launcher}) ended", wait=0)
            elif gone:
                # One message is enough: the first of those left writes it, and stays until the others have seen why.
                first = all(peer.rank > self._own.rank for peer in self._near if peer not in gone)
                self._end(describe(gone) if first else "", wait=1.5 * _PERIOD)

    def _end(self, message: str, wait: float) -> None:
        if self._stopped.is_set():
            return
        with contextlib.suppress(Exception):  # nothing may keep this process alive
            self.before_end(message or "another rank ended unexpectedly")
        if message:
            with contextlib.suppress(OSError):  # whoever read it may be gone, too
                print(f"error: {message}", file=sys.stderr, flush=True)
        if self._stopped.wait(wait):
            return
        os._exit(DflashError.exit_code)


def describe(gone: Sequence[Peer]) -> str:
    """What to say of peers that are gone."""
    names = ", ".join(f"rank {peer.rank} (pid {peer.pid})" for peer in gone)
    return f"{names} ended unexpectedly, so all ranks end"


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name, from the state on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
