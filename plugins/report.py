"""What a compiled kernel uses of a GPU, and how many blocks of it one multiprocessor holds at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from dflash_trt.plugins.compile import Compiled
from dflash_trt.plugins.kernels.spec import Kernel
from dflash_trt.sizes import format_bytes

WARP = 32
REGISTER_UNIT = 256  # registers are given to a warp in multiples of this
SHARED_RESERVED = 1024  # bytes of shared memory that the driver takes of each block
STATIC_SHARED = 48 << 10  # a block gets more only if whoever launches it asks for it


@dataclass(frozen=True)
class Limits:
    """Of one multiprocessor; CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"."""

    warps: int
    blocks: int
    registers: int
    shared: int  # bytes
    shared_block: int  # bytes of one block at most
    tensor_memory: int = 0  # columns


LIMITS = {
    90: Limits(64, 32, 65536, 228 << 10, 227 << 10),
    100: Limits(64, 32, 65536, 228 << 10, 227 << 10, 512),
    103: Limits(64, 32, 65536, 228 << 10, 227 << 10, 512),
    120: Limits(48, 24, 65536, 100 << 10, 99 << 10),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks of a kernel on one multiprocessor at most."""

    blocks: int
    warps: float  # share of the warps that fit
    bound: str  # what allows no more


def occupancy(compiled: Compiled) -> Occupancy:
    limits, warps = LIMITS[compiled.sm], compiled.threads // WARP
    of_warp = -(-compiled.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    fits = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": limits.registers // of_warp // warps,
        "shared memory": limits.shared // (compiled.shared + SHARED_RESERVED),
    }
    if compiled.shared > limits.shared_block:
        fits["shared memory"] = 0
    if compiled.tensor_memory:
        fits["tensor memory"] = limits.tensor_memory // compiled.tensor_memory
    bound = min(fits, key=lambda name: fits[name])
    return Occupancy(fits[bound], fits[bound] * warps / limits.warps, bound)


def row(kernel: Kernel, models: Iterable[str], compiled: Compiled) -> dict[str, Any]:
    """One line of the report, for JSON."""
    most = occupancy(compiled)
    return {
        "op": kernel.op,
        "kernel": kernel.name,
        "models": list(models),
        "sm": compiled.sm,
        "registers": compiled.registers,
        "spill_bytes": compiled.spill_stores + compiled.spill_loads,
        "stack_bytes": compiled.stack,
        "shared_bytes": compiled.shared,
        "tensor_memory_columns": compiled.tensor_memory,
        "threads": compiled.threads,
        "blocks_per_multiprocessor": most.blocks,
        "occupancy": round(most.warps, 3),
        "bound_by": most.bound,
        "tensor_core": compiled.tensor_core,
        "tensor_core_expected": kernel.tensor_core,
        "ptx_bytes": len(compiled.ptx),
        "cubin_bytes": compiled.cubin_bytes,
    }


def show(console: Console, rows: Iterable[dict[str, Any]]) -> None:
    """The report as a table. SMs for which a kernel comes out the same share a line."""
    caption = (
        f"* more than {STATIC_SHARED >> 10} KiB. Occupancy: blocks of one multiprocessor at most, what allows no more."
    )
    table = Table(caption=caption)
    for name in ("op", "kernel", "SM", "registers", "spills", "shared", "occupancy", "bound by", "tensor core", "PTX"):
        words = name in ("op", "kernel", "bound by", "tensor core")
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    for (op, kernel), lines in itertools.groupby(rows, key=lambda line: (line["op"], line["kernel"])):
        alike: dict[tuple[str, ...], list[int]] = {}
        for line in lines:
            alike.setdefault(_cells(line), []).append(line["sm"])
        for i, (cells, sms) in enumerate(alike.items()):
            table.add_row(*(("", "") if i else (op, kernel)), ", ".join(map(str, sms)), *cells)
        table.add_section()
    console.print(table)


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(line["registers"]),
        f"[red]{line['spill_bytes']} B[/]" if line["spill_bytes"] else "none",
        format_bytes(line["shared_bytes"]) + "*" * (line["shared_bytes"] > STATIC_SHARED),
        f"{line['blocks_per_multiprocessor']} ({line['occupancy']:.0%})",
        line["bound_by"],
        line["tensor_core"],
        format_bytes(line["ptx_bytes"]),
    )
