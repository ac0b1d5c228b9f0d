"""Compile the graphs of an engine directory and record the engines in its manifest."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dflash_trt.engine.backends import Backend, choose
from dflash_trt.engine.directory import reported, sync, uninterrupted
from dflash_trt.engine.fingerprint import fingerprint
from dflash_trt.engine.hardware import Sm
from dflash_trt.engine.load import open_engine
from dflash_trt.engine.manifest import CompiledEngine, Manifest
from dflash_trt.engine.network import add_profiles, count_layers, parse, refusal
from dflash_trt.engine.progress import Progress, silent
from dflash_trt.engine.watch import make_logger, make_monitor
from dflash_trt.errors import UserError


def build(
    path: Path, *, backend: str = "auto", sm: int | None = None, progress: Progress = silent
) -> tuple[CompiledEngine, ...]:
    """Compile every graph of the engine directory `path` for one SM and return what was built.

    The engines appear together with the manifest that names them; until then, and whatever goes wrong, the directory
    is as it was. Raises UserError if no compiler at hand can do it, Failure with the compiler's words if it refuses.
    """
    compiler, target = choose(backend, sm)
    engine = open_engine(path)
    _check_dtype(engine.manifest.dtype, target, path)
    graphs = [engine.graph(draft=draft, cpu=False) for draft in (True, False) if engine.manifest.draft or not draft]
    partials = [path / f".{graph.stem}.sm{target.number}.{os.getpid()}" for graph in graphs]
    try:
        with reported(path):
            built = tuple(
                _compile(compiler, target, graph, engine.manifest, partial, progress)
                for graph, partial in zip(graphs, partials, strict=True)
            )
            with uninterrupted():
                for partial, record in zip(partials, built, strict=True):
                    partial.replace(path / record.file)
                _record(engine.manifest, built).write(path)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)
    progress("done", 1)
    return built


def _check_dtype(dtype: str, target: Sm, path: Path) -> None:
    if dtype not in target.precisions:
        what = f"dtype is {dtype}, for which the attention layer has no kernel on SM{target.number} ({target.family})"
        raise UserError(what, where=path, fix=f"convert with --dtype {' or '.join(target.precisions[:2])}")


def _compile(
    compiler: Backend, target: Sm, graph: Path, manifest: Manifest, output: Path, progress: Progress
) -> CompiledEngine:
    started = time.perf_counter()
    trt, logger = compiler.module, make_logger(compiler.module)
    progress(f"reading {graph.name}", 0)
    builder = trt.Builder(logger)
    network = parse(trt, builder, logger, graph)
    config = builder.create_builder_config()
    config.progress_monitor = monitor = make_monitor(trt, f"compiling {graph.name}", progress)
    if compiler.ahead_of_time:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target.number}"), 0)
    add_profiles(builder, config, network, manifest.limits)
    plan = _interruptible(lambda: builder.build_serialized_network(network, config), monitor)
    if plan is None:
        what = f"{compiler.name} {compiler.version} cannot compile {graph} for SM{target.number}"
        raise refusal(what, logger.errors())
    with output.open("wb") as file:
        file.write(plan)
    sync(output)
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
        layers=count_layers(network),
    )


def _interruptible(work: Callable[[], Any], monitor: Any) -> Any:
    """The result of a build that runs in a second thread, so that Ctrl-C reaches this one and cancels it."""
    result: list[Any] = []
    worker = threading.Thread(target=lambda: result.append(work()), daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(0.1)
    except KeyboardInterrupt:
        monitor.cancelled = True
        worker.join()
        raise
    return result[0] if result else None


def _record(manifest: Manifest, built: Iterable[CompiledEngine]) -> Manifest:
    new = {(engine.graph, engine.sm): engine for engine in built}
    kept = tuple(engine for engine in manifest.engines if (engine.graph, engine.sm) not in new)
    return dataclasses.replace(manifest, engines=(*kept, *new.values()))
