"""How far two engines' answers to the same prompts agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextAgreement:
    """One entry a prompt. Lengths are those of the longer answer: where one has ended the two do not agree."""

    lengths: list[int]
    equal: list[int]  # positions at which both answers hold the same token
    first: list[int | None]  # position of the first difference, from 0; None: the answers are the same

    @property
    def identical(self) -> int:
        """Prompts whose answers are the same."""
        return self.first.count(None)

    @property
    def prefix_share(self) -> float | None:
        """Share of all positions that lie before the first difference; None if nothing was answered."""
        before = (size if first is None else first for size, first in zip(self.lengths, self.first, strict=True))
        return share(sum(before), sum(self.lengths))

    @property
    def position_share(self) -> float | None:
        """Share of all positions that hold the same token."""
        return share(sum(self.equal), sum(self.lengths))


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> TextAgreement:
    """Compare answers (token ids, by prompt)."""
    pairs = list(zip(ours, theirs, strict=True))
    return TextAgreement(
        lengths=[max(len(a), len(b)) for a, b in pairs],
        equal=[sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs],
        first=[first_difference(a, b) for a, b in pairs],
    )


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two answers part; where the shorter ends if it begins the longer; None if they are the same."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
