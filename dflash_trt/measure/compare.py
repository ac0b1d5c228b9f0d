"""Engines side by side on the same prompts: how far their drafts reach, and whether they say the same.

The first engine is what the others are compared with. Engines of one target must say the same whatever their drafters;
another target, a quantized one for instance, may change the text, and by how much is what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from dflash_trt.checkpoint import Draft, Target
from dflash_trt.engine import Engine
from dflash_trt.engine.fingerprint import fingerprint
from dflash_trt.errors import UserError
from dflash_trt.measure.follow import choices
from dflash_trt.measure.lanes import EngineLane
from dflash_trt.measure.race import Result, differing, race
from dflash_trt.measure.texts import agreement, share
from dflash_trt.measure.verify import read_pair
from dflash_trt.progress import Progress, silent
from dflash_trt.runtime.request import check_prompt

Prompts = Sequence[Sequence[int]]


class Contender(EngineLane):
    """One engine of a comparison, with its drafter."""

    def __init__(self, engine: Engine, name: str, *, threads: int | None = None):
        models = read_pair(engine, draft=True)
        assert models.draft is not None
        super().__init__(engine, draft=True, threads=threads)
        self.name = name
        self.identity = _identity(engine, models.target)
        self.rounds_activations = engine.manifest.rounds_activations
        self.card: dict[str, Any] = {
            "path": str(engine.path),
            "target": engine.manifest.target.name,
            "draft": models.draft.path.name,
            "block_size": engine.limits.block_size,
            "weight_bytes": {"target": _weight_bytes(models.target), "draft": _weight_bytes(models.draft)},
        }

    def follows(self, prompt: Sequence[int], answer: Sequence[int], first: int | None) -> int:
        """How many tokens of `answer` are this engine's choice there; its own answer parts from it at `first`.

        Up to there the two answers have told already.
        """
        if first is None or first >= len(answer):
            return len(answer)
        rest = answer[first + 1 :]
        if not rest:
            return first
        chosen = choices(self._generator.session, [*prompt, *answer], len(prompt) + first + 1)
        return first + sum(a == b for a, b in zip(chosen, rest, strict=True))


def _identity(engine: Engine, target: Target) -> tuple[str, ...]:
    """What decides a target's greedy text: its config, the precision it is computed in, and its weights."""
    dtype = engine.manifest.dtype if engine.manifest.engines else "float32"  # what has no compiled engine runs on a CPU
    files = sorted({ref.file for ref in target.tensors.values()})
    return (repr(target.config), dtype, *map(fingerprint, files))


def _weight_bytes(checkpoint: Target | Draft) -> int:
    return sum(ref.nbytes for ref in checkpoint.tensors.values())


def check_comparable(engines: Sequence[Engine], prompts: Prompts, max_new_tokens: int) -> None:
    """Raise UserError unless all engines read token ids alike and have room for every prompt (token ids)."""
    first, *others = engines
    words = _vocabulary(first)
    for other in others:
        where, fix = f"{first.path} and {other.path}", "compare engines whose targets share one tokenizer"
        if other.manifest.vocab != first.manifest.vocab:
            what = f"the vocabularies have {first.manifest.vocab} and {other.manifest.vocab} tokens"
            raise UserError(what, where=where, fix=fix)
        if theirs := words.items() ^ _vocabulary(other).items():
            word, token = min(theirs, key=lambda item: (item[1], item[0]))
            raise UserError(f"the tokenizers differ, first in token {token} ({word!r})", where=where, fix=fix)
    room = min(engine.limits.max_seq_len for engine in engines)
    for prompt in prompts:
        check_prompt(np.array(prompt), max_new_tokens, max_seq_len=room, vocab=first.manifest.vocab)


def _vocabulary(engine: Engine) -> dict[str, int]:
    return tokenizers.Tokenizer.from_file(str(engine.path / "tokenizer.json")).get_vocab(with_added_tokens=True)


def compare(
    engines: Sequence[Engine],
    groups: Sequence[Prompts],
    max_new_tokens: int,
    *,
    rounds: int = 1,
    threads: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """JSON-able figures of every engine, and of each against the first.

    `groups` hold prompts (token ids) to be answered together. Every engine must have a drafter.
    """
    progress("loading", 0)
    names = labels([engine.path for engine in engines])
    lanes = [Contender(engine, name, threads=threads) for engine, name in zip(engines, names, strict=True)]
    results = race(lanes, groups, max_new_tokens, rounds=rounds, progress=progress)
    prompts = [prompt for group in groups for prompt in group]
    comparisons = []
    for number, lane in enumerate(lanes[1:], 1):
        progress(f"following {names[0]}: {lane.name}", number / len(lanes))
        comparisons.append(_compare(lanes[0], results[0], lane, results[number], prompts))
    progress("done", 1)
    return {
        "engines": [_figures(lane, result) for lane, result in zip(lanes, results, strict=True)],
        "comparisons": comparisons,
        "prompts": len(prompts),
        "broken": _broken(lanes, results),
    }


def _figures(lane: Contender, result: Result) -> dict[str, Any]:
    figures = result.as_json()
    return {"name": figures.pop("lane"), **lane.card, **figures}


def _compare(base: Contender, said: Result, other: Contender, says: Result, prompts: Prompts) -> dict[str, Any]:
    texts = agreement(said.answers, says.answers)
    told = zip(prompts, said.answers, texts.first, strict=True)
    followed = sum(other.follows(prompt, answer, first) for prompt, answer, first in told)
    taus = [result.statistics.tau if result.statistics else float("nan") for result in (says, said)]
    return {
        "engines": [base.name, other.name],
        "same_target": base.identity == other.identity,
        "tau_ratio": taus[0] / taus[1] if np.isfinite(taus).all() else None,
        "next_token_share": share(followed, said.tokens),
        "position_share": texts.position_share,
        "prefix_share": texts.prefix_share,
        "identical_share": share(texts.identical, len(prompts)),
        "identical": texts.identical,
        "first_difference": texts.first,
    }


def _broken(lanes: Sequence[Contender], results: Sequence[Result]) -> list[dict[str, Any]]:
    """Engines of one target that did not say the same on every prompt, in every round."""
    groups: dict[tuple[str, ...], list[tuple[Contender, Result]]] = {}
    for lane, result in zip(lanes, results, strict=True):
        groups.setdefault(lane.identity, []).append((lane, result))
    return [
        {
            "engines": [lane.name for lane, _ in group],
            "differing": count,
            "rounds_activations": group[0][0].rounds_activations,
        }
        for group in groups.values()
        if (count := differing([result for _, result in group]))
    ]


def labels(paths: Sequence[Path]) -> list[str]:
    """A short name for each engine: the directory's, or the path where two share it, with a number where even this is
    equal."""
    names = [path.name or str(path) for path in map(Path.absolute, paths)]
    names = [str(path) if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]
