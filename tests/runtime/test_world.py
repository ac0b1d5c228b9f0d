"""Several ranks on this machine, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.runtime import mpi

PROGRAMS = Path(__file__).parent / "programs"


def test_ranks_speak_and_end_together_when_one_is_elsewhere():
    done = mpi.run(4, sys.executable, PROGRAMS / "world.py", "parted", timeout=60)
    claims = ["sums_and_rows", "values", "errors_in_common", "a_graph", "an_error_inside_a_graph", "lockstep"]
    assert done.stdout.split() == claims, done.stderr
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    sums, rows = "'sum of float32 [2, 3] over ranks 0,1,2,3'", "'rows of float32 [3] over ranks 0,1,2,3'"
    found = (f"rank 3 is at {rows}", f"rank 3: rank 0 is at {sums}")
    assert errors and all(any(words in line for words in found) for line in errors), errors
    assert "Traceback" not in done.stderr


def test_a_rank_that_decides_otherwise_in_the_last_step_is_named_once():
    """No further call shows it, only the end."""
    done = mpi.run(4, sys.executable, PROGRAMS / "world.py", "odd", timeout=60)
    errors = [line for line in done.stderr.splitlines() if "error: " in line or "Traceback" in line]
    assert (done.returncode, len(errors)) == (1, 1), done.stderr
    assert errors[0].startswith("error: rank 2 decided otherwise than rank 0 in the same step"), errors


def test_a_rank_ends_when_another_or_the_launcher_is_gone():
    program = """
import subprocess, sys, time
from dataclasses import replace
from dflash_trt.runtime.peers import Watch, this_process, _stat
own, sleeper = this_process(1), subprocess.Popen(["sleep", "60"], stderr=subprocess.DEVNULL)
Watch(own, [own, replace(own, rank=3, pid=sleeper.pid, started=_stat(sleeper.pid)[19])])
print(sleeper.pid, flush=True)
if sys.argv[1] == "peer":
    sleeper.kill()  # and not waited for: it stays as a zombie
time.sleep(60)
"""
    for victim in ("peer", "launcher"):
        launcher = subprocess.Popen(
            ["sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", program, victim],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert launcher.stdout and launcher.stderr
        sleeper = int(launcher.stdout.readline())
        if victim == "launcher":
            launcher.kill()
        errors = launcher.stderr.read()  # until the last process that can write has ended
        os.kill(sleeper, 9) if victim == "launcher" else None
        launcher.wait(10)
        gone = f"rank 3 (pid {sleeper})" if victim == "peer" else f"the launcher of rank 1 (pid {launcher.pid})"
        assert errors.startswith(f"error: {gone} ended"), errors
