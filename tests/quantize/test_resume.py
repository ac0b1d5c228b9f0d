"""Writing a checkpoint survives kills, Ctrl-C and full disks, and never costs what was there before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.errors import Failure, UserError
from dflash_trt.quantize import PRESETS, Amax, make_plan, write_checkpoint
from dflash_trt.quantize.resume import Interrupted
from tests.tiny import make_draft

SHARD = 12_000  # bytes: a tiny drafter becomes several files
WEIGHT_ONLY = PRESETS["nvfp4-weight-only"]


@pytest.fixture
def draft(tmp_path) -> Path:
    return make_draft(tmp_path / "draft")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from dflash_trt.quantize import PRESETS, make_plan, write_checkpoint
steps = int(sys.argv[3])
def step(what, fraction):
    global steps
    steps -= 1
    if steps == 0:
        os.kill(os.getpid(), signal.SIGKILL)
write_checkpoint(make_plan(Path(sys.argv[1]), PRESETS["nvfp4-weight-only"]), Path(sys.argv[2]), None,
                 shard_bytes=int(sys.argv[4]), progress=step)
"""


@pytest.mark.parametrize("steps", [2, 12, 25])
def test_a_killed_process_is_resumed_where_it_was(draft, tmp_path, steps):
    plan = make_plan(draft, WEIGHT_ONLY)
    write_checkpoint(plan, tmp_path / "reference", None, shard_bytes=SHARD)
    command = [sys.executable, "-c", KILLED, str(draft), str(tmp_path / "out"), str(steps), str(SHARD)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    folder = tmp_path / ".out.quantizing"
    assert not (tmp_path / "out").exists() and list(folder.glob("*.partial"))
    finished = {file.name: file.stat().st_mtime_ns for file in folder.glob("*.safetensors")}
    done = write_checkpoint(plan, tmp_path / "out", None, shard_bytes=SHARD)
    assert done.resumed == len(finished) and (steps == 2 or finished)
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == time for name, time in finished.items())
    assert contents(tmp_path / "out") == contents(tmp_path / "reference")
    assert [layer.module for layer in done.layers] == [linear.module for linear in plan.linears]
    assert names(tmp_path) == ["draft", "out", "reference"]


def interrupt_after(steps: int):
    count = iter(range(steps))

    def progress(what: str, fraction: float) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt

    return progress


def test_ctrl_c_says_that_the_same_command_goes_on(draft, tmp_path):
    plan = make_plan(draft, WEIGHT_ONLY)
    with pytest.raises(Interrupted, match=r"\.out\.quantizing.*same command again") as caught:
        write_checkpoint(plan, tmp_path / "out", None, shard_bytes=SHARD, progress=interrupt_after(15))
    assert caught.value.exit_code == 130 and not (tmp_path / "out").exists()
    assert write_checkpoint(plan, tmp_path / "out", None, shard_bytes=SHARD).resumed > 0


@pytest.mark.parametrize("change", ["preset", "amax", "source", "shards"])
def test_other_work_does_not_go_on_where_this_one_was_left(draft, tmp_path, change):
    plan, amax, shard = make_plan(draft, PRESETS["nvfp4"]), {}, SHARD
    with pytest.raises(Interrupted):
        write_checkpoint(plan, tmp_path / "out", amax, input_amax=1.0, shard_bytes=SHARD, progress=interrupt_after(15))
    if change == "preset":
        plan = make_plan(draft, PRESETS["nvfp4-mlp"])
    elif change == "amax":
        amax = {"layers.0.mlp.down_proj": Amax(3.0, 1.0)}
    elif change == "source":
        os.utime(draft / "model.safetensors", (1, 1))
    else:
        shard *= 2
    assert write_checkpoint(plan, tmp_path / "out", amax, input_amax=1.0, shard_bytes=shard).resumed == 0


def test_a_damaged_state_file_means_from_the_start(draft, tmp_path):
    plan = make_plan(draft, WEIGHT_ONLY)
    for damage in ("", "[]", '{"fingerprint": 1}', "{"):
        with pytest.raises(Interrupted):
            write_checkpoint(plan, tmp_path / "out", None, shard_bytes=SHARD, progress=interrupt_after(15))
        (tmp_path / ".out.quantizing" / ".quantizing.json").write_text(damage)
    assert write_checkpoint(plan, tmp_path / "out", None, shard_bytes=SHARD).resumed == 0


def test_a_full_disk_is_told_and_resumed(draft, tmp_path, monkeypatch):
    plan, real = make_plan(draft, WEIGHT_ONLY), os.pwrite
    calls = iter(range(40))

    def full(handle, data, at):
        if next(calls, None) is None:
            raise OSError(28, "No space left on device")
        return real(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Failure, match=r"No space left.*make room and run the same command"):
        write_checkpoint(plan, tmp_path / "out", None, shard_bytes=SHARD)
    monkeypatch.undo()
    assert write_checkpoint(plan, tmp_path / "out", None, shard_bytes=SHARD).resumed > 0


def test_what_is_no_matter_of_room_is_not_told_as_one(draft, tmp_path):
    (tmp_path / ".out.quantizing").write_text("a file in the way")
    with pytest.raises(Failure, match=r"File exists — .*put that right and run the same command"):
        write_checkpoint(make_plan(draft, WEIGHT_ONLY), tmp_path / "out", None)


def test_a_second_process_is_told_to_wait(draft, tmp_path):
    plan = make_plan(draft, WEIGHT_ONLY)

    def meanwhile(what: str, fraction: float) -> None:
        with pytest.raises(UserError, match="another process is writing"):
            write_checkpoint(plan, tmp_path / "out", None)

    write_checkpoint(plan, tmp_path / "out", None, progress=meanwhile)


def test_an_existing_checkpoint_is_kept_without_force_and_replaced_at_the_end_with_it(draft, tmp_path):
    plan, out = make_plan(draft, WEIGHT_ONLY), tmp_path / "out"
    write_checkpoint(plan, out, None)
    (out / "note").write_text("mine")
    old = contents(out)
    with pytest.raises(UserError, match="--force"):
        write_checkpoint(plan, out, None)
    with pytest.raises(Interrupted):
        write_checkpoint(plan, out, None, force=True, progress=interrupt_after(3))
    assert contents(out) == old
    write_checkpoint(plan, out, None, force=True)
    assert not (out / "note").exists() and names(tmp_path) == ["draft", "out"]


@pytest.mark.parametrize("mark", ["hf_quant_config.json", "thesis"])
def test_what_appears_meanwhile_is_kept_and_so_is_the_work(draft, tmp_path, mark):
    plan, out = make_plan(draft, WEIGHT_ONLY), tmp_path / "out"

    def somebody(what: str, fraction: float) -> None:
        out.mkdir(exist_ok=True)
        (out / mark).write_text("theirs")

    with pytest.raises(UserError, match=r"appeared while .*\.out\.quantizing.*same command with --force finishes"):
        write_checkpoint(plan, out, None, shard_bytes=SHARD, progress=somebody)
    assert contents(out) == {mark: b"theirs"}
    shards = len(list((tmp_path / ".out.quantizing").glob("*.safetensors")))
    if mark == "thesis":
        out.rename(tmp_path / "elsewhere")
    assert write_checkpoint(plan, out, None, shard_bytes=SHARD, force=True).resumed == shards > 3
    assert not (tmp_path / ".out.quantizing").exists() and not (out / "thesis").exists()


def test_a_replacement_killed_between_its_renames_is_undone(draft, tmp_path):
    plan, out = make_plan(draft, WEIGHT_ONLY), tmp_path / "out"
    write_checkpoint(plan, out, None)
    old = contents(out)
    out.rename(tmp_path / ".out.former")
    with pytest.raises(UserError, match="--force"):
        write_checkpoint(plan, out, None)
    assert contents(out) == old and names(tmp_path) == ["draft", "out"]


@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_a_quantized_checkpoint_is_never_replaced(draft, tmp_path, force):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis").write_text("x")
    with pytest.raises(UserError, match="not a quantized checkpoint"):
        write_checkpoint(make_plan(draft, WEIGHT_ONLY), tmp_path / "out", None, force=force)
    assert names(tmp_path) == ["draft", "out"]


@pytest.mark.parametrize("place", ["draft", "draft/nvfp4", "."])
def test_a_source_is_never_written_into(draft, tmp_path, place):
    with pytest.raises(UserError, match="its own source"):
        write_checkpoint(make_plan(draft, WEIGHT_ONLY), tmp_path / place, None, force=True)


def test_a_missing_parent_is_named(draft, tmp_path):
    with pytest.raises(UserError, match="mkdir -p"):
        write_checkpoint(make_plan(draft, WEIGHT_ONLY), tmp_path / "absent" / "out", None)
