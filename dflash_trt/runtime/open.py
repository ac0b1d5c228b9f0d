"""From an engine directory to something that runs: TensorRT where this machine's GPU has an engine, else the CPU.

An engine of several ranks is opened by as many processes, each in its place of one `World`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from pathlib import Path
from types import ModuleType

from dflash_trt import __version__
from dflash_trt.engine import CompiledEngine, Engine, open_engine
from dflash_trt.engine.backends import INSTALL, MODULES
from dflash_trt.engine.hardware import local_sm
from dflash_trt.engine.manifest import NAME, Manifest, read_manifest
from dflash_trt.errors import UserError
from dflash_trt.launcher import mpirun
from dflash_trt.runtime.generator import Generator
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.runtime.world import World

ALONE = World()


def open_engine_on(world: World, directory: Path, command: str, **options: object) -> Engine:
    """`open_engine` on every rank, after all of them have found that they are as many as the engine needs, and alike.

    `command` is what they run, `options` are what else all ranks must have in common. Raises UserError, the same on all
    ranks; no weight is read.
    """

    def read() -> Manifest:
        manifest = read_manifest(directory)
        check_world(manifest, directory, world, command=command)
        return manifest

    world.together("reading the manifest", read)
    digest = hashlib.sha256((directory / NAME).read_bytes()).hexdigest()
    facts = {"dflash-trt": __version__, f"{NAME} (sha256)": digest[:12]}
    world.agree(facts | {f"--{name.replace('_', '-')}": value for name, value in options.items()})
    return world.together("opening the engine directory", lambda: open_engine(directory))


def check_world(
    manifest: Manifest, directory: Path, world: World = ALONE, fix: str | None = None, command: str = "generate"
) -> None:
    """Raise UserError unless `world` has as many ranks as the engine needs."""
    needed = manifest.mapping.world
    if needed == world.size:
        return
    what = f"the engine is made for {_ranks(needed)}, but {_ranks(world.size)} started"
    line = f"dflash-trt {command} {directory} …"
    start = f"start it so: {line if needed == 1 else f'{mpirun(needed)} {line}'}"
    raise UserError(what, where=directory, fix=fix or start)


def open_engine_alone(directory: Path) -> Engine:
    """`open_engine` for commands that one process runs. Raises UserError for an engine of several ranks, too."""
    check_world(read_manifest(directory), directory, fix="convert without --tp and --ep for this command")
    return open_engine(directory)


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"


def open_session(
    engine: Engine,
    *,
    draft: bool = True,
    threads: int | None = None,
    max_batch: int | None = None,
    world: World = ALONE,
) -> Session:
    """A session of the engine, without `draft` of its autoregressive baseline.

    `threads` (CPU only) and `max_batch` default to all cores and all slots; ranks share the cores. Raises UserError if
    the engine has no drafter, needs another number of ranks, or was compiled by another version than is installed;
    Failure if it cannot be loaded. Of several ranks only those of `lockstep.py` may use their session.
    """
    check_world(engine.manifest, engine.path, world)
    limits = dataclasses.replace(
        engine.limits,
        max_batch=min(max_batch or engine.limits.max_batch, engine.limits.max_batch),
        block_size=engine.limits.block_size if draft else 1,
    )
    compiled = world.together("choosing a device", lambda: _compiled_here(engine, draft, world.rank))
    world.agree({"device": f"SM{compiled.sm}" if compiled else "CPU"})
    if compiled:
        runtime = world.together("loading TensorRT", lambda: _runtime_of(compiled))
        from dflash_trt.runtime.trt_session import TensorRTSession  # needs cuda-python

        return TensorRTSession(engine.path / compiled.file, limits, runtime, world)
    from dflash_trt.runtime.ort_session import OrtSession

    graph = engine.graph(rank=world.rank, draft=draft)
    if world.size > 1:
        # mpirun may have bound each rank to a core or two
        cores = min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // world.local_size)
        threads = threads or max(cores, 1)
    return world.together("loading the engine", lambda: OrtSession(graph, limits, threads=threads, world=world))


def open_generator(
    engine: Engine, *, draft: bool = True, threads: int | None = None, max_batch: int | None = None
) -> Generator:
    """A generator on `open_session`, with the engine's tokenizer, if any, and the policy that suits the device."""
    return make_generator(engine, open_session(engine, draft=draft, threads=threads, max_batch=max_batch), draft=draft)


def make_generator(engine: Engine, session: Session, *, draft: bool = True) -> Generator:
    """As `open_generator`, on a session of the engine that is open already."""
    return Generator(
        session,
        Tokenizer(engine.path) if (engine.path / "tokenizer.json").is_file() else None,
        engine.manifest.eos_ids,
        vocab=engine.manifest.vocab,
        policy="mixed" if _compiled_here(engine, draft) else "split",
    )


def _compiled_here(engine: Engine, draft: bool, rank: int = 0) -> CompiledEngine | None:
    """The compiled engine for this machine's GPU, if there are both."""
    if not engine.manifest.engines:
        return None
    sm = local_sm()
    if not sm or sm not in {built.sm for built in engine.manifest.engines}:
        return None
    return engine.compiled(sm, rank=rank, draft=draft)


def _runtime_of(compiled: CompiledEngine) -> ModuleType:
    try:
        module = importlib.import_module(MODULES[compiled.compiler])
    except ImportError:
        raise UserError(
            f"needs {compiled.compiler}, which is not installed", where=compiled.file, fix=INSTALL[compiled.compiler]
        ) from None
    if module.__version__ != compiled.version:
        raise UserError(
            f"was compiled by {compiled.compiler} {compiled.version}; installed is {module.__version__}",
            where=compiled.file,
            fix="run `dflash-trt build` again",
        )
    return module
