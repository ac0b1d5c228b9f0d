"""A directory that appears whole or not at all: staged beside its place, then renamed into it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_trt.durable import sync, uninterrupted
from dflash_trt.engine import manifest
from dflash_trt.errors import Failure, UserError


@contextlib.contextmanager
def staged(output: Path, *, force: bool = False) -> Iterator[Path]:
    """A new empty folder that becomes `output` when the block ends well, and vanishes when it does not.

    With `force` an existing engine directory is replaced, after success only. Whatever ends the block (an exception,
    Ctrl-C, a full disk), `output` is as it was. What a killed process left behind is put right first.
    Raises UserError if `output` cannot be written there, Failure for errors of the disk.
    """
    output = output.absolute()
    _tidy(output)
    _check(output, force)
    staging = output.with_name(f".{output.name}.staging-{secrets.token_hex(4)}")
    try:
        with reported(output):
            staging.mkdir()
            lock = os.open(staging, os.O_RDONLY)  # held while this process lives: its staging folder is not stale
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield staging
                _sync(staging)
                _check(output, force)  # somebody else may have been faster
                with uninterrupted():
                    _put_in_place(staging, output)
            finally:
                os.close(lock)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def reported(place: Path) -> Iterator[None]:
    """Turn the errors of the file system, which may lack a file name, into a Failure about `place`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "nothing was changed" + ("; free some space and run it again" if full else "")
        raise Failure(f"{error.strerror or error} — {error.filename or place} — {fix}") from error


def _check(output: Path, force: bool) -> None:
    if not output.parent.is_dir():
        raise UserError("no such folder", where=output.parent, fix=f"create it: mkdir -p {output.parent}")
    if not os.path.lexists(output):
        return
    if (output / manifest.NAME).is_file() and not output.is_symlink():
        if not force:
            raise UserError("engine directory exists", where=output, fix="pass --force to replace it")
    elif output.is_symlink() or not output.is_dir() or any(output.iterdir()):
        raise UserError("exists and is not an engine directory", where=output, fix="choose another --output")


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
