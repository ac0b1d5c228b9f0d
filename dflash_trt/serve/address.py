"""Where a server listens: TCP, a Unix socket, or both."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from dflash_trt.errors import UserError
from dflash_trt.serve.paths import printable

_BACKLOG = 2048  # connections; they wait while the engine is loaded
_LONGEST = 107  # bytes in the name of a Unix socket, by the kernel


def bind(host: str | None, port: int, path: Path | None) -> list[socket.socket]:
    """Sockets on `host`:`port` (0: any free one), if there is a host, and on the Unix socket `path`, if any.

    They listen, so that nobody else can; whoever connects waits until the server is ready. Only this user may use the
    Unix socket. Raises UserError for addresses that cannot be had.
    """
    with contextlib.ExitStack() as opened:
        sockets = []
        if host is not None:
            sockets.append(opened.enter_context(_bind_tcp(host, port)))
        if path is not None:
            sockets.append(opened.enter_context(_bind_unix(path)))
        if not sockets:
            raise UserError("there is nothing to listen on", where="--no-http", fix="give --socket PATH")
        opened.pop_all()
    return sockets


def check_path(path: Path) -> None:
    """Raise UserError for what cannot become a Unix socket, whoever tries."""
    if len(os.fsencode(path)) > _LONGEST:
        what = f"the name has more than {_LONGEST} bytes"
        raise UserError(what, where=printable(path), fix="give --socket a shorter path")
    if path.is_dir():
        raise UserError("this is a folder", where=printable(path), fix="give --socket the path of a file in it")


class UnixFiles:
    """The files of Unix sockets; removes those that are still the ones it was told of, and not a successor's."""

    def __init__(self, sockets: Sequence[socket.socket]):
        names = [name for one in sockets if isinstance(name := one.getsockname(), str)]
        self._files = [(Path(name), _identity(Path(name))) for name in names]

    def remove(self) -> None:
        for path, identity in self._files:
            with contextlib.suppress(FileNotFoundError):
                if _identity(path) == identity:
                    path.unlink()


def _bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tcp = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle's delay on
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        tcp.bind((host, port))
        tcp.listen(_BACKLOG)
    except (OSError, OverflowError, TypeError, UnicodeError) as error:  # the last two: no name of any host
        tcp.close()
        what = f"cannot listen on {printable(host)} port {port}: {getattr(error, 'strerror', None) or error}"
        raise UserError(what, where="--host, --port", fix="choose another; --port 0 takes any free one") from None
    return tcp


def _bind_unix(path: Path) -> socket.socket:
    check_path(path)
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
        unix.listen(_BACKLOG)
    except OSError as error:
        unix.close()
        fix = "give --socket a path in a folder that you may write to"
        raise UserError(f"cannot listen here: {error.strerror or error}", where=path, fix=fix) from None
    except UserError:
        unix.close()
        raise
    return unix


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_ctime_ns  # inodes are given again
