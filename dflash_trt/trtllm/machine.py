"""This machine as the server will find it. Parsing is apart from asking, so that recorded answers can be tested."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
PATIENCE = 30  # seconds; nvidia-smi hangs where a driver does
QUERY = "index,name,memory.total,memory.used,driver_version,compute_cap,mig.mode.current"
PACKAGES = ("tensorrt_llm", "flash-attn", "flashinfer-python", "mpi4py")
LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "stack": resource.RLIMIT_STACK, "nofile": resource.RLIMIT_NOFILE}
NO_PROGRAM = "nvidia-smi is not installed"


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    index: int
    name: str
    memory: int  # bytes
    used: int  # bytes
    driver: str
    sm: int
    mig: bool


@dataclass(frozen=True)
class Machine:
    """What was found. An empty or missing field: nothing was said of it."""

    gpus: tuple[Gpu, ...] = ()
    trouble: str | None = None  # why there are none, in nvidia-smi's own words
    links: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # GPU → NVLinks that are up, and all
    paths: Mapping[tuple[int, int], str] = field(default_factory=dict)  # pair of GPUs → "NV18", "SYS", …
    fabric: Mapping[int, tuple[str, str]] = field(default_factory=dict)  # GPU → state and status of its NVSwitch fabric
    shared_memory: int | None = None  # bytes of /dev/shm
    limits: Mapping[str, int | None] = field(default_factory=dict)  # None: unlimited
    mpi: str | None = None  # first line of `mpirun --version`
    slurm: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)  # name → version, of those that matter
    container: str | None = None  # what says that this is one
    free: int | None = None  # bytes on the disk that checkpoints are downloaded to
    cache: Path | None = None  # that folder
    port: int = 8000
    port_is_free: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Of `nvidia-smi --query-gpu=QUERY --format=csv,noheader,nounits`; lines that are none are left out."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY.split(",")) or not cells[0].isdecimal():
            continue
        index, name, total, used, driver, capability, mig = cells
        sm = re.fullmatch(r"(\d+)\.(\d)", capability)
        found.append(
            Gpu(
                index=int(index),
                name=name,
                memory=_mebibytes(total),
                used=_mebibytes(used),
                driver=driver,
                sm=int(sm[1] + sm[2]) if sm else 0,
                mig=mig == "Enabled",
            )
        )
    return tuple(found)


def parse_links(text: str) -> dict[int, tuple[int, int]]:
    """Of `nvidia-smi nvlink -s`: GPU → links that are up, and all. A GPU without links has none."""
    found: dict[int, tuple[int, int]] = {}
    gpu = None
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = int(head[1])
            found[gpu] = (0, 0)
        elif gpu is not None and (link := re.match(r"\s*Link \d+:\s*(.+?)\s*$", line)):
            up, all_links = found[gpu]
            found[gpu] = (up + link[1].endswith("GB/s"), all_links + 1)
    return found


def parse_paths(text: str) -> dict[tuple[int, int], str]:
    """Of `nvidia-smi topo -m`: what connects two GPUs."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    head = next((line for line in lines if line and line[0] == "GPU0"), [])
    columns = [int(word[3:]) for word in head if re.fullmatch(r"GPU\d+", word)]
    found = {}
    for line in lines:
        if line is head or not line or not (row := re.fullmatch(r"GPU(\d+)", line[0])):
            continue
        found.update({(int(row[1]), column): word for column, word in zip(columns, line[1:], strict=False)})
    return {pair: word for pair, word in found.items() if pair[0] != pair[1]}


def parse_fabric(text: str) -> dict[int, tuple[str, str]]:
    """Of `nvidia-smi -q`: the section Fabric of each GPU, in their order."""
    found: dict[int, tuple[str, str]] = {}
    gpu, inside = -1, False
    for line in text.splitlines():
        if re.match(r"GPU [0-9A-Fa-f]{8}:", line):
            gpu, inside = gpu + 1, False
        elif re.fullmatch(r"    Fabric", line.rstrip()):
            inside = True
        elif inside and re.match(r"    \S", line):  # the next section of this GPU
            inside = False
        elif inside and (word := re.fullmatch(r"\s+(State|Status)\s*: (.+?)\s*", line)):
            state, status = found.get(gpu, ("", ""))
            found[gpu] = (word[2], status) if word[1] == "State" else (state, word[2])
    return found


def look_around(environment: Mapping[str, str], port: int = 8000) -> Machine:
    """Ask this machine. Takes seconds; changes nothing."""
    text, trouble = _run("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    gpus = parse_gpus(text)
    if not gpus:
        return Machine(trouble=trouble or text.strip() or "nvidia-smi lists none", port=port, environment=environment)
    mpi, _ = _run("mpirun", "--version")
    cache = Path(environment.get("HF_HUB_CACHE") or Path(environment.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    return Machine(
        gpus=gpus,
        links=parse_links(_run("nvidia-smi", "nvlink", "-s")[0]),
        paths=parse_paths(_run("nvidia-smi", "topo", "-m")[0]),
        fabric=parse_fabric(_run("nvidia-smi", "-q")[0]),
        shared_memory=_shared_memory(),
        limits={name: _limit(number) for name, number in LIMITS.items()},
        mpi=mpi.splitlines()[0].strip() if mpi else None,
        slurm=shutil.which("srun") is not None,
        packages=_packages(),
        container=_container(environment),
        free=_free(cache.expanduser()),
        cache=cache.expanduser(),
        port=port,
        port_is_free=_is_free(port),
        environment=environment,
    )


def _mebibytes(cell: str) -> int:
    return int(cell) * MIB if cell.isdecimal() else 0


def _run(*command: str) -> tuple[str, str | None]:
    """Standard output, and what went wrong if something did."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return "", f"{command[0]} did not answer within {PATIENCE} s"
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return done.stdout, None if not done.returncode else (said[0] if said else f"{command[0]} failed")


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _limit(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _container(environment: Mapping[str, str]) -> str | None:
    marks = [mark for mark in ("/.dockerenv", "/run/.containerenv") if Path(mark).exists()]
    return next(iter([*marks, *(key for key in ("container", "SINGULARITY_NAME") if environment.get(key))]), None)


def _free(folder: Path) -> int | None:
    """Of the disk that the folder lies on, or will."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
