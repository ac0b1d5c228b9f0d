"""An engine directory appears whole or not at all, and replaces nothing but an older one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dflash_trt import durable
from dflash_trt.engine import manifest
from dflash_trt.errors import UserError


@contextlib.contextmanager
def staged(output: Path, *, force: bool = False) -> Iterator[Path]:
    """A new folder that becomes `output` when the block ends well (`durable.staged`).

    With `force` an existing engine directory is replaced, after success only. Raises UserError if `output` cannot be
    written there.
    """

    def check(path: Path) -> None:
        if not os.path.lexists(path):
            return
        if (path / manifest.NAME).is_file() and not path.is_symlink():
            if not force:
                raise UserError("engine directory exists", where=path, fix="pass --force to replace it")
        elif path.is_symlink() or not path.is_dir() or any(path.iterdir()):
            raise UserError("exists and is not an engine directory", where=path, fix="choose another --output")

    with durable.staged(output, check) as folder:
        yield folder
