"""Write a rendered recipe: a new folder appears whole or not at all, an older one of ours is brought up to date.

What others put beside the files (NVIDIA's model.py, logs) stays where it is.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from dflash_trt.durable import check_parent, reported, sync, uninterrupted
from dflash_trt.errors import UserError
from dflash_trt.trtllm.launch import MARK


def write_folder(files: Mapping[str, str], output: Path, *, force: bool = False) -> None:
    """`files`: relative path → text. `force` overwrites the files of an earlier run.

    Raises UserError if `output` cannot be written there, Failure for errors of the disk; nothing was changed then.
    """
    output = output.absolute()
    _check(output, force)
    for name in files:  # before the first of them is replaced
        for path in (output / name, *(output / parent for parent in Path(name).parents)):
            if path.exists() and path.is_dir() == (path == output / name):
                raise UserError("is in the way", where=path, fix="remove it, or choose another --output")
    staging = output.with_name(f".{output.name}.staging-{secrets.token_hex(4)}")
    try:
        with reported(output):
            fill_folder(files, staging)
            with uninterrupted():
                _put_in_place(files, staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def fill_folder(files: Mapping[str, str], folder: Path) -> None:
    """Make the folder and write the files; scripts can be run."""
    folder.mkdir()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(0o755)
        sync(path)


def _put_in_place(files: Mapping[str, str], staging: Path, output: Path) -> None:
    if not output.exists() or not any(output.iterdir()):
        staging.rename(output)
    else:
        for name in files:
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(output / name)
    sync(output.parent)


def _check(output: Path, force: bool) -> None:
    check_parent(output)
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UserError("is in the way", where=output, fix="choose another --output")
    if not output.exists() or not any(output.iterdir()):
        return
    settings = output / "settings.sh"
    if not settings.is_file() or MARK not in settings.read_text(encoding="utf-8", errors="replace"):
        raise UserError("exists and is not a rendered recipe", where=output, fix="choose another --output")
    if not force:
        raise UserError("a recipe is rendered there already", where=output, fix="pass --force to overwrite its files")
