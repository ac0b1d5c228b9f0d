"""An output directory appears whole or not at all, and whatever was there before is never lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dflash_trt.durable import uninterrupted
from dflash_trt.engine import manifest
from dflash_trt.engine.directory import staged
from dflash_trt.errors import Failure, UserError


def make(output: Path, content: str, *, force: bool = False) -> None:
    with staged(output, force=force) as directory:
        (directory / manifest.NAME).write_text(content)
        (directory / "weights").mkdir()
        (directory / "weights" / "link").symlink_to("/nowhere")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_nothing_is_visible_before_the_end_and_everything_after(tmp_path):
    with staged(tmp_path / "engine") as directory:
        (directory / "file").write_text("x")
        assert not (tmp_path / "engine").exists()
    assert names(tmp_path) == ["engine"] and (tmp_path / "engine" / "file").read_text() == "x"


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, ValueError, UserError("no")])
def test_whatever_ends_the_work_leaves_nothing(tmp_path, ending):
    with pytest.raises(BaseException), staged(tmp_path / "engine") as directory:  # noqa: B017
        (directory / "file").write_text("x")
        raise ending
    assert names(tmp_path) == []


@pytest.mark.parametrize("ending", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_replacement_that_fails_leaves_the_old_directory(tmp_path, ending):
    make(tmp_path / "engine", "old")
    with pytest.raises((KeyboardInterrupt, Failure)), staged(tmp_path / "engine", force=True):
        raise ending
    assert names(tmp_path) == ["engine"] and (tmp_path / "engine" / manifest.NAME).read_text() == "old"


def test_force_replaces_the_whole_directory(tmp_path):
    make(tmp_path / "engine", "old")
    (tmp_path / "engine" / "stale.engine").write_text("x")
    make(tmp_path / "engine", "new", force=True)
    assert names(tmp_path) == ["engine"] and names(tmp_path / "engine") == [manifest.NAME, "weights"]
    assert (tmp_path / "engine" / manifest.NAME).read_text() == "new"


def test_without_force_an_engine_directory_is_kept(tmp_path):
    make(tmp_path / "engine", "old")
    with pytest.raises(UserError, match="--force"):
        make(tmp_path / "engine", "new")
    assert (tmp_path / "engine" / manifest.NAME).read_text() == "old"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_an_engine_directory_is_never_replaced(tmp_path, kind, force):
    output = tmp_path / "thesis"
    if kind == "folder":
        output.mkdir()
        (output / "chapter1").write_text("x")
    elif kind == "file":
        output.write_text("x")
    else:
        output.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not an engine directory"):
        make(output, "new", force=force)
    assert names(tmp_path) == ["thesis"]


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "engine").mkdir()
    make(tmp_path / "engine", "new")
    assert names(tmp_path) == ["engine"]


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(UserError, match="mkdir -p"):
        make(tmp_path / "absent" / "engine", "new")


def test_the_staging_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(tmp_path):
    if (child := os.fork()) == 0:
        with staged(tmp_path / "engine") as directory:
            (directory / "file").write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [name.startswith(".engine.staging-") for name in names(tmp_path)] == [True]
    with pytest.raises(UserError, match="--force"), staged(tmp_path / "engine") as mine:
        assert names(tmp_path) == [mine.name]
        make(tmp_path / "engine", "of one who was faster")
        assert mine.is_dir()
    assert names(tmp_path) == ["engine"]


def test_a_replacement_killed_between_its_renames_is_undone(tmp_path):
    make(tmp_path / "engine", "old")
    (tmp_path / "engine").rename(tmp_path / ".engine.former-0123")
    with pytest.raises(UserError, match="--force"):
        make(tmp_path / "engine", "new")
    assert names(tmp_path) == ["engine"] and (tmp_path / "engine" / manifest.NAME).read_text() == "old"


def test_ctrl_c_waits_for_the_renames():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
    assert done
