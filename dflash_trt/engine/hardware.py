"""What each GPU architecture is called, which compilers target it, what it computes in: one table of data."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from dflash_trt.errors import UserError

TENSORRT, TENSORRT_RTX = "tensorrt", "tensorrt-rtx"
HALF = ("float16",)
BRAIN = ("float16", "bfloat16")
NVFP4 = "nvfp4"
BLACKWELL = ("float16", "bfloat16", NVFP4)


@dataclass(frozen=True)
class Sm:
    """A streaming-multiprocessor version; 89 is compute capability 8.9."""

    number: int
    family: str
    cards: str
    precisions: tuple[str, ...]
    compilers: tuple[str, ...] = (TENSORRT,)


BOTH = (TENSORRT, TENSORRT_RTX)
TABLE = {
    sm.number: sm
    for sm in (
        Sm(75, "Turing", "T4, RTX 20", HALF, BOTH),
        Sm(80, "Ampere", "A100, A30", BRAIN, BOTH),
        Sm(86, "Ampere", "A10, A40, RTX 30", BRAIN, BOTH),
        Sm(87, "Ampere", "Jetson Orin", BRAIN),
        Sm(89, "Ada Lovelace", "L4, L40S, RTX 40", BRAIN, BOTH),
        Sm(90, "Hopper", "H100, H200, GH200", BRAIN),
        Sm(100, "Blackwell", "B200, GB200", BLACKWELL),
        Sm(103, "Blackwell", "B300, GB300", BLACKWELL),
        Sm(110, "Blackwell", "Jetson Thor", BLACKWELL),
        Sm(120, "Blackwell", "RTX 50, RTX PRO 6000", BLACKWELL, BOTH),
        Sm(121, "Blackwell", "GB10 (DGX Spark)", BLACKWELL, BOTH),
    )
}


MEMORY = {"B300": 288, "B200": 192, "H200": 141}  # 10^9 bytes of a card, by its data sheet


def find_sm(number: int) -> Sm:
    """The table's entry. Raises UserError for a number that is none."""
    if number not in TABLE:
        raise UserError(f"there is no SM{number}", where="--sm", fix=f"choose one of {listed(*TABLE)}")
    return TABLE[number]


def targets(compiler: str) -> tuple[int, ...]:
    """The SMs a compiler can build for."""
    return tuple(sm.number for sm in TABLE.values() if compiler in sm.compilers)


def listed(*numbers: int) -> str:
    return ", ".join(map(str, numbers))


def local_sm() -> int | None:
    """The SM of this machine's first GPU as the driver tells it; None without one."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return int(answer.splitlines()[0].replace(".", ""))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
