"""An engine of two ranks as a user runs it: the same text as from one, refusals said once, and no rank left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_trt import launcher
from dflash_trt.cli import app
from dflash_trt.engine import convert
from dflash_trt.errors import UserError
from tests.runtime import mpi
from tests.tiny import make_pair

PROGRAMS = Path(__file__).parent / "programs"
LIMITS = {"max_batch": 2, "max_seq_len": 2048}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("ranks"), "tiny-qwen3", words=4)


@pytest.fixture(scope="module")
def one(pair) -> Path:
    return convert(*pair, pair[0].parent / "one", **LIMITS).path


@pytest.fixture(scope="module")
def two(pair) -> Path:
    return convert(*pair, pair[0].parent / "two", tp=2, **LIMITS).path


def errors_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Without what mpirun says about the end of its processes."""
    return [line for line in done.stderr.splitlines() if line.startswith("error:") or "Traceback" in line]


def test_two_ranks_answer_as_one_does(one, two, tmp_path):
    (tmp_path / "prompts.json").write_text('["one", "two and more", "three"]')
    options = ["--prompts", tmp_path / "prompts.json", "--max-new-tokens", 40, "--json"]
    alone = mpi.run(1, *mpi.CLI, "generate", one, *options)
    done = mpi.run(2, *mpi.CLI, "generate", two, *options, "--stats")
    assert (done.returncode, errors_of(done)) == (0, [])
    assert done.stdout == alone.stdout and len(done.stdout.splitlines()) == 3
    assert done.stderr.count("acceptance length") == 1


def test_what_does_not_go_together_is_refused_on_all_ranks_alike(one, two, tmp_path):
    other = shutil.copytree(two, tmp_path / "other", symlinks=True)
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"created": "2', '"created": "3'))
    torn = shutil.copytree(two, tmp_path / "torn", symlinks=True)
    (torn / "rank1.cpu.onnx").unlink()
    made_for_one = f"the engine is made for one rank, but 2 ranks started — {one} — start it so: dflash-trt"
    cases = {
        (two, two, "1", 2): "",
        (one, one, "1", 2): f"2: {made_for_one}",
        (two, other, "1", 2): "2: manifest.json (sha256): ",
        (two, two, "2", 2): "2: dflash-trt: 2 on rank 1, 1 on rank 0 — ",
        (two, two, "1", 1): "2: --batch: 1 on rank 1, 2 on rank 0 — ",
        (torn, torn, "1", 2): f"2: the file has moved or is gone — {torn}/rank1.cpu.onnx — ",
        (two, tmp_path, "1", 2): f"2: rank 1: not an engine directory: it has no manifest.json — {tmp_path} — ",
    }
    arguments = [",".join(map(str, case)) for case in cases]
    done = mpi.run(2, sys.executable, PROGRAMS / "refusals.py", *arguments)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases), done.stderr
    for (first, second), expected in zip(answers, cases.values(), strict=True):
        assert first == second
        assert first.startswith(expected) and bool(first) == bool(expected)


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("generate", ["--prompt", "one", "--max-new-tokens", 3000], "exceed the engine's max_seq_len 2048"),
        ("generate", ["--no-such-option"], "--no-such-option"),
        ("verify", [], "verify is a command for one process, but 2 ranks started"),
    ],
    ids=["prompt", "option", "command"],
)
def test_a_refusal_is_said_once_and_ends_all_ranks_with_2(two, command, arguments, words):
    done = mpi.run(2, *mpi.CLI, command, two, *arguments, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (error,) = errors_of(done)
    assert words in error and "rank 0:" not in error


@pytest.mark.parametrize("command", ["generate", "verify", "bench"])
def test_without_mpirun_an_engine_of_two_ranks_is_refused(two, command, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n")
    with pytest.raises(UserError, match="the engine is made for 2 ranks, but one rank started") as refusal:
        app([command, str(two), "--prompts", str(tmp_path / "prompts.txt")], standalone_mode=False)
    assert (launcher.mpirun(2) if command == "generate" else "without --tp") in str(refusal.value)


@pytest.mark.parametrize("what", ["killed", "interrupted"])
def test_no_rank_is_left_behind(two, what):
    length = 2000  # letters, one a token
    process = mpi.start(2, *mpi.CLI, "generate", two, "--prompt", "one", "--max-new-tokens", length)
    try:
        assert process.stdout and os.read(process.stdout.fileno(), 1), "the text appears while it is made"
        ranks = [int(pid) for pid in children(process.pid)]
        assert len(ranks) == 2
        begin = time.monotonic()
        assert process.poll() is None
        if what == "killed":
            os.kill(ranks[1], signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=10)
        assert 1 + len(rest) < length, "it was in the middle"
        assert time.monotonic() - begin < 10
        assert process.returncode != 0 and "Traceback" not in errors
        assert what == "interrupted" or f"rank 1 with PID {ranks[1]}" in errors or f"rank 1 (pid {ranks[1]})" in errors
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            assert time.monotonic() - begin < 10
            time.sleep(0.05)
    finally:
        process.kill()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
