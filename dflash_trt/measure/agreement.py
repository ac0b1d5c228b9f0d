"""How far an engine and its references agree, number by number and token by token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

TIE = 1e-4  # two logits this close are a tie: either token is right in float32
TOLERANCE = 1e-4  # of the largest logit: rounding of float32 sums taken in another order
STEPPED = 0.1  # of all tokens, how many may be off where activations are rounded to 4 bits


@dataclass
class Agreement:
    """Counts over everything compared so far. Tokens that differ are `ties` or `wrong`.

    Where activations are `rounded` to 4 bits, one that lies on the edge between two values falls on either side by the
    last bit of a float32 sum. Tokens behind such a step have other logits; they are counted in `stepped`, not judged,
    and must be few.
    """

    rounded: bool = False
    stepped: int = 0
    tokens: int = 0
    ties: int = 0
    wrong: int = 0
    difference: float = 0.0  # of logits, largest
    scale: float = 0.0  # largest logit

    def add(self, logits: np.ndarray, tokens: Iterable[int], reference: np.ndarray) -> None:
        """Compare `logits` [n, V] and the `tokens` [n] chosen by them with the logits of a reference."""
        tokens = np.array([*tokens])
        if self.rounded:
            near = np.abs(logits - reference).max(-1) <= TOLERANCE * np.abs(reference).max(initial=0.0)
            self.stepped += int(np.count_nonzero(~near))
            self.tokens += int(np.count_nonzero(~near))
            logits, tokens, reference = logits[near], tokens[near], reference[near]
        self.difference = max(self.difference, float(np.abs(logits - reference).max(initial=0.0)))
        self.scale = max(self.scale, float(np.abs(reference).max(initial=0.0)))
        for token, row in zip(tokens, reference, strict=True):
            self.tokens += 1
            if token != row.argmax():
                tie = row.max() - row[token] <= TIE
                self.ties += tie
                self.wrong += not tie

    @property
    def relative(self) -> float:
        return self.difference / self.scale if self.scale else 0.0

    @property
    def holds(self) -> bool:
        return self.wrong == 0 and self.relative <= TOLERANCE and self.stepped <= STEPPED * self.tokens
