"""The compiler in a process of its own, because it may crash and because Ctrl-C must end it at once.

The parent gives a job as JSON on the command line; the child answers with JSON lines on stdout: `progress`, what the
compiler `said`, at last `done` or `failed`. Any other line is the compiler's too, on its way down.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_trt.durable import sync, uninterrupted
from dflash_trt.engine.backends import Backend, load_backend
from dflash_trt.engine.manifest import Limits
from dflash_trt.engine.network import add_profiles, count_layers, parse, parse_plugins, refusal
from dflash_trt.engine.watch import make_logger, make_monitor
from dflash_trt.errors import DflashError, Failure
from dflash_trt.progress import Progress

LAST_WORDS = 5  # lines shown of a compiler that crashed


@dataclass(frozen=True)
class Job:
    """One graph to compile."""

    backend: str
    sm: int
    graph: str
    decoder_layers: int  # of target and drafter together
    packed_weights: int
    limits: Limits
    output: str
    ops: str = "native"


def run(job: Job, progress: Progress) -> dict[str, int]:
    """Compile in a child process; returns the network's layers by type. Raises Failure with the compiler's words."""
    name, words = Path(job.graph).name, deque[str](maxlen=LAST_WORDS)
    command = [sys.executable, "-m", "dflash_trt.engine.worker", json.dumps(asdict(job))]
    child = None
    try:
        with uninterrupted():  # a Ctrl-C inside Popen would lose the child that it has started
            child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # keeps the terminal's Ctrl-C from the child: this process decides
            )
        assert child.stdout is not None
        for line in child.stdout:
            match _message(line):
                case ["progress", fraction]:
                    progress(f"compiling {name}", fraction)
                case ["said", text]:
                    words.append(text)
                case ["done", layers]:
                    return layers
                case ["failed", text]:
                    raise Failure(text)
        child.wait()
    finally:
        if child:
            child.kill()
            child.communicate()
    raise refusal(f"the compiler crashed ({_cause(child.returncode)}) — {job.graph}; its last messages:", [*words])


def _message(line: str) -> list[Any]:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    return message if isinstance(message, list) else ["said", line.rstrip()]


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def main(argument: str) -> None:
    """The child's side. A parent that is gone breaks the pipe, which ends the child at its next message."""
    values = json.loads(argument)
    job = Job(**{**values, "limits": Limits(**values["limits"])})
    try:
        compiler = load_backend(job.backend)
        assert compiler is not None  # the parent has chosen it
        tell("done", compile_graph(compiler, job))
    except DflashError as error:
        tell("failed", str(error))
    except OSError as error:
        tell("failed", f"{error.strerror} — {Path(job.output).parent} — free some space")


def tell(kind: str, value: Any) -> None:
    try:
        sys.stdout.write(json.dumps([kind, value]) + "\n")  # at once: the compiler calls from several threads
        sys.stdout.flush()
    except BrokenPipeError:
        os._exit(1)


def compile_graph(compiler: Backend, job: Job) -> dict[str, int]:
    """Write the engine to `job.output` and return the network's layers by type."""
    trt = compiler.module
    logger = make_logger(trt, lambda text: tell("said", text))
    builder = trt.Builder(logger)
    config = builder.create_builder_config()
    place = (trt, builder, logger, Path(job.graph))
    if job.ops == "plugin":
        network = parse_plugins(*place, config, job.sm, job.packed_weights)
    else:
        network = parse(*place, job.decoder_layers, job.packed_weights)
    layers = count_layers(network)
    monitor = make_monitor(trt, lambda fraction: tell("progress", fraction))
    config.progress_monitor = monitor  # the config does not keep it alive
    if compiler.ahead_of_time:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{job.sm}"), 0)
    add_profiles(builder, config, network, job.limits)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise refusal(f"{compiler.name} {compiler.version} refuses the network for SM{job.sm}", logger.errors)
    with Path(job.output).open("wb") as file:
        file.write(plan)
    sync(Path(job.output))
    return layers


if __name__ == "__main__":
    main(sys.argv[1])
