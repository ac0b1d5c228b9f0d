"""An export appears whole or not at all, and replaces nothing but an older one."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_trt import durable
from dflash_trt.errors import Failure, UserError

REPORT = "export.json"  # tells that a directory is an export
NETWORK = ("config.json", "rank*.safetensors")
CLASSES = ("target.py", "draft.py", "__pycache__")  # `trtllm-build` leaves bytecode where it loads a class
OWN: dict[str, tuple[str, ...]] = {  # name → what may lie in it
    REPORT: (),
    "build.sh": (),
    "README.md": (),
    "target": NETWORK,
    "draft": NETWORK,
    "model_class": CLASSES,
}


@contextlib.contextmanager
def staged(output: Path, *, force: bool = False) -> Iterator[Path]:
    """A new folder that becomes `output` when the block ends well (`durable.staged`).

    With `force` an older export is replaced, after success only. Raises UserError if `output` cannot be written there.
    """

    def check(path: Path) -> None:
        if not os.path.lexists(path):
            return
        if path.is_symlink() or not path.is_dir():
            raise UserError("exists and is not an export of ours", where=path, fix="choose another --output")
        names = {entry.name for entry in path.iterdir()}
        if names and REPORT not in names:
            raise UserError("exists and is not an export of ours", where=path, fix="choose another --output")
        if names and not force:
            raise UserError("export exists", where=path, fix="pass --force to replace it")
        if strangers := _strangers(path):
            what = "the export holds what `export` did not write, and replacing it would delete that"
            raise UserError(what, where=strangers[0], fix="move it away, or choose another --output")

    with durable.staged(output, check) as folder:
        yield folder


def _strangers(export: Path) -> list[Path]:
    """What lies in an export and was not written by one: an engine beside its checkpoint, say."""
    found = []
    for entry in sorted(export.iterdir()):
        if entry.name not in OWN or entry.is_symlink():
            found.append(entry)
        elif entry.is_dir():
            inner = sorted(entry.iterdir())
            found += [one for one in inner if not any(fnmatch.fnmatch(one.name, own) for own in OWN[entry.name])]
    return found


def check_space(output: Path, needed: int) -> None:
    """Raises Failure if the disk is known to be too small."""
    free = shutil.disk_usage(output.absolute().parent).free
    if free < needed:
        what = f"{needed:,} bytes are needed, {free:,} are free"
        raise Failure(f"{what} — {output.absolute().parent} — free some space, or choose another --output")
