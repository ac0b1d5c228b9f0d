"""`dflash-trt generate`: answer prompts with an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from dflash_trt.errors import UserError
from dflash_trt.launcher import find_place
from dflash_trt.measure.prompts import encode_prompts, read_prompts
from dflash_trt.runtime import Generator, Output, Request, Sampling, Tokenizer
from dflash_trt.runtime.lockstep import follow, lead
from dflash_trt.runtime.open import make_generator, open_engine_on, open_session
from dflash_trt.runtime.world import find_world


def generate(
    directory: Path = typer.Argument(help="An engine directory."),
    prompt: list[str] = typer.Option([], help="A prompt; may be given several times."),
    prompts: Path = typer.Option(None, help="More of them: a .json list, a .jsonl file, or one a line."),
    max_new_tokens: int = typer.Option(128, help="Tokens of an answer at most."),
    temperature: float = typer.Option(0.0, help="0: greedy."),
    top_p: float = typer.Option(1.0, help="Draw from the likeliest tokens of this share. 1: all."),
    top_k: int = typer.Option(0, help="Draw from so many of the likeliest tokens. 0: all."),
    seed: int = typer.Option(0, help="The same seed gives the same text."),
    stop: list[str] = typer.Option([], help="Text before which an answer ends; may be given several times."),
    no_draft: bool = typer.Option(False, "--no-draft", help="One token a step, from the target alone."),
    raw: bool = typer.Option(False, "--raw", help="Prompts as plain text, without the chat template."),
    batch: int = typer.Option(None, min=1, help="Prompts answered at once. Default: all slots of the engine."),
    threads: int = typer.Option(None, min=1, help="Of one operator, on a CPU. Default: all cores, shared by ranks."),
    stats: bool = typer.Option(False, "--stats", help="Then say how the drafter did and where the time went."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object a prompt."),
) -> None:
    """Answer prompts. The text of the first appears as it comes, the others follow in order.

    An engine of several ranks is started with mpirun; then rank 0 reads and prints for all of them.
    """
    with find_world() as world:
        sampling = world.together("reading options", lambda: Sampling(temperature, top_p, top_k, seed))
        texts = world.together("reading prompts", lambda: [] if world.rank else _read_texts(prompt, prompts))
        engine = open_engine_on(world, directory, "generate", no_draft=no_draft, batch=batch)
        requests = world.together(
            "encoding prompts",
            lambda: [
                Request(ids, max_new_tokens, sampling, stop=tuple(stop), id=str(number))
                for number, ids in enumerate(encode_prompts(Tokenizer(directory), texts, raw=raw) if texts else [])
            ],
        )
        draft = engine.manifest.draft is not None and not no_draft
        session = open_session(engine, draft=draft, threads=threads, max_batch=batch, world=world)
        if world.rank:
            follow(session, world)
            return
        with lead(session, world) as leading:
            generator = make_generator(engine, leading, draft=draft)
            show = _show_json if as_json else _show_text
            show(texts, _in_order(requests, generator.generate(requests)))
        if stats:
            Console(stderr=True).print(_table(generator))


def _read_texts(prompts: Sequence[str], file: Path | None) -> list[str]:
    texts = [*prompts, *(_read_file(file) if file else [])]
    if not texts:
        raise UserError("there is no prompt", where="generate", fix="give --prompt TEXT or --prompts FILE")
    return texts


def _read_file(file: Path) -> list[str]:
    if file.suffix != ".jsonl":
        return read_prompts(file)
    try:
        values = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the prompts: {error}", where=file, fix="give a JSON value a line") from None
    prompts = []
    for number, value in enumerate(values, 1):
        prompt = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(prompt, str) or not prompt:
            fix = 'each line must be "TEXT" or {"prompt": "TEXT"}'
            raise UserError("not a prompt", where=f"{file}, entry {number}", fix=fix)
        prompts.append(prompt)
    return prompts


def _in_order(requests: Sequence[Request], outputs: Iterable[Output]) -> Iterator[Output]:
    """Outputs of the first unfinished request as they come, those of later ones when it is their turn."""
    held: dict[str, list[Output]] = {request.id: [] for request in requests}
    for out in outputs:
        held[out.request_id].append(out)
        while held:
            turn = next(iter(held))
            ready, held[turn] = held[turn], []
            yield from ready
            if not ready or not ready[-1].finished:
                break
            del held[turn]


def _show_text(texts: Sequence[str], outputs: Iterable[Output]) -> None:
    begun = set()
    plain = find_place().size > 1  # mpirun gives its ranks a terminal, wherever its own output goes
    for out in outputs:
        if len(texts) > 1 and out.request_id not in begun:
            begun.add(out.request_id)
            prompt = texts[int(out.request_id)]
            typer.echo(prompt if plain else typer.style(prompt, bold=True))
        typer.echo(out.text, nl=False)
        if out.finished:
            typer.echo("\n" if int(out.request_id) < len(texts) - 1 else "")


def _show_json(texts: Sequence[str], outputs: Iterable[Output]) -> None:
    got: list[Output] = []
    for out in outputs:
        got.append(out)
        if out.finished:
            typer.echo(json.dumps(_record(texts[int(out.request_id)], got), ensure_ascii=False))
            got = []


def _record(prompt: str, outputs: Sequence[Output]) -> dict[str, Any]:
    statistics = outputs[-1].statistics
    return {
        "prompt": prompt,
        "text": "".join(out.text for out in outputs),
        "token_ids": [token for out in outputs for token in out.token_ids],
        "finish_reason": outputs[-1].finish_reason,
        "prompt_tokens": statistics.prompt_tokens,
        "new_tokens": statistics.new_tokens,
        "tau": _number(statistics.tau),
        "acceptance": [_number(share) for share in statistics.acceptance],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)  # JSON has no nan


def _table(generator: Generator) -> Table:
    statistics, timing = generator.statistics, generator.timing
    seconds = timing.prefill_seconds + timing.decode_seconds + timing.host_seconds
    table = Table(show_header=False)
    table.add_row("tokens", f"{statistics.prompt_tokens} of prompts, {statistics.new_tokens} new")
    table.add_row("speed", f"{statistics.new_tokens / seconds:.1f} tokens/s")
    if statistics.block_size > 1:
        table.add_row("acceptance length", f"{statistics.tau:.2f}")
        table.add_row("… by block position", " ".join(f"{share:.0%}" for share in statistics.acceptance))
    table.add_row("prefill", f"{timing.prefill_seconds:.2f} s in {timing.prefill_calls} calls")
    table.add_row("decode", f"{timing.decode_seconds:.2f} s in {timing.decode_calls} calls")
    table.add_row("host", f"{timing.host_seconds:.3f} s, {timing.host_seconds / seconds:.1%}")
    return table
