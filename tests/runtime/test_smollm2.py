"""The shipped pair, whole answers: the engine against transformers and against z-lab's wheel.

The answers are checked against the references by teacher forcing: every token of a text must be what the reference
chooses after the tokens before it, which makes the text the reference's own greedy text, and every block what the
wheel's drafter proposes there. Where the two best logits lie within TIE, float32 decides nothing: either is right, and
such places are counted and told.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dflash import model as wheel

from dflash_trt.checkpoint import read_draft, read_target
from dflash_trt.engine import Engine, convert
from dflash_trt.measure.agreement import TIE
from dflash_trt.measure.oracles import DraftOracle, TargetOracle
from dflash_trt.measure.prompts import encode_prompts
from dflash_trt.runtime import Request, Tokenizer
from dflash_trt.runtime.open import open_generator
from examples.smollm2.prepare import prepare
from tests.runtime import mpi

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # two minutes on two free cores

DRAFTER = Path(__file__).parents[2] / "examples/smollm2/drafter"
LENGTH = 128
STRIDE = 3  # blocks are compared in every third answer: the wheel works through the whole text for each
PLUGIN, SHORT = 4, 32  # prompts and tokens to compare plugin ops and ranks on
PROGRAM = Path(__file__).parent / "programs" / "answer.py"
LOOPS = 3  # prompts on which the wheel's own loop runs


@dataclass
class Answer:
    """What the engine said after a prompt, stop token included, and what it drafted on the way."""

    prompt: list[int]
    new: list[int] = field(default_factory=list)
    stopped: bool = False
    steps: list[int] = field(default_factory=list)  # tokens that each call brought, that of the prompt first
    blocks: dict[int, list[int]] = field(default_factory=dict)  # by tokens before it: the last token, K-1 drafts

    @property
    def text(self) -> list[int]:
        return self.prompt + self.new


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    return convert(prepare(), DRAFTER, tmp_path_factory.mktemp("smollm2") / "engine", max_batch=8, max_seq_len=512)


@pytest.fixture(scope="module")
def prompts(engine) -> list[list[int]]:
    return encode_prompts(Tokenizer(engine.path), json.loads((DRAFTER / "heldout_prompts.json").read_text()))


@pytest.fixture(scope="module")
def dflash(engine, prompts) -> list[Answer]:
    return answer(engine, prompts, draft=True)


@pytest.fixture(scope="module")
def target(engine) -> TargetOracle:
    return TargetOracle(read_target(Path(engine.manifest.target.path)))


@pytest.fixture(scope="module")
def drafter(target) -> DraftOracle:
    return DraftOracle(read_draft(DRAFTER), target)


def answer(engine: Engine, prompts: list[list[int]], *, draft: bool, length: int = LENGTH) -> list[Answer]:
    """All prompts, eight at a time, greedily."""
    generator = open_generator(engine, draft=draft)
    answers = {generator.add(Request(prompt, length)): Answer(prompt) for prompt in prompts}
    while generator.busy:
        for out in generator.step():
            said = answers[out.request_id]
            said.steps.append(len(out.token_ids))
            said.new += out.token_ids
            said.stopped = out.finish_reason == "stop"
        slots = generator.scheduler.slots
        for slot, sequence in slots.tenant.items():
            if slots.past_len[slot] >= slots.prompt_len[slot]:
                block = slots.block[slot].tolist()
                answers[sequence.request.id].blocks[int(slots.past_len[slot])] = block
    return list(answers.values())


def test_tokens_blocks_and_accepted_lengths_are_those_of_the_references(
    engine, prompts, dflash, target, drafter, capsys
):
    plain = answer(engine, prompts, draft=False)
    counts: Counter[str] = Counter()
    for number, (said, alone) in enumerate(zip(dflash, plain, strict=True)):
        logits, states = target.read(said.text)  # once for all that is asked of it: transformers is slow
        logits = logits[len(said.prompt) - 1 :]
        counts["ties"] += compare_tokens(said, alone, logits, engine.manifest.eos_ids)
        if number % STRIDE == 0:
            counts += compare_blocks(said, states, drafter)
    assert counts["agreeing"] >= 0.995 * counts["blocks"]
    tokens = sum(len(said.new) for said in dflash)
    with capsys.disabled():
        print(f"\n{len(dflash)} prompts, {tokens} tokens: the same with drafter, without, in transformers;", end=" ")
        print(
            f"{counts['blocks']} blocks as the wheel proposes them, {counts['agreeing']} accepted lengths agree;",
            end=" ",
        )
        print(f"{counts['ties']} ties")


def compare_tokens(said: Answer, alone: Answer, logits: np.ndarray, eos_ids: tuple[int, ...]) -> int:
    """Assert that the answers with drafter and without are transformers'; returns the ties."""
    ties = sum(check_choice(token, scores) for token, scores in zip(said.new, logits, strict=False))
    assert not said.stopped or logits[-1].argmax() in eos_ids
    if said.new != alone.new:
        place = next(i for i, (a, b) in enumerate(zip(said.new, alone.new, strict=False)) if a != b)
        ties += check_choice(alone.new[place], logits[place])
    return ties


def compare_blocks(said: Answer, states: Any, drafter: DraftOracle) -> Counter[str]:
    """Assert that every block is the wheel's; counts blocks, ties and accepted lengths that agree."""
    counts: Counter[str] = Counter()
    for place, following in itertools.pairwise(sorted(said.blocks)):
        last, *drafts = said.blocks[place]
        scores = drafter.draft(states, place, last)  # [K-1, V]
        counts["ties"] += sum(map(check_choice, drafts, scores))
        right = map(int.__eq__, scores.argmax(-1).tolist(), said.text[place + 1 :])
        counts["blocks"] += 1
        counts["agreeing"] += sum(itertools.takewhile(bool, right)) == following - place - 1
    return counts


def check_choice(token: int, scores: np.ndarray) -> bool:
    """Assert that `token` has the highest of `scores` [V]; True if another has a higher one by less than TIE."""
    assert scores[token] >= scores.max() - TIE
    return token != scores.argmax()


def test_the_wheels_own_loop_takes_the_same_steps(engine, dflash, target, drafter, monkeypatch):
    monkeypatch.setattr(wheel, "_cuda_time", time.perf_counter)  # its stopwatch needs a GPU
    eos, block_size = list(engine.manifest.eos_ids), engine.limits.block_size
    for said in dflash[:LOOPS]:
        prompt = torch.tensor([said.prompt])
        result = wheel.dflash_generate(drafter.model, target.model, prompt, LENGTH, eos, return_stats=True)
        assert result.output_ids[0, prompt.shape[1] :].tolist()[: len(said.new)] == said.new
        # Near the end of its budget the wheel drafts shorter blocks, and other ones; ours only verifies less of them.
        whole = sum(np.cumsum(result.acceptance_lengths) + block_size < LENGTH)
        assert result.acceptance_lengths[:whole] == said.steps[1:][:whole]


def test_plugin_ops_give_the_tokens_of_native_ops(engine, prompts, dflash, tmp_path):
    """On a CPU the plugins are functions of standard ops; with the drafter, and without."""
    plugin = convert(prepare(), DRAFTER, tmp_path / "engine", max_batch=8, max_seq_len=512, ops="plugin")
    for draft in (True, False):
        for ours, said in zip(answer(plugin, prompts[:PLUGIN], draft=draft, length=SHORT), dflash, strict=False):
            assert ours.new == said.new[:SHORT]


def test_three_ranks_give_the_tokens_of_one(prompts, dflash, tmp_path):
    """Three query heads and one key/value head each, under mpirun; with the drafter, and without."""
    ranks = convert(prepare(), DRAFTER, tmp_path / "engine", max_batch=8, max_seq_len=512, tp=3)
    few = [list(map(int, prompt)) for prompt in prompts[:PLUGIN]]
    done = mpi.run(3, sys.executable, PROGRAM, json.dumps(few), SHORT, ranks.path)
    assert done.returncode == 0, done.stderr
    for texts in json.loads(done.stdout):
        for tokens, said in zip(texts, dflash, strict=False):
            assert tokens[: len(said.new)] == said.new[:SHORT]
