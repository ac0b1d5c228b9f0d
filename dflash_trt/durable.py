"""Files that are whole or not there: what everything that writes directories needs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_trt.errors import Failure, UserError


def sync(path: Path) -> None:
    """Have the disk hold a file or folder before its name is relied on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put Ctrl-C off until the few renames inside are done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def reported(place: Path) -> Iterator[None]:
    """Turn the errors of the file system, which may lack a file name, into a Failure about `place`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "nothing was changed" + ("; free some space and run it again" if full else "")
        raise Failure(f"{error.strerror or error} — {error.filename or place} — {fix}") from error


def check_parent(output: Path) -> None:
    """Raises UserError unless the folder exists that `output` shall be in."""
    if not output.parent.is_dir():
        raise UserError("no such folder", where=output.parent, fix=f"create it: mkdir -p {output.parent}")


@contextlib.contextmanager
def staged(output: Path, check: Callable[[Path], None]) -> Iterator[Path]:
    """A new empty folder that becomes `output` when the block ends well, and vanishes when it does not.

    `check` raises UserError if `output` may not be made, or may not replace what is there; it is asked before the block
    and again after it, for somebody else may have been faster. Whatever ends the block (an exception, Ctrl-C, a full
    disk), `output` is as it was. What a killed process left behind is put right first. Raises Failure for errors of the
    disk.
    """
    output = output.absolute()
    _tidy(output)
    check_parent(output)
    check(output)
    staging = output.with_name(f".{output.name}.staging-{secrets.token_hex(4)}")
    try:
        with reported(output):
            staging.mkdir()
            lock = os.open(staging, os.O_RDONLY)  # held while this process lives: its staging folder is not stale
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield staging
                _sync(staging)
                check_parent(output)
                check(output)
                with uninterrupted():
                    _put_in_place(staging, output)
            finally:
                os.close(lock)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _tidy(output: Path) -> None:
    """Remove staging folders of dead processes; undo a replacement that was killed between its two renames."""
    for stale in output.parent.glob(f".{output.name}.staging-*"):
        with contextlib.suppress(OSError):
            handle = os.open(stale, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale)
            finally:
                os.close(handle)
    for former in output.parent.glob(f".{output.name}.former-*"):
        if output.exists():
            shutil.rmtree(former, ignore_errors=True)
        else:
            former.rename(output)


def _put_in_place(staging: Path, output: Path) -> None:
    if not output.exists():
        staging.rename(output)
    else:
        former = output.with_name(f".{output.name}.former-{secrets.token_hex(4)}")
        output.rename(former)
        try:
            staging.rename(output)
        except BaseException:
            former.rename(output)
            raise
        shutil.rmtree(former, ignore_errors=True)
    sync(output.parent)


def _sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        if not path.is_symlink():  # links lead to checkpoints, which are not ours
            sync(path)
    sync(directory)
