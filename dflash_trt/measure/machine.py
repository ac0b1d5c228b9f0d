"""What the figures of a measurement depend on besides the code: the machine and the versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_machine(threads: int | None, *packages: str) -> dict[str, Any]:
    """JSON-able; `threads` as given to the engine (None: all cores).

    Ask before the work starts, so that `load` (runnable tasks, mean of the last minute) is that of others.
    """
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": _cpu(),
        "cores": cores,
        "threads": threads or cores,
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("dflash-trt", "onnxruntime", "numpy", *packages)},
    }


def busy(machine: dict[str, Any]) -> str | None:
    """Why figures taken now would mislead, if they would.

    Lanes do not suffer alike: torch's threads wait for each other at every operator, so a core that others hold slows
    it far more than ONNX Runtime.
    """
    if machine["load"] <= machine["cores"] / 2:
        return None
    return f"the machine was busy before this began (load {machine['load']:.1f} on {machine['cores']} cores)"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
