"""How long running streams wait while the server reads somebody's long prompt.

No stream may wait for two chunks of a prompt: its longest gap is one chunk and one decode step. How long these take is
measured on the same requests without a server, in turns with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.served import Server
from dflash_trt.errors import Failure
from dflash_trt.runtime import Generator, Request

_SETTLED = 3  # pieces that each stream has got before the long prompt comes
_PATIENCE = 120  # seconds


@dataclass(frozen=True)
class Scene:
    """`running` prompts are being answered, with up to `max_new_tokens`, when `long` arrives."""

    running: Sequence[Sequence[int]]
    long: Sequence[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Gap:
    """Seconds."""

    longest: float  # between two pieces of a running stream, while the long prompt was read
    usual: float  # before: the median
    first_token: float  # of the long prompt


@dataclass(frozen=True)
class Calls:
    """Seconds of the longest calls while the long prompt was read."""

    chunk: float
    step: float


def watch(server: Server, scene: Scene) -> Gap:
    """Play the scene on a server. Raises Failure if a stream is refused, breaks off or is too short."""
    times: list[list[float]] = [[] for _ in scene.running]
    settled = threading.Barrier(len(scene.running) + 1, timeout=_PATIENCE)

    def follow(prompt: Sequence[int], seen: list[float]) -> None:
        try:
            for piece in server.stream(prompt, scene.max_new_tokens, ignore_eos=True):
                seen.append(piece.at)
                if len(seen) == _SETTLED:
                    settled.wait()
            if len(seen) < _SETTLED:
                raise Failure(f"a stream came in {len(seen)} pieces, too few to have a gap")
        except Exception:
            settled.abort()  # or all others would wait for this one
            raise

    with ThreadPoolExecutor(len(times)) as pool:
        ends = [pool.submit(follow, prompt, seen) for prompt, seen in zip(scene.running, times, strict=True)]
        try:
            settled.wait()
        except threading.BrokenBarrierError:
            raise _cause(ends) from None
        asked = time.perf_counter()
        first, *_ = server.stream(scene.long, 1)
        got = first.at
        for end in ends:
            end.result()
    pairs = [pair for seen in times for pair in pairwise(seen)]
    during = [later - earlier for earlier, later in pairs if later > asked and earlier < got]
    before = [later - earlier for earlier, later in pairs if later <= asked]
    return Gap(max(during), median(before), got - asked)


def _cause(ends: Sequence[Future[None]]) -> BaseException:
    """Why the streams did not all get under way."""
    faults = [end.exception() for end in ends]
    own = (fault for fault in faults if fault and not isinstance(fault, threading.BrokenBarrierError))
    return next(own, Failure(f"the streams did not get under way within {_PATIENCE} seconds"))


def replay(generator: Generator, scene: Scene) -> Calls:
    """Play the scene without a server, to learn how long its calls are."""
    waiting = {generator.add(Request(prompt, scene.max_new_tokens, ignore_eos=True)): 0 for prompt in scene.running}
    running = list(waiting)
    while waiting:
        for out in generator.step():
            if out.request_id in waiting:
                waiting[out.request_id] += 1
                if waiting[out.request_id] == _SETTLED:
                    del waiting[out.request_id]
    long, reading = generator.add(Request(scene.long, 1)), True
    chunks: list[float] = []
    steps: list[float] = []
    while reading:
        reading = not any(out.request_id == long for out in generator.step())
        if call := generator.last_call:
            (chunks if call.prefill else steps).append(call.seconds)
    for request_id in running:
        generator.cancel(request_id)
    while generator.busy:
        generator.step()
    return Calls(max(chunks), max(steps, default=0.0))
