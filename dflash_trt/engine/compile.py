"""Compile the graphs of an engine directory and record the engines in its manifest."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_trt.engine.backends import Backend, choose
from dflash_trt.engine.directory import reported, sync, uninterrupted
from dflash_trt.engine.fingerprint import fingerprint
from dflash_trt.engine.hardware import Sm
from dflash_trt.engine.load import open_engine
from dflash_trt.engine.manifest import CompiledEngine, Limits, Manifest
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
    built: dict[Path, CompiledEngine] = {}  # by the partial file that holds it
    try:
        with reported(path):
            for graph in graphs:
                partial = path / f".{graph.stem}.sm{target.number}.{os.getpid()}"
                built[partial] = _compile(compiler, target, graph, engine.manifest, partial, progress)
            with uninterrupted():
                for partial, record in built.items():
                    partial.replace(path / record.file)
                _record(engine.manifest, built.values()).write(path)
    finally:
        for graph in graphs:
            (path / f".{graph.stem}.sm{target.number}.{os.getpid()}").unlink(missing_ok=True)
    return tuple(built.values())


def _check_dtype(dtype: str, target: Sm, path: Path) -> None:
    if dtype not in target.precisions:
        reason = "TensorRT has no float32 attention kernel" if dtype == "float32" else f"SM{target.number} has no {dtype}"
        fix = f"convert with --dtype {target.precisions[-1] if target.number < 100 else 'bfloat16'}"
        raise UserError(f"dtype is {dtype}, and {reason}", where=path, fix=fix)


def _compile(
    compiler: Backend, target: Sm, graph: Path, manifest: Manifest, output: Path, progress: Progress
) -> CompiledEngine:
    started = time.perf_counter()
    trt, logger = compiler.module, make_logger(compiler.module)
    progress(f"reading {graph.name}", 0)
    builder = trt.Builder(logger)
    network = parse(trt, builder, logger, graph)
    plan = _run(compiler, builder, network, target, manifest.limits, logger, f"compiling {graph.name}", progress)
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


def _run(
    compiler: Backend, builder: Any, network: Any, target: Sm, limits: Limits, logger: Any, what: str, progress: Progress
) -> Any:
    """The serialized engine. It is built in a second thread, so that Ctrl-C reaches this one and cancels the build."""
    trt = compiler.module
    config = builder.create_builder_config()
    config.progress_monitor = monitor = make_monitor(trt, what, progress)
    if compiler.ahead_of_time:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target.number}"), 0)
    add_profiles(builder, config, network, limits)
    plans: list[Any] = []
    worker = threading.Thread(target=lambda: plans.append(builder.build_serialized_network(network, config)), daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(0.1)
    except KeyboardInterrupt:
        monitor.cancelled = True
        worker.join()
        raise
    if not plans or plans[0] is None:
        raise refusal(f"{compiler.name} {compiler.version} refuses the network for SM{target.number}", logger.errors())
    return plans[0]


def _record(manifest: Manifest, built: Iterable[CompiledEngine]) -> Manifest:
    new = {(engine.graph, engine.sm): engine for engine in built}
    kept = tuple(engine for engine in manifest.engines if (engine.graph, engine.sm) not in new)
    return dataclasses.replace(manifest, engines=(*kept, *new.values()))
