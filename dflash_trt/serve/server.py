"""The life of a serving process: warm up, serve, drain, end.

A signal (SIGTERM, SIGINT, SIGUSR1) begins the drain: new requests are refused, those that were accepted have `grace`
seconds. A second signal, or an engine that broke, ends at once; whoever waits for an answer is told why.

`mpirun` gives its ranks a third of a second after its own SIGTERM, but passes SIGUSR1 on: with several ranks that one
drains, and SIGTERM is the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import uvicorn

from dflash_trt.errors import Failure, UserError
from dflash_trt.runtime.peers import Peer, find_process
from dflash_trt.runtime.world import World
from dflash_trt.serve.loop import EngineLoop

_LOOK = 0.05  # seconds between looks at how things stand
_FLUSH = 2.0  # seconds for the last words of cut answers to reach their readers
_CLOSE = 1.0  # seconds for the call that runs to end
_CUT = "the server was stopped before the answer was complete — server — ask again"
_MAX_PATH = 107  # bytes in the name of a Unix socket


def bind(host: str | None, port: int, path: Path | None) -> list[socket.socket]:
    """Sockets on `host`:`port` (0: any free one), if there is a host, and on the Unix socket `path`, if any.

    They do not listen yet. Only this user may use the Unix socket. Raises UserError for addresses that cannot be had.
    """
    sockets = []
    if host is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        tcp = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle's delay on
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp.bind((host, port))
        except (OSError, OverflowError) as error:
            what = f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}"
            tcp.close()
            raise UserError(what, where="--host, --port", fix="choose another; --port 0 takes any free one") from None
        sockets.append(tcp)
    if path is not None:
        sockets.append(_bind_path(path))
    if not sockets:
        raise UserError("there is nothing to listen on", where="--no-http", fix="give --socket PATH")
    return sockets


def _bind_path(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_PATH:
        raise UserError(f"the name has more than {_MAX_PATH} bytes", where=path, fix="give --socket a shorter path")
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            if unix.connect_ex(os.fspath(path)) == 0:
                raise UserError("somebody serves on this socket", where=path, fix="give --socket another path")
            path.unlink()  # left behind by a process that was killed
        mask = os.umask(0o177)
        try:
            unix.bind(os.fspath(path))
        finally:
            os.umask(mask)
    except OSError as error:
        unix.close()
        fix = "give --socket a path in a folder that you may write to"
        raise UserError(f"cannot listen here: {error.strerror or error}", where=path, fix=fix) from None
    except UserError:
        unix.close()
        raise
    return unix


def find_parent(pid: int) -> Peer:
    """The process without which serving makes no sense. Raises UserError if there is none."""
    parent = find_process(pid)
    if parent is None:
        raise UserError(f"there is no process {pid}", where="--parent", fix="give the pid of a process that runs")
    return parent


def serve(
    app: Any,
    loop: EngineLoop,
    sockets: list[socket.socket],
    *,
    grace: float,
    ready: Callable[[], None],
    world: World,
    parent: Peer | None = None,
) -> None:
    """Serve `app` until a signal, or until `parent` is gone; `ready` is called once the engine is warm.

    Raises the engine's fault if that ended it, Failure if accepted requests were cut.
    """
    paths = [Path(name) for listening in sockets if isinstance(name := listening.getsockname(), str)]
    # Quiet: requests are the application's to log. No lifespan: what the app needs lives outside of it.
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False)
    try:
        asyncio.run(_Service(_Uvicorn(config), loop, grace, world, parent).run(sockets, ready))
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    ended = loop.close(_CLOSE)
    if loop.fault:
        raise loop.fault
    if not ended:
        raise Failure("the engine's last call did not end — server — it was left alone")


class _Service:
    """One run of `serve`, inside its event loop."""

    def __init__(self, server: uvicorn.Server, loop: EngineLoop, grace: float, world: World, parent: Peer | None):
        self._server, self._loop, self._grace = server, loop, grace
        self._world, self._parent = world, parent
        self._deadline = math.inf  # of the drain; monotonic seconds

    async def run(self, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            asyncio.get_running_loop().add_signal_handler(number, self._signal, number)
        self._world.before_end(lambda message: self._loop.fail(Failure(message)))
        serving = asyncio.create_task(self._server.serve(sockets))
        self._loop.start()
        await self._watch(ready)
        # All answers are with their senders now; slow readers get what is left of the grace period.
        left = _FLUSH if self._loop.fault else max(self._deadline - monotonic(), _FLUSH)
        self._server.config.timeout_graceful_shutdown = math.ceil(left)
        self._server.should_exit = True
        await serving

    async def _watch(self, ready: Callable[[], None]) -> None:
        """Until there is nothing left to serve."""
        announced = False
        while not self._loop.fault:
            if self._deadline < math.inf and self._loop.idle:
                return
            if monotonic() > self._deadline:
                self._loop.fail(Failure(_CUT))
            if self._parent and not self._parent.alive:
                self._loop.fail(Failure(f"process {self._parent.pid}, which this one served, is gone"))
            if self._loop.state == "ready" and not announced:
                ready()
                announced = True
            await asyncio.sleep(_LOOK)

    def _signal(self, number: int) -> None:
        again, abrupt = self._deadline < math.inf, self._world.size > 1 and number != signal.SIGUSR1
        if again or abrupt:
            self._loop.fail(Failure(self._world.lost() or _CUT))
            return
        self._loop.drain()
        self._deadline = monotonic() + self._grace
        counts = self._loop.counts()
        if running := counts.waiting + counts.running:
            message = f"finishing {running} requests, {self._grace:g} seconds at most; a second signal ends at once"
            print(message, file=sys.stderr, flush=True)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
