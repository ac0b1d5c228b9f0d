"""Compile the graphs of an engine directory and record the engines in its manifest."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable
from pathlib import Path

from dflash_trt.durable import reported, uninterrupted
from dflash_trt.engine import worker
from dflash_trt.engine.backends import Backend, choose
from dflash_trt.engine.fingerprint import fingerprint
from dflash_trt.engine.hardware import BRAIN, NVFP4, TABLE, TENSORRT, Sm, listed
from dflash_trt.engine.load import Engine, find_faults, open_to_compile
from dflash_trt.engine.manifest import CompiledEngine, Manifest, read_manifest
from dflash_trt.errors import Failure, UserError
from dflash_trt.progress import Progress, silent

FEWEST_HEADS = 4  # of TensorRT-RTX 1.7


def build(
    path: Path, *, backend: str = "auto", sm: int | None = None, force: bool = False, progress: Progress = silent
) -> tuple[CompiledEngine, ...]:
    """Compile every graph of the engine directory `path` for one SM and return the engines.

    What the same compiler has built before is kept, unless `force`. New engines appear together with the manifest that
    names them; until then, and whatever goes wrong, the directory is as it was. Raises UserError if no compiler at hand
    can do it, Failure with the compiler's words if it refuses or crashes.
    """
    engine = open_to_compile(path)
    compiler, target = choose(backend, sm)
    _check_dtype(engine.manifest.dtype, target, path)
    _check_packed(engine.manifest, target, path)
    if engine.manifest.ops == "plugin":
        from dflash_trt.engine.plugins import check_build

        check_build(path, compiler.name, target)
    if engine.manifest.moe == "layer" and compiler.ahead_of_time:
        fix = f"build with {TENSORRT}, or convert with --moe native"
        raise UserError(f"{compiler.name} compiles no MOE layer", where=path, fix=fix)
    kept = {} if force else {e.graph: e for e in engine.manifest.engines if _is_current(e, compiler, target, engine)}
    wanted = [
        engine.graph(rank=rank, draft=draft, cpu=False)
        for rank in range(engine.manifest.mapping.world)
        for draft in (True, False)
        if engine.manifest.draft or not draft
    ]
    partial = {graph: path / f".{graph.stem}.sm{target.number}.{os.getpid()}" for graph in wanted}
    built: dict[str, CompiledEngine] = {}
    try:
        with reported(path):
            for graph in (graph for graph in wanted if graph.stem not in kept):
                built[graph.stem] = _compile(compiler, target, graph, engine.manifest, partial[graph], progress)
            with uninterrupted():
                for graph in (graph for graph in wanted if graph.stem in built):
                    partial[graph].replace(path / built[graph.stem].file)
                _record(read_manifest(path), built.values()).write(path)
    finally:
        for file in partial.values():
            file.unlink(missing_ok=True)
    return tuple((kept | built)[graph.stem] for graph in wanted)


def _check_dtype(dtype: str, target: Sm, path: Path) -> None:
    if dtype not in target.precisions:
        fix = f"convert with --dtype {' or '.join(half for half in BRAIN if half in target.precisions)}"
        what = f"dtype is {dtype}, which TensorRT has no attention kernels for on SM{target.number} ({target.cards})"
        raise UserError(what, where=path, fix=fix)


def _check_packed(manifest: Manifest, target: Sm, path: Path) -> None:
    for model in manifest.models:
        if model.packed and NVFP4 not in target.precisions:
            able = listed(*(sm.number for sm in TABLE.values() if NVFP4 in sm.precisions))
            kind = "NVFP4" if model.nvfp4 else "MXFP4"
            raise UserError(
                f"{model.name} has {kind} weights, which SM{target.number} ({target.cards}) cannot compute with",
                where=path,
                fix=f"build for SM {able}, or convert the unquantized checkpoint",
            )


def _is_current(built: CompiledEngine, compiler: Backend, target: Sm, engine: Engine) -> bool:
    made = (built.sm, built.compiler, built.version) == (target.number, compiler.name, compiler.version)
    return made and not any(find_faults(engine.path, {built.file: built}))


def _compile(
    compiler: Backend, target: Sm, graph: Path, manifest: Manifest, output: Path, progress: Progress
) -> CompiledEngine:
    started = time.perf_counter()
    models = manifest.models[:1] if graph.stem.endswith("-ar") else manifest.models
    job = worker.Job(
        backend=compiler.name,
        sm=target.number,
        graph=str(graph),
        decoder_layers=sum(model.layers for model in models),
        packed_weights=sum(model.packed for model in models),
        limits=manifest.limits if len(models) > 1 else dataclasses.replace(manifest.limits, block_size=1),
        output=str(output),
        ops=manifest.ops,
    )
    try:
        layers = worker.run(job, progress)
    except Failure as error:
        few = [heads for model in models if 0 < (heads := model.heads // manifest.mapping.tp) < FEWEST_HEADS]
        if not few or not compiler.ahead_of_time:
            raise
        hint = f"{few[0]} query heads a rank: {compiler.name} was seen to compile attention from {FEWEST_HEADS} up"
        raise Failure(f"{error}\n  {hint}; choose a smaller --tp") from None
    return CompiledEngine(
        graph=graph.stem,
        file=f"{graph.stem}.sm{target.number}.engine",
        sm=target.number,
        compiler=compiler.name,
        version=compiler.version,
        precision=manifest.dtype,
        seconds=round(time.perf_counter() - started, 2),
        size=output.stat().st_size,
        fingerprint=fingerprint(output),
        layers=layers,
    )


def _record(manifest: Manifest, built: Iterable[CompiledEngine]) -> Manifest:
    engines = {(engine.graph, engine.sm): engine for engine in (*manifest.engines, *built)}
    return dataclasses.replace(manifest, engines=tuple(engines.values()))
