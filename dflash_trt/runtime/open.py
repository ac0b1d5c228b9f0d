"""From an engine directory to something that runs: TensorRT where this machine's GPU has an engine, else the CPU."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType

from dflash_trt.engine import CompiledEngine, Engine
from dflash_trt.engine.backends import INSTALL, MODULES
from dflash_trt.engine.hardware import local_sm
from dflash_trt.errors import UserError
from dflash_trt.runtime.generator import Generator
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.text import Tokenizer


def open_session(
    engine: Engine, *, draft: bool = True, threads: int | None = None, max_batch: int | None = None
) -> Session:
    """A session of the engine, without `draft` of its autoregressive baseline.

    `threads` (CPU only) and `max_batch` default to all cores and all slots. Raises UserError if the engine has no
    drafter, or was compiled by another version than is installed; Failure if it cannot be loaded.
    """
    limits = dataclasses.replace(
        engine.limits,
        max_batch=min(max_batch or engine.limits.max_batch, engine.limits.max_batch),
        block_size=engine.limits.block_size if draft else 1,
    )
    compiled = _compiled_here(engine, draft)
    if compiled:
        from dflash_trt.runtime.trt_session import TensorRTSession  # needs cuda-python

        return TensorRTSession(engine.path / compiled.file, limits, _runtime_of(compiled))
    from dflash_trt.runtime.ort_session import OrtSession

    return OrtSession(engine.graph(draft=draft), limits, threads=threads)


def open_generator(
    engine: Engine, *, draft: bool = True, threads: int | None = None, max_batch: int | None = None
) -> Generator:
    """A generator on `open_session`, with the engine's tokenizer, if any, and the policy that suits the device."""
    return Generator(
        open_session(engine, draft=draft, threads=threads, max_batch=max_batch),
        Tokenizer(engine.path) if (engine.path / "tokenizer.json").is_file() else None,
        engine.manifest.eos_ids,
        vocab=engine.manifest.vocab,
        policy="mixed" if _compiled_here(engine, draft) else "split",
    )


def _compiled_here(engine: Engine, draft: bool) -> CompiledEngine | None:
    """The compiled engine for this machine's GPU, if there are both."""
    if not engine.manifest.engines:
        return None
    sm = local_sm()
    return engine.compiled(sm, draft=draft) if sm and sm in {built.sm for built in engine.manifest.engines} else None


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
