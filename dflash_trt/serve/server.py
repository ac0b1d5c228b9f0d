"""The life of a serving process: warm up, serve, drain, end.

A signal (SIGTERM, SIGINT, SIGUSR1) begins the drain: new requests are refused, those that were accepted have `grace`
seconds. A second signal, or an engine that broke, ends at once; whoever waits for an answer is told why.

`mpirun` gives its ranks a third of a second after its own SIGTERM, but passes SIGUSR1 on: with several ranks that one
drains, and SIGTERM is the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from time import monotonic
from typing import Any

import uvicorn

from dflash_trt.errors import Failure, UserError
from dflash_trt.runtime.peers import Peer, find_process
from dflash_trt.runtime.world import World
from dflash_trt.serve.address import UnixFiles
from dflash_trt.serve.loop import STOPPED, EngineLoop, Stopped
from dflash_trt.serve.openai.protocol import Protocol

_log = logging.getLogger("dflash_trt.serve")

_LOOK = 0.05  # seconds between looks at how things stand
_FLUSH = 2  # seconds for the last words of cut answers to reach their readers
_AGAIN = 10.0  # seconds before the same trouble is logged again
_CLOSE = 1.0  # seconds for the call that runs to end


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
    headers: Mapping[str, str] = {},
) -> None:
    """Serve `app` until a signal, or until `parent` is gone; `ready` is called once the engine is warm.

    Every answer gets `headers` besides its own.

    Raises the engine's fault if that ended it, Stopped if accepted requests were cut.
    """
    files = UnixFiles(sockets)
    # Quiet: requests are the application's to log. No lifespan: what the app needs lives outside of it.
    config = uvicorn.Config(
        app,
        http=Protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        headers=list(headers.items()),
    )
    try:
        asyncio.run(_Service(_Uvicorn(config), loop, app.state.exchanges, grace, world, parent).run(sockets, ready))
    finally:
        files.remove()
        ended = loop.close(_CLOSE)
    if loop.fault:
        raise loop.fault
    if not ended:
        raise Failure("the engine's last call did not end — server — it was left alone")


class _Service:
    """One run of `serve`, inside its event loop."""

    def __init__(
        self,
        server: uvicorn.Server,
        loop: EngineLoop,
        exchanges: Collection[object],
        grace: float,
        world: World,
        parent: Peer | None,
    ):
        self._server, self._loop, self._exchanges, self._grace = server, loop, exchanges, grace
        self._world, self._parent = world, parent
        self._draining = False
        self._deadline = math.inf  # of the drain; monotonic seconds
        self._reported: dict[str, float] = {}  # when what was logged last

    async def run(self, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            asyncio.get_running_loop().add_signal_handler(number, self._signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # one that came while the engine was loaded
        self._world.before_end(lambda message: self._loop.fail(Failure(message)))
        asyncio.get_running_loop().set_exception_handler(self._report)
        serving = asyncio.create_task(self._server.serve(sockets))
        self._loop.start()
        await self._watch(ready, serving)
        self._server.config.timeout_graceful_shutdown = _FLUSH
        self._server.should_exit = True
        await serving

    async def _watch(self, ready: Callable[[], None], serving: asyncio.Task[None]) -> None:
        """Until there is nothing left to serve, or nobody who serves."""
        announced = False
        while not (self._loop.fault or serving.done()):
            if self._draining and self._loop.idle and not self._exchanges:
                return
            if monotonic() > self._deadline:
                self._loop.fail(Stopped(STOPPED))
            if self._parent and not self._parent.alive:
                self._loop.fail(Failure(f"process {self._parent.pid}, which this one served, is gone"))
            if self._loop.state == "ready" and self._server.started and not announced:
                ready()
                announced = True
            await asyncio.sleep(_LOOK)

    def _signal(self, number: int) -> None:
        abrupt = self._world.size > 1 and number != signal.SIGUSR1
        if self._draining or abrupt:
            # Ctrl-C reaches all ranks at once: then those that are gone are no reason.
            lost = "" if number == signal.SIGINT else self._world.lost()
            self._loop.fail(Failure(lost) if lost else Stopped(STOPPED))
            return
        self._loop.drain()
        self._draining, self._deadline = True, monotonic() + self._grace
        if running := len(self._exchanges):
            message = f"finishing {running} requests, {self._grace:g} seconds at most; a second signal ends at once"
            print(message, file=sys.stderr, flush=True)

    def _report(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what went wrong outside of any request; not at every try, of which a lack of files makes thousands."""
        error = context.get("exception")
        text = f"{context['message']}: {error}" if error else context["message"]
        if monotonic() - self._reported.get(text, -math.inf) > _AGAIN:
            self._reported[text] = monotonic()
            _log.error("%s", text)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its own signal handling."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
