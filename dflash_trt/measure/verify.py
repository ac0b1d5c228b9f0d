"""An engine directory against the libraries its checkpoints come from, over whole greedy answers.

The answers come from the engine's own graph, all prompts at once, and from its debug twin, prompt by prompt; both must
be the same. Every choice and every draft of the twin is then compared with what a reference says at that point of the
same text. A text whose every token is the reference's choice is, token by token, the reference's greedy text; checking
it so has the advantage that one tie does not spoil the rest of an answer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflash_trt.checkpoint import Pair, pair, read_draft, read_target
from dflash_trt.engine import Engine
from dflash_trt.errors import UserError
from dflash_trt.measure.agreement import Agreement
from dflash_trt.measure.oracles import DraftOracle, TargetOracle
from dflash_trt.measure.transcript import RecordingSession
from dflash_trt.progress import Progress, silent
from dflash_trt.runtime import Generator, Limits, Request, Session
from dflash_trt.runtime.ort_session import OrtSession


@dataclass
class Verdict:
    """What came out of it."""

    prompts: int
    target: Agreement = field(default_factory=Agreement)
    draft: Agreement | None = None  # None: not compared
    differing: int = 0  # prompts on which the engine's own graph and its debug twin part

    @property
    def holds(self) -> bool:
        return self.target.holds and (self.draft is None or self.draft.holds) and not self.differing


def verify(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    draft: bool = True,
    progress: Progress = silent,
) -> Verdict:
    """Continue `prompts` (token ids) greedily and compare.

    `draft`: the engine with its drafter, or its autoregressive baseline. Raises UserError if a reference is
    absent or the target is W4A4.
    """
    if engine.manifest.rounds_activations:
        raise UserError(
            "the target rounds its activations to 4 bits (W4A4), which no reference can be compared with over a text",
            where=engine.path,
            fix="compare engines with `bench --compare`; docs/nvfp4.md says why, and what was compared",
        )
    models = read_pair(engine, draft=draft)
    progress("loading the references", 0)
    target = TargetOracle(models.target)
    drafter = DraftOracle(models.draft, target) if models.draft else None
    built = engine.limits
    limits = Limits(built.max_batch, built.max_seq_len, built.block_size if draft else 1, built.max_query)
    progress("answering all prompts at once", 0)
    answers = answer_together(OrtSession(engine.graph(draft=draft), limits), prompts, max_new_tokens)
    quantization = models.draft.quantization if models.draft else None
    rounded = bool(quantization and any(quantization.packed.values()))
    verdict = Verdict(len(prompts), draft=Agreement(rounded=rounded) if drafter else None)
    with tempfile.TemporaryDirectory() as folder:
        session = RecordingSession(models, Path(folder), limits)
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            progress(f"comparing prompt {number + 1} of {len(prompts)}", number / len(prompts))
            text, decisions = session.answer(prompt, max_new_tokens)
            verdict.differing += text[len(prompt) :][:max_new_tokens] != answer
            logits, states = target.read(text)
            for decision in decisions:
                positions = slice(decision.certain - 1, decision.certain - 1 + len(decision.choices))
                verdict.target.add(decision.logits, decision.choices, logits[positions])
                if drafter and verdict.draft:
                    proposed = drafter.draft(states, decision.certain + len(decision.choices) - 1, decision.block[0])
                    verdict.draft.add(decision.draft_logits, decision.block[1:], proposed)
    progress("done", 1)
    return verdict


def answer_together(session: Session, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy tokens for every prompt, past stop tokens."""
    requests = [Request(prompt, max_new_tokens) for prompt in prompts]
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    for out in Generator(session).generate(requests):
        answers[out.request_id] += out.token_ids
    return list(answers.values())


def read_pair(engine: Engine, *, draft: bool) -> Pair:
    """The checkpoints an engine was made from."""
    target = read_target(Path(engine.manifest.target.path))
    if not draft or engine.manifest.draft is None:
        return Pair(target, None)
    return pair(target, read_draft(Path(engine.manifest.draft.path), engine.limits.block_size))
