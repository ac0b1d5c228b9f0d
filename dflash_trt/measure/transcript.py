"""What an engine's calls decided and why: the logits behind every choice and every draft of one greedy answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint import Pair
from dflash_trt.graph import SINGLE, place, write_step
from dflash_trt.runtime import Generator, Limits, Request, StepInputs, StepOutputs
from dflash_trt.runtime.ort_session import OrtSession


@dataclass(frozen=True)
class Decision:
    """One call on one sequence."""

    certain: int  # tokens the target had seen before its first choice
    choices: list[int]  # the target's tokens for positions certain, certain + 1, …; all but the last were drafted right
    logits: np.ndarray  # [choices, V] float32, behind them
    block: list[int]  # K: the last choice and the drafts that follow it
    draft_logits: np.ndarray  # [K-1, V] float32, behind the drafts; [0, V] without a drafter


class RecordingSession:
    """A debug graph on ONNX Runtime that keeps what its calls decided. For one sequence at a time."""

    def __init__(self, pair: Pair, directory: Path, limits: Limits):
        self.limits = limits
        placed = place(pair, SINGLE, directory)
        graph = write_step(placed, directory, "verify", dtype="float32", debug=True)
        self._session = OrtSession(graph, limits)
        self.decisions: list[Decision] = []

    def step(self, inputs: StepInputs) -> StepOutputs:
        outputs, debug = self._session.debug_step(inputs)
        given, accepted = int(inputs.n_given[0]), int(outputs.n_accepted[0])
        logits = debug["logits"][0, : accepted + 1]
        self.decisions.append(
            Decision(
                certain=int(inputs.past_len[0]) + given,
                choices=[*inputs.input_ids[0, given : given + accepted].tolist(), int(outputs.next_token[0])],
                logits=logits,
                block=outputs.next_block[0].tolist(),
                draft_logits=debug["draft_logits"][0] if "draft_logits" in debug else logits[:0],
            )
        )
        return outputs

    def move_slot(self, source: int, target: int, length: int) -> None:
        self._session.move_slot(source, target, length)

    def free_slot(self, slot: int) -> None:
        self._session.free_slot(slot)

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], list[Decision]]:
        """Continue `prompt` greedily, past stop tokens: all tokens, the prompt's included, and the decisions."""
        self.decisions = []
        for _ in Generator(self).generate([Request(prompt, max_new_tokens)]):
            pass
        text = list(prompt)
        for decision in self.decisions:
            if decision.certain >= len(prompt):  # earlier choices are for positions that the prompt fills
                text[decision.certain :] = decision.choices
        return text, self.decisions
