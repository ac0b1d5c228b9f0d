"""Kernels to PTX ahead of time, for GPUs that this machine need not have, with proof that it assembles.

What is assumed of the arguments: a pointer is a multiple of 16 bytes (TensorRT aligns its buffers to 256; a view of a
cache that starts at a later slot still is a multiple of a row). Nothing is assumed of integers; Triton's own launcher
would specialize 1 and multiples of 16.

`ptxas` is the one in the triton wheel, with its defaults (Triton itself passes another register allocator). TensorRT
hands the PTX to a compiler of its own or of the driver, whose registers may differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_trt.errors import Failure, UserError
from dflash_trt.plugins import ptx as ptx_text
from dflash_trt.plugins.kernels.spec import Kernel

SMS = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120a"}
PTX_VERSION = 88  # of CUDA 12.9, the oldest that knows sm_103a: older compilers refuse a newer one
ALIGNMENT = 16  # bytes that divide a pointer
FORMAT = 1  # of a cached file; part of its name


@dataclass(frozen=True)
class Compiled:
    """A kernel for one SM: what TensorRT gets, and what `ptxas` said of it."""

    sm: int
    entry: str
    ptx: str
    threads: int  # of a block
    shared: int  # bytes of dynamic shared memory
    tensor_memory: int  # columns, Blackwell data center only
    registers: int  # of a thread
    stack: int  # bytes of a thread
    spill_stores: int  # bytes
    spill_loads: int
    cubin_bytes: int

    @property
    def tensor_core(self) -> str:
        return ptx_text.tensor_core(self.ptx)


def compile_all(
    kernels: Iterable[Kernel], sms: Iterable[int] = SMS, progress: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[Kernel, Compiled]]:
    """Every kernel for every SM, from the cache where possible."""
    for kernel in kernels:
        for sm in sms:
            progress(f"{kernel.op} {kernel.name} SM{sm}")
            yield kernel, compile_kernel(kernel, sm)


def compile_kernel(kernel: Kernel, sm: int, cache: Path | None = None) -> Compiled:
    """PTX for one SM, whose entry takes exactly the kernel's arguments."""
    if sm not in SMS:
        raise UserError(f"kernels are not compiled for SM{sm}", where="--sm", fix=f"choose {', '.join(map(str, SMS))}")
    file = (cache or cache_folder()) / f"{_key(kernel, sm)}.json"
    compiled = _load(file, kernel)
    if compiled is None:
        compiled = _compile(kernel, sm)
        _store(file, compiled)
    return compiled


def cache_folder() -> Path:
    """Where PTX is kept: $DFLASH_TRT_CACHE, or the user's cache folder."""
    own = os.environ.get("DFLASH_TRT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "dflash-trt" / "kernels"


def is_cached(kernel: Kernel, sm: int) -> bool:
    return (cache_folder() / f"{_key(kernel, sm)}.json").exists()


def _key(kernel: Kernel, sm: int) -> str:
    """Everything that the PTX depends on, as a file name."""
    import triton

    facts = [
        *(FORMAT, PTX_VERSION, ALIGNMENT, SMS[sm], triton.__version__, _ptxas()[1]),
        *(kernel.function.fn.__name__, *_sources(kernel.function)),
        *(kernel.arguments, sorted(kernel.constants.items()), kernel.num_warps, kernel.num_stages),
    ]
    digest = hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()
    return f"{kernel.function.fn.__name__}-sm{sm}-{digest[:32]}"


def _sources(function: Any) -> list[str]:
    """The text of the file of a Triton function, and of those whose Triton functions it imports."""
    files: dict[str, str] = {}
    waiting = [function]
    while waiting:
        code = waiting.pop().fn
        file = code.__code__.co_filename
        if file not in files:
            files[file] = Path(file).read_text()
            waiting += [value for value in code.__globals__.values() if _is_kernel(value)]
    return [files[file] for file in sorted(files)]


def _is_kernel(value: Any) -> bool:
    """A Triton function of ours, compiled or interpreted."""
    return hasattr(getattr(value, "fn", None), "__code__") and value.fn.__module__.startswith("dflash_trt.")


def _ptxas() -> tuple[str, str]:
    """Path and version of the assembler for SM90 and newer."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell
    return tool.path, tool.version


def _load(file: Path, kernel: Kernel) -> Compiled | None:
    """A cached file that is whole; anything else is made anew."""
    try:
        compiled = Compiled(**json.loads(file.read_text()))
        ptx_text.check(compiled.ptx, kernel.arguments)
    except (OSError, ValueError, TypeError, Failure):
        return None
    return compiled


def _store(file: Path, compiled: Compiled) -> None:
    """Write under another name, then rename: a reader sees a whole file or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as out:
            json.dump(asdict(compiled), out)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _compile(kernel: Kernel, sm: int) -> Compiled:
    what = f"{kernel.op} {kernel.name} for SM{sm}"
    text, meta = _triton(kernel, sm, what)
    if meta.global_scratch_size or meta.profile_scratch_size or meta.tensordesc_meta:
        raise Failure(f"{what} needs scratch memory or a tensor descriptor, which TensorRT does not give")
    if meta.num_ctas != 1 or meta.launch_cooperative_grid or meta.launch_pdl:
        raise Failure(f"{what} needs a cluster or a special launch, which TensorRT does not do")
    text = ptx_text.fit(text, kernel.arguments)
    entry = ptx_text.read_entry(text)
    if entry.threads != meta.num_warps * meta.warp_size:
        raise Failure(f"{what} has {entry.threads} threads in its PTX and {meta.num_warps} warps in its metadata")
    said, size = _assemble(text, sm, what)
    if _spills(said):  # rather than lose a second block of the multiprocessor
        roomy = ptx_text.allow_one_block(text)
        again = _assemble(roomy, sm, what)
        if not _spills(again[0]):
            text, (said, size) = roomy, again
    return Compiled(
        sm, entry.name, text, entry.threads, meta.shared, meta.tmem_size or 0,
        registers=_number(r"Used (\d+) registers", said), stack=_number(r"(\d+) bytes stack frame", said),
        spill_stores=_number(r"(\d+) bytes spill stores", said), spill_loads=_number(r"(\d+) bytes spill loads", said),
        cubin_bytes=size,
    )  # fmt: skip


def _triton(kernel: Kernel, sm: int, what: str) -> tuple[str, Any]:
    """PTX as Triton makes it, and its metadata."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(kernel.function, triton.JITFunction):
        raise Failure("kernels are interpreted in this process and cannot be compiled: unset TRITON_INTERPRET")
    names = kernel.function.arg_names
    types = {argument.name: argument.type for argument in kernel.arguments}
    if [name for name in names if name in types] != list(types) or set(names) != {*types, *kernel.constants}:
        raise Failure(f"{what}: the function takes {names}, described are {[*types]} and {[*kernel.constants]}")
    aligned = {(names.index(a.name),): [["tt.divisibility", ALIGNMENT]] for a in kernel.arguments if a.pointer}
    source = ASTSource(
        kernel.function, {name: types.get(name, "constexpr") for name in names}, dict(kernel.constants), aligned
    )
    options = {
        **{"num_warps": kernel.num_warps, "num_stages": kernel.num_stages},
        **{"enable_fp_fusion": True, "ptx_version": PTX_VERSION},
    }
    with tempfile.TemporaryDirectory() as scratch, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = scratch
        knobs.compilation.disable_line_info = True  # the same PTX wherever the source lies
        try:
            result = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
        except Exception as error:
            raise Failure(f"Triton does not compile {what}: {error}") from error
        return result.asm["ptx"], result.metadata


def _assemble(text: str, sm: int, what: str) -> tuple[str, int]:
    """What `ptxas` says of the text, and the size of the cubin."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        command = [_ptxas()[0], "-v", f"--gpu-name={SMS[sm]}", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"ptxas refuses {what}: {done.stderr.strip()}")
        return done.stderr + done.stdout, cubin.stat().st_size


def _spills(said: str) -> bool:
    return _number(r"(\d+) bytes spill stores", said) + _number(r"(\d+) bytes spill loads", said) > 0


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if not match:
        raise Failure(f"ptxas did not say {pattern!r}: {text}")
    return int(match[1])
