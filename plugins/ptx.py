"""The PTX of one kernel: its entry's parameters, without those that nobody would pass.

Triton 3.9 ends every entry with two pointers to scratch memory (global scratch, profiler scratch). TensorRT passes the
plugin's arguments and nothing else, so they have to go; that is safe where the body does not name them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_trt.errors import Failure
from dflash_trt.plugins.kernels.spec import Argument

SCRATCH = 2  # pointers that Triton appends
TYPES = {"i32": "u32", "i64": "u64", "fp32": "f32"}  # how Triton declares a number
TENSOR_CORE = {  # what multiplies matrices, newest first
    "tcgen05.mma": re.compile(r"^\s*(?:@!?%p\d+\s+)?tcgen05\.mma\b", re.MULTILINE),
    "wgmma": re.compile(r"^\s*(?:@!?%p\d+\s+)?wgmma\.mma_async\b", re.MULTILINE),
    "mma.sync": re.compile(r"^\s*(?:@!?%p\d+\s+)?mma\.sync\b", re.MULTILINE),
}
CLUSTERS = (".explicitcluster", ".reqnctapercluster", ".maxclusterrank")
ENTRY = re.compile(r"\.entry\s+(?P<name>[\w$]+)\s*\((?P<parameters>[^)]*)\)(?P<directives>[^{]*)\{")
PARAMETER = re.compile(r"\.param\s+\.(?P<type>\w+)(?P<pointer>\s+\.ptr\b[^,]*?)?\s+(?P<name>[\w$]+)\s*$")


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str  # of PTX: u64, u32, f32
    pointer: bool


@dataclass(frozen=True)
class Entry:
    name: str
    parameters: tuple[Parameter, ...]
    threads: int  # of a block: `.reqntid`


def read_entry(ptx: str) -> Entry:
    """The only entry of a module."""
    found = list(ENTRY.finditer(ptx))
    if len(found) != 1:
        raise Failure(f"a kernel's PTX has {len(found)} entries instead of one")
    match = found[0]
    if any(word in match["directives"] for word in CLUSTERS):
        raise Failure(f"kernel {match['name']} wants a cluster of blocks, which TensorRT does not launch")
    threads = re.search(r"\.reqntid\s+(\d+)", match["directives"])
    if not threads:
        raise Failure(f"kernel {match['name']} does not say how many threads it has")
    parameters = tuple(_parameter(text) for text in match["parameters"].split(",") if text.strip())
    return Entry(match["name"], parameters, int(threads[1]))


def _parameter(text: str) -> Parameter:
    match = PARAMETER.search(text.strip())
    if not match:
        raise Failure(f"a kernel's parameter is not understood: {text.strip()!r}")
    return Parameter(match["name"], match["type"], match["pointer"] is not None)


def fit(ptx: str, arguments: Sequence[Argument]) -> str:
    """The same module whose entry takes exactly `arguments`, under their names."""
    entry = read_entry(ptx)
    kept, scratch = entry.parameters[:-SCRATCH], entry.parameters[-SCRATCH:]
    if len(entry.parameters) != len(arguments) + SCRATCH or not all(p.pointer for p in scratch):
        raise Failure(
            f"kernel {entry.name} has {len(entry.parameters)} parameters, not its {len(arguments)} arguments and "
            f"{SCRATCH} pointers to scratch memory: this Triton lays entries out in another way"
        )
    start, end = ENTRY.search(ptx).span("parameters")  # type: ignore[union-attr]
    rest = ptx[:start] + ptx[end:]
    for parameter in scratch:
        if re.search(rf"(?<![\w$]){re.escape(parameter.name)}(?![\w$])", rest):
            raise Failure(f"kernel {entry.name} uses scratch memory, which TensorRT does not give")
    lines = [line.rstrip().rstrip(",") for line in ptx[start:end].strip("\n").split("\n")][:-SCRATCH]
    ptx = ptx[:start] + "\n" + ",\n".join(lines) + "\n" + ptx[end:]
    names = {parameter.name: f"param_{argument.name}" for parameter, argument in zip(kept, arguments, strict=True)}
    ptx = re.sub(r"(?<![\w$])[\w$]+_param_\d+(?![\w$])", lambda match: names.get(match[0], match[0]), ptx)
    check(ptx, arguments)
    return ptx


def allow_one_block(ptx: str) -> str:
    """Tell the assembler that one block of a multiprocessor will do: it need not spill to make room for a second.

    A directive, unlike an option, stays with the text wherever it is assembled.
    """
    return re.sub(r"(\.reqntid\s+\d+)", r"\1\n.minnctapersm 1", ptx, count=1)


def check(ptx: str, arguments: Sequence[Argument]) -> None:
    """Compare the entry's parameters with the arguments, name by name and type by type."""
    entry = read_entry(ptx)
    have = [(parameter.name, parameter.type, parameter.pointer) for parameter in entry.parameters]
    want = [(f"param_{a.name}", "u64" if a.pointer else TYPES[a.type], a.pointer) for a in arguments]
    if have != want:
        raise Failure(f"kernel {entry.name} takes {have}, its arguments are {want}")


def tensor_core(ptx: str) -> str:
    """The instruction that multiplies matrices, or "none"."""
    return next((name for name, pattern in TENSOR_CORE.items() if pattern.search(ptx)), "none")
