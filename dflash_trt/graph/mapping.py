"""Over which ranks a copy of an engine is spread, and what falls to each of them.

A rank is one process with one GPU. Attention, dense MLPs and the vocabulary are split over `tp` ranks; a mixture of
experts is split over all of them: by expert into `ep` groups, and within a group by the experts' width.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mapping:
    """`tp` divides `ep` or the other way round."""

    tp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Ranks of one copy."""
        return max(self.tp, self.ep)


@dataclass(frozen=True)
class Rank:
    """One rank's place. Where `tp` is less than the world, groups of `tp` ranks each hold all of attention."""

    mapping: Mapping = Mapping()
    number: int = 0

    @property
    def everybody(self) -> tuple[int, ...]:
        """The ranks that together hold all experts."""
        return tuple(range(self.mapping.world))

    @property
    def tp_group(self) -> tuple[int, ...]:
        """The ranks that together hold attention, dense MLPs and the vocabulary, this one among them."""
        first = self.number - self.tp_rank
        return tuple(range(first, first + self.mapping.tp))

    @property
    def tp_rank(self) -> int:
        """Which part of them falls to this rank."""
        return self.number % self.mapping.tp

    @property
    def expert_widths(self) -> int:
        """Into how many parts the width of an expert is cut."""
        return self.mapping.world // self.mapping.ep

    @property
    def ep_rank(self) -> int:
        """Which group of experts falls to this rank."""
        return self.number // self.expert_widths

    @property
    def expert_width_rank(self) -> int:
        """Which part of their width."""
        return self.number % self.expert_widths

    def experts(self, count: int) -> range:
        """Which of `count` experts this rank holds."""
        each = count // self.mapping.ep
        return range(self.ep_rank * each, (self.ep_rank + 1) * each)


SINGLE = Rank()
