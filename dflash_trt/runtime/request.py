"""What a caller asks for, and what it gets back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from dflash_trt.errors import UserError
from dflash_trt.runtime.statistics import Statistics

FinishReason = Literal["stop", "length", "cancelled"]

MAX_TOP_K = 1024  # the step graph sorts no more than the 1024 most likely tokens
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Sampling:
    """How the target chooses a token from its logits. The default is greedy.

    `seed` alone, with the token's position, decides every draw: the text does not depend on batch, chunks or drafter.
    """

    temperature: float = 0.0  # 0 = greedy
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    seed: int = 0

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.top_k <= MAX_TOP_K, "top_k", self.top_k, f"between 0 (off) and {MAX_TOP_K}")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "between 0 and 2^64 - 1")


@dataclass(frozen=True)
class Request:
    """One prompt to continue. A `str` prompt is tokenized as it is; apply a chat template before."""

    prompt: str | Sequence[int] | np.ndarray  # text or token ids
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence tokens
    ignore_eos: bool = False  # go on past the model's own end-of-sequence tokens
    stop: tuple[str, ...] = ()  # strings before which the text ends
    id: str = field(default_factory=lambda: f"request-{next(_numbers)}")

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(all(self.stop), "stop", list(self.stop), "strings with at least one character")


@dataclass(frozen=True)
class Output:
    """What one step added to one request."""

    request_id: str
    token_ids: tuple[int, ...]  # without the stop token
    text: str  # may lag behind `token_ids` while a character, or what may be a stop string, is incomplete
    finish_reason: FinishReason | None  # None: more will follow
    statistics: Statistics  # of the request, so far; a step that a stop string cuts counts whole

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class PromptTooLong(UserError):
    """Prompt and answer together do not fit into a slot."""


def check_prompt(ids: np.ndarray, max_new_tokens: int, *, max_seq_len: int, vocab: int | None) -> None:
    """Raise UserError unless the engine can continue `ids` [P] by `max_new_tokens` tokens."""
    if not len(ids):
        raise UserError("the prompt has no tokens", where="prompt", fix="give at least one token")
    if len(ids) + max_new_tokens > max_seq_len:
        raise PromptTooLong(
            f"{len(ids)} prompt tokens + max_new_tokens {max_new_tokens} exceed the engine's max_seq_len {max_seq_len}",
            where="prompt",
            fix="shorten either, or convert again with a larger --max-seq-len",
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocab if vocab is not None else False))
    if len(outside):
        raise UserError(
            f"token id {ids[outside[0]]} is outside the vocabulary of {vocab or 'any model'}",
            where=f"prompt position {outside[0]}",
            fix="use the target's own tokenizer",
        )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}", where="request", fix=f"it must be {allowed}")
