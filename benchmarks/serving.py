"""The server under load: throughput for 1 to 16 users, against the offline generator, and when a long prompt comes.

    python -m benchmarks.serving --aiperf .venv-aiperf/bin/aiperf [--json FILE --plot FILE] [--no-sweep]

SmolLM2-135M-Instruct and its drafter on the CPU, greedy, prompts the drafter has not seen. NVIDIA's aiperf puts load on
two servers, with the drafter and without, in turns. Then eight prompts go to the server at once and to the generator
in this process as one batch, in turns; and streams run while a long prompt arrives.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table

from benchmarks.gaps import Scene, replay, watch
from benchmarks.load import Load, check_aiperf, put_load, write_prompts
from benchmarks.pareto import plot
from benchmarks.served import Server, serving
from dflash_trt.commands.progress import progress_bar
from dflash_trt.engine import Engine, convert, open_engine
from dflash_trt.measure.lanes import EngineLane, Heat
from dflash_trt.measure.machine import busy, describe_machine
from dflash_trt.measure.prompts import encode_prompts, read_prompts
from dflash_trt.measure.race import Result, differing, race
from dflash_trt.progress import Progress
from dflash_trt.runtime import Tokenizer
from dflash_trt.runtime.open import open_generator
from examples.smollm2.prepare import WORK, prepare

DRAFTER = Path("examples/smollm2/drafter")
PROMPTS = DRAFTER / "heldout_prompts.json"
SLOTS, LENGTH = 16, 2048  # of the engine
USERS = [1, 2, 4, 8, 16]
LANES = {"autoregressive": ["--no-draft"], "DFlash": []}  # and what makes a server so
BATCH = 8
RUNNING = 4  # streams, when a long prompt arrives
HOST = 1.1  # a gap may be so many times a chunk and a step: the host's and the network's part


class ServedLane:
    """All prompts at once to a server, each a stream."""

    name = "server"

    def __init__(self, server: Server):
        self._server = server

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Heat:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: self._answer(prompt, max_new_tokens), prompts))
        return Heat(answers, time.perf_counter() - start)

    def _answer(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        pieces = self._server.stream(prompt, max_new_tokens)
        return tuple(token for piece in pieces for token in piece.token_ids)


def main(
    aiperf: Path = typer.Option(Path(".venv-aiperf/bin/aiperf"), help="NVIDIA's load generator."),
    no_sweep: bool = typer.Option(False, "--no-sweep", help="Without aiperf: only the other two measurements."),
    users: list[int] = typer.Option(USERS, min=1, help="At once; may be given several times."),
    requests: int = typer.Option(2, min=1, help="Of each user; at least six in all."),
    max_new_tokens: int = typer.Option(64, min=1),
    rounds: int = typer.Option(5, min=1, help="Of the other two measurements."),
    threads: int = typer.Option(None, min=1, help="Of every engine. Default: all cores."),
    json_file: Path = typer.Option(None, "--json", help="Also write the figures here."),
    picture: Path = typer.Option(None, "--plot", help="Draw throughput against tokens per user: .png, .svg, .pdf."),
) -> None:
    machine = describe_machine(threads, "fastapi", "uvicorn")
    if not no_sweep:
        machine["versions"]["aiperf"] = check_aiperf(aiperf)
    engine = _engine()
    options = ["--threads", str(threads)] if threads else []
    with progress_bar() as progress:
        lanes: dict[str, list[Load]] = {}
        tau: float | None = None
        if not no_sweep:
            lanes, tau = _sweep(engine, aiperf, options, users, requests, max_new_tokens, progress)
        progress("loading", 0)
        with serving(engine.path, *options) as server:
            offline, served = _race(engine, server, max_new_tokens, rounds, threads, progress)
            gaps = _gaps(engine, server, rounds, threads, progress)
    settings = {"users": users, "requests": requests, "max_new_tokens": max_new_tokens, "rounds": rounds}
    record = {
        "lanes": {name: [dataclasses.asdict(load) for load in loads] for name, loads in lanes.items()},
        "tau": tau,
        "batch": BATCH,
        "offline": offline.as_json(),
        "served": served.as_json(),
        "differing": differing([offline, served]),
        "gaps": gaps,
        "goals": [
            {
                "figure": f"server against generator, {BATCH} at once",
                "is": served.tokens_per_second / offline.tokens_per_second,
                "at_least": 0.9,
            },
            {
                "figure": "a stream's longest gap against chunk + step",
                "is": gaps["longest"] / (gaps["chunk"] + gaps["step"]),
                "at_most": HOST,
            },
        ],
        "machine": machine,
        "settings": settings,
    }
    _show(Console(), record, lanes)
    if json_file:
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if picture and lanes:
        plot(lanes, picture, f"SmolLM2-135M, {machine['cores']} cores, {max_new_tokens} tokens an answer")


def _engine() -> Engine:
    directory = WORK / f"engine-{SLOTS}x{LENGTH}"
    if directory.exists():
        return open_engine(directory)
    return convert(prepare(), DRAFTER, directory, max_batch=SLOTS, max_seq_len=LENGTH)


def _sweep(
    engine: Engine,
    aiperf: Path,
    options: Sequence[str],
    users: Sequence[int],
    requests: int,
    max_new_tokens: int,
    progress: Progress,
) -> tuple[dict[str, list[Load]], float | None]:
    """What both servers did, and the drafter's tau. Both run all the time; the one that has no load does nothing."""
    found: dict[str, list[Load]] = {name: [] for name in LANES}
    plain, dflash = (serving(engine.path, *options, *more) for more in LANES.values())
    progress("starting servers", 0)
    with tempfile.TemporaryDirectory() as folder, plain as first, dflash as second:
        prompts = write_prompts(read_prompts(PROMPTS), Path(folder) / "prompts.jsonl")
        pairs = list(zip(LANES, (first, second), strict=True))
        for turn, count in enumerate(users):
            for name, server in pairs[:: -1 if turn % 2 else 1]:
                progress(f"{count} users, {name}", turn / len(users))
                amount = max(requests * count, 6)
                load = put_load(
                    *(aiperf, server, engine.path, prompts),
                    users=count,
                    requests=amount,
                    max_new_tokens=max_new_tokens,
                )
                found[name].append(load)
        tau = second.metric("dflash_acceptance_length")
    progress("done", 1)
    return found, tau


def _race(
    engine: Engine, server: Server, max_new_tokens: int, rounds: int, threads: int | None, progress: Progress
) -> list[Result]:
    ids = encode_prompts(Tokenizer(engine.path), read_prompts(PROMPTS))
    offline = EngineLane(engine, draft=True, threads=threads)
    return race([offline, ServedLane(server)], [ids[:BATCH]], max_new_tokens, rounds=rounds, progress=progress)


def _gaps(
    engine: Engine, server: Server, rounds: int, threads: int | None, progress: Progress
) -> dict[str, float | int]:
    """Medians over the rounds, in seconds."""
    tokenizer, texts = Tokenizer(engine.path), read_prompts(PROMPTS)
    generator, limits = open_generator(engine, threads=threads), engine.limits
    chunks = LENGTH // limits.max_query // 2
    long = tokenizer.encode(" ".join(texts * 10))[: chunks * limits.max_query]
    # every chunk is followed by a step, and a stream that ends early would see no gap
    enough = 2 * (chunks + 2) * limits.block_size
    scene = Scene(encode_prompts(tokenizer, texts[:RUNNING]), long, enough)
    gaps, calls = [], []
    for turn in range(1 + rounds):  # the first time memory is touched that was never used
        progress(f"a long prompt, round {turn} of {rounds}" if turn else "warming up: a long prompt", turn / rounds)
        calls.append(replay(generator, scene))
        gaps.append(watch(server, scene))
    del calls[0], gaps[0]
    progress("done", 1)
    return {
        "running": RUNNING,
        "prompt_tokens": len(long),
        "chunks": chunks,
        "chunk": median(call.chunk for call in calls),
        "step": median(call.step for call in calls),
        "longest": median(gap.longest for gap in gaps),
        "usual": median(gap.usual for gap in gaps),
        "first_token": median(gap.first_token for gap in gaps),
    }


def _show(console: Console, record: dict[str, Any], lanes: dict[str, list[Load]]) -> None:
    if lanes:
        table = Table("users", Column(no_wrap=True), "tokens/s", "of one user", "first token, ms", "next tokens, ms")
        for loads in zip(*lanes.values(), strict=True):
            for name, load in zip(lanes, loads, strict=True):
                table.add_row(
                    str(load.users),
                    name,
                    f"{load.tokens_per_second:.1f}",
                    f"{load.tokens_per_second_per_user:.1f}",
                    f"{load.first_token['p50']:.0f}, {load.first_token['p95']:.0f}",
                    f"{load.inter_token['p50']:.0f}, {load.inter_token['p95']:.0f}",
                    end_section=name == list(lanes)[-1],
                )
        console.print(table)
        console.print("Times: the median and what 95 % stay below.", end=" ")
        console.print(f"The drafter's tau: {record['tau']:.2f}." if record["tau"] else "")
        if uneven := [a.users for a, b in zip(*lanes.values(), strict=True) if a.tokens != b.tokens]:
            console.print(f"[red]The two servers gave answers of different length at {uneven} users.[/]")
    offline, served, gaps = record["offline"], record["served"], record["gaps"]
    console.print(
        f"{record['batch']} prompts at once: server {served['tokens_per_second']:.1f} tokens/s, "
        f"generator {offline['tokens_per_second']:.1f}."
    )
    console.print(
        f"A prompt of {gaps['prompt_tokens']} tokens ({gaps['chunks']} chunks) among {gaps['running']} streams: "
        f"longest gap {1e3 * gaps['longest']:.0f} ms, usually {1e3 * gaps['usual']:.0f}; a chunk takes up to "
        f"{1e3 * gaps['chunk']:.0f} and a step {1e3 * gaps['step']:.0f}. "
        f"Its own first token came after {gaps['first_token']:.2f} s."
    )
    goals, why = Table("figure", "is", "goal", ""), busy(record["machine"])
    for goal in record["goals"]:
        high = "at_least" in goal
        met = goal["is"] >= goal["at_least"] if high else goal["is"] <= goal["at_most"]
        verdict = "[green]met[/]" if met else "[red]missed[/]"
        wanted = f"≥ {goal['at_least']:.0%}" if high else f"≤ {goal['at_most']:.0%}"
        goals.add_row(goal["figure"], f"{goal['is']:.1%}", wanted, "[yellow]unknown[/]" if why else verdict)
    console.print(goals)
    if why:
        console.print(f"[yellow]No verdict: {why}.[/]")
    if record["differing"]:
        console.print(f"[red]Server and generator gave different tokens for {record['differing']} prompts.[/]")
    else:
        console.print("[green]Server and generator gave the same tokens.[/]")


if __name__ == "__main__":
    typer.run(main)
