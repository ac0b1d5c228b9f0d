"""A directory that takes minutes to write: built in a hidden folder beside its place, and continued after a kill.

`.NAME.quantizing` holds the finished files and a state file: the fingerprint of the work, and what is known of each
finished file. The folder takes the name of the output when all is done.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.declared import NESTED_FILE
from dflash_trt.durable import sync, uninterrupted
from dflash_trt.errors import DflashError, Failure, UserError

STATE = ".quantizing.json"
MARK = NESTED_FILE  # a folder with this file is a quantized checkpoint, which --force may replace
AGAIN = "run the same command again to go on"


def work_folder(output: Path) -> Path:
    """Where the work on `output` lies until it is complete; it becomes `output`."""
    return output.with_name(f".{output.name}.quantizing")


class Interrupted(DflashError):
    """Ctrl-C; the finished files stay."""

    exit_code = 128 + signal.SIGINT


class Work:
    """The folder and what an earlier run finished in it."""

    def __init__(self, folder: Path, fingerprint: str):
        self.folder = folder
        self._fingerprint = fingerprint
        self._done: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            state = json.loads((folder / STATE).read_text())
            if state.get("fingerprint") == fingerprint:
                self._done = {name: facts for name, facts in state["done"].items() if (folder / name).is_file()}
        for path in folder.iterdir():
            if path.name not in self._done:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._save()

    def finished(self, name: str) -> Any:
        """What `finish` was told about this file; None if it is not there."""
        return self._done.get(name)

    def finish(self, name: str, facts: Any) -> None:
        """The file is complete and on the disk."""
        sync(self.folder)
        self._done[name] = facts
        self._save()

    def _save(self) -> None:
        partial = self.folder / f"{STATE}.partial"
        partial.write_text(json.dumps({"fingerprint": self._fingerprint, "done": self._done}))
        sync(partial)
        partial.replace(self.folder / STATE)
        sync(self.folder)


@contextlib.contextmanager
def resumable(output: Path, fingerprint: str, *, source: Path, force: bool = False) -> Iterator[Work]:
    """Yields the folder that becomes `output` when the block ends well.

    A kill, Ctrl-C and a full disk leave the folder to the next run, if that has the same fingerprint; what another run
    would not mend removes it. With `force` a quantized checkpoint in the place of `output` is replaced, after success
    only.
    """
    output = output.absolute()
    folder, former = work_folder(output), output.with_name(f".{output.name}.former")
    if not output.parent.is_dir():
        raise UserError("no such folder", where=output.parent, fix=f"create it: mkdir -p {output.parent}")
    check_place(output, source, force)
    with _reported(folder), _locked(folder):
        _recover(output, former)
        check_place(output, source, force)
        try:
            yield Work(folder, fingerprint)
        except DflashError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        _check_still_free(output, source, force, folder)
        (folder / STATE).unlink()
        for path in folder.rglob("*"):
            sync(path)
        try:
            with uninterrupted():
                _put_in_place(folder, output, former)
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted — {output} is complete") from None


def check_place(output: Path, source: Path, force: bool) -> None:
    """May a checkpoint made of `source` be put at `output`?"""
    place, original = output.resolve(), source.resolve()
    if place == original or place in original.parents or original in place.parents:
        raise UserError("the output would lie in its own source", where=output, fix="choose another --output")
    if not os.path.lexists(output):
        return
    if (output / MARK).is_file() and not output.is_symlink():
        if not force:
            raise UserError("a quantized checkpoint exists", where=output, fix="pass --force to replace it")
    elif output.is_symlink() or not output.is_dir() or any(output.iterdir()):
        raise UserError("exists and is not a quantized checkpoint", where=output, fix="choose another --output")


def _check_still_free(output: Path, source: Path, force: bool, folder: Path) -> None:
    """Somebody else may have been faster: what took long to make stays."""
    try:
        check_place(output, source, force)
    except UserError:
        what = f"appeared while its replacement was written, which lies finished in {folder.name}"
        fix = "the same command with --force finishes, if that is a quantized checkpoint; else move it away first"
        raise UserError(what, where=output, fix=fix) from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError("another process is writing there", where=folder, fix="wait for it") from None
    try:
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            folder.rmdir()  # if nothing was begun


@contextlib.contextmanager
def _reported(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted — what is finished lies in {folder} — {AGAIN}") from None
    except OSError as error:
        what = f"{error.strerror or error} — {error.filename or folder}"
        room = "make room and " if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "put that right and "
        raise Failure(f"{what} — what is finished lies in {folder}; {room}{AGAIN}") from error


def _recover(output: Path, former: Path) -> None:
    """Undo a replacement that was killed between its two renames, or finish one that was killed after them."""
    if former.exists():
        if output.exists():
            shutil.rmtree(former)
        else:
            former.rename(output)


def _put_in_place(folder: Path, output: Path, former: Path) -> None:
    if output.exists():
        output.rename(former)
    try:
        folder.rename(output)
    except BaseException:
        if former.exists():
            former.rename(output)
        raise
    sync(output.parent)
    shutil.rmtree(former, ignore_errors=True)
