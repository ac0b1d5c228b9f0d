"""`dflash-trt plugins` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(*words: str, cache: Path, **env: str) -> subprocess.CompletedProcess:
    """`dflash-trt plugins` in a process that does not interpret kernels, as other tests' processes may."""
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = f"import sys; sys.argv = {['dflash-trt', 'plugins', *words]!r}; from dflash_trt.cli import main; main()"
    env = clean | {"DFLASH_TRT_CACHE": str(cache)} | env
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=800)
