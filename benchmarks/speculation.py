"""DFlash on ONNX Runtime against the dflash wheel's own loop, transformers and our own autoregressive engine.

    python -m benchmarks.speculation [--prompts 8 --max-new-tokens 64 --rounds 3 --threads N --json FILE]

One process, one pair (SmolLM2-135M-Instruct and its drafter), float32, as many threads for each; the lanes take turns
and the medians count. Then the host's share of a step with eight sequences at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from dflash_trt.commands.progress import progress_bar
from dflash_trt.engine import Engine, convert, open_engine
from dflash_trt.measure.lanes import EngineLane, Heat
from dflash_trt.measure.machine import busy, describe_machine
from dflash_trt.measure.oracles import DraftOracle, TargetOracle, load_oracle
from dflash_trt.measure.prompts import encode_prompts, read_prompts
from dflash_trt.measure.race import Result, differing, race
from dflash_trt.measure.verify import read_pair
from dflash_trt.runtime import Tokenizer
from examples.smollm2.prepare import WORK, prepare

DRAFTER = Path("examples/smollm2/drafter")
BATCH = 8


class TransformersLane:
    """The target alone: `generate` with its own cache."""

    name = "transformers"

    def __init__(self, target: TargetOracle, stop: Sequence[int]):
        self._torch, self._model, self._stop = load_oracle("torch"), target.model, list(stop)

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Heat:
        start = time.perf_counter()
        answers = [self._answer(prompt, max_new_tokens) for prompt in prompts]
        return Heat(answers, time.perf_counter() - start)

    def _answer(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        ids = self._torch.tensor([list(prompt)])
        mask = self._torch.ones_like(ids)
        text = self._model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=self._stop
        )
        return _without(self._stop, text[0, len(prompt) :].tolist())


class WheelLane(TransformersLane):
    """The pair in z-lab's reference loop."""

    name = "dflash wheel"

    def __init__(self, target: TargetOracle, drafter: DraftOracle, stop: Sequence[int]):
        super().__init__(target, stop)
        self._drafter = drafter.model

    def _answer(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[int, ...]:
        ids = self._torch.tensor([list(prompt)])
        text = self._drafter.spec_generate(self._model, ids, max_new_tokens, self._stop)
        return _without(self._stop, text[0, len(prompt) :].tolist())


def main(
    prompts: int = typer.Option(8, min=1, help="Of the held-out ones."),
    max_new_tokens: int = typer.Option(64, min=1),
    rounds: int = typer.Option(3, min=1),
    threads: int = typer.Option(None, min=1, help="Of every lane. Default: all cores."),
    json_file: Path = typer.Option(None, "--json", help="Also write the figures here."),
) -> None:
    engine, machine = _engine(), describe_machine(threads, "torch", "transformers", "dflash")
    load_oracle("torch").set_num_threads(machine["threads"])
    ids = encode_prompts(Tokenizer(engine.path), read_prompts(DRAFTER / "heldout_prompts.json"))
    with progress_bar() as progress:
        progress("loading", 0)
        models, stop = read_pair(engine, draft=True), engine.manifest.eos_ids
        assert models.draft is not None
        target = TargetOracle(models.target)
        wheel = WheelLane(target, DraftOracle(models.draft, target), stop)
        dflash, plain = (EngineLane(engine, draft=draft, threads=threads) for draft in (True, False))
        lanes = [dflash, wheel, TransformersLane(target, stop), plain]
        results = race(lanes, [[prompt] for prompt in ids[:prompts]], max_new_tokens, rounds=rounds, progress=progress)
        [batched] = race([dflash], [ids[:BATCH]], max_new_tokens, rounds=rounds, progress=progress)
    settings = {"prompts": prompts, "max_new_tokens": max_new_tokens, "rounds": rounds}
    record = _record(results, batched) | {"machine": machine, "settings": settings}
    _show(Console(), record)
    if json_file:
        json_file.write_text(json.dumps(record, indent=2) + "\n")


def _engine() -> Engine:
    directory = WORK / "engine"
    return open_engine(directory) if directory.exists() else convert(prepare(), DRAFTER, directory)


def _without(stop: Sequence[int], answer: list[int]) -> tuple[int, ...]:
    end = next((index for index, token in enumerate(answer) if token in stop), len(answer))
    return tuple(answer[:end])


def _record(results: Sequence[Result], batched: Result) -> dict[str, Any]:
    speed = {result.lane: result.tokens_per_second for result in results}
    ours = speed["DFlash"]
    return {
        "lanes": [result.as_json() for result in results],
        "batched": batched.as_json(),
        "differing": differing(results),
        "goals": [
            {"figure": "against the dflash wheel", "is": ours / speed["dflash wheel"], "at_least": 1.5},
            {"figure": "against transformers", "is": ours / speed["transformers"], "at_least": 1.3},
            {"figure": "against our own autoregressive engine", "is": ours / speed["autoregressive"], "at_least": 1.0},
            {"figure": f"host's share of a step at batch {BATCH}", "is": batched.step["host_share"], "at_most": 0.03},
        ],
    }


def _show(console: Console, record: dict[str, Any]) -> None:
    lanes = Table("batch 1", "tokens/s", "tau")
    for lane in record["lanes"]:
        lanes.add_row(lane["lane"], f"{lane['tokens_per_second']:.1f}", f"{lane['tau']:.2f}" if "tau" in lane else "")
    console.print(lanes)
    goals, why = Table("figure", "is", "goal", ""), busy(record["machine"])
    for goal in record["goals"]:
        high = "at_least" in goal
        met = goal["is"] >= goal["at_least"] if high else goal["is"] <= goal["at_most"]
        value, wanted = (f"{goal['is']:.2f}x", f"≥ {goal['at_least']:.2g}x") if high else (f"{goal['is']:.1%}", "≤ 3%")
        verdict = "[green]met[/]" if met else "[red]missed[/]"
        goals.add_row(goal["figure"], value, wanted, "[yellow]unknown[/]" if why else verdict)
    console.print(goals)
    batched = record["batched"]
    console.print(f"Batch {BATCH}: {batched['tokens_per_second']:.1f} tokens/s.")
    if why:
        console.print(f"[yellow]No verdict: {why}; references in torch suffer more from that than we do.[/]")
    if record["differing"]:
        console.print(f"[red]The lanes gave different tokens for {record['differing']} prompts.[/]")
    else:
        console.print("[green]All lanes gave the same tokens.[/]")


if __name__ == "__main__":
    typer.run(main)
