"""Starts programs as several ranks on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Without buffering, text comes as it is written; mpirun would hold back what is no whole line.
MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "--stream-buffering", "0"]
CLI = [sys.executable, "-c", "from dflash_trt.cli import main; main()"]
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # containers
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),
}


def start(ranks: int, *command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*MPIRUN, "-n", str(ranks), *map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
    )


def run(ranks: int, *command: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    process = start(ranks, *command)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_alone(*command: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """One process without a launcher."""
    words, environment = list(map(str, command)), os.environ | ENVIRONMENT
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=timeout)
