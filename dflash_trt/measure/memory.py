"""Peak resident memory of answering, taken in a process of its own.

    python -m dflash_trt.measure.memory DIR < JOB.json

The peak is the kernel's VmHWM. (getrusage's ru_maxrss will not do: a child starts with its parent's.) Pages of the
mapped checkpoint count as far as they were read; the system may drop them at any time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_trt.engine import open_engine
from dflash_trt.errors import Failure
from dflash_trt.measure.lanes import EngineLane


def peak_rss(
    directory: Path, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, draft: bool, threads: int | None
) -> int:
    """Bytes at the peak of loading one engine and answering `prompts`. Raises Failure if the child does not finish."""
    job = {"draft": draft, "threads": threads, "prompts": prompts, "max_new_tokens": max_new_tokens}
    command = [sys.executable, "-m", __name__, str(directory)]
    child = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True)
    if child.returncode:
        raise Failure(f"measuring memory failed — {' '.join(command)} — {child.stderr.strip()[-500:]}")
    return int(child.stdout)


def own_peak() -> int:
    """Bytes of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _main(directory: str) -> None:
    task = json.load(sys.stdin)
    lane = EngineLane(open_engine(Path(directory)), draft=task["draft"], threads=task["threads"])
    lane.answer(task["prompts"], task["max_new_tokens"])
    print(own_peak())


if __name__ == "__main__":
    _main(*sys.argv[1:])
