"""Tokens a step, from published acceptance lengths (`acceptance.yaml`).

Let S(j) be the chance that at least j drafts are accepted. A step that checks K drafts yields, with the target's own
token, tau(K) = 1 + S(1) + … + S(K). Published is tau at one K or at a few. Between two of them the chance that the next
draft is accepted too is taken as constant: S(j) = S(j-1) * r. Where only tau(K) is known this is the common form

    tau(K) = 1 + r + … + r^K = (1 - r^(K+1)) / (1 - r),

and with several K each rate is solved for in turn, so that every published value is met. Beyond the last K its rate
holds on. So 1 <= tau(K) <= K + 1, and tau grows with K.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.document import nearest, read_document
from dflash_trt.errors import UserError

FILE = Path(__file__).with_name("acceptance.yaml")
GROUPS = {  # what people ask for → tasks that are that, of which the mean counts
    "coding": ("humaneval", "mbpp", "livecodebench"),
    "math": ("gsm8k", "math500", "aime25"),
    "chat": ("mtbench", "alpaca"),
}
TASKS = (*(task for tasks in GROUPS.values() for task in tasks), "mean")
CATEGORIES = (*GROUPS, *TASKS)


@dataclass(frozen=True)
class Acceptance:
    """Of one drafter and task: the rate of each run of draft positions, and where it is from."""

    rates: tuple[tuple[int, float], ...]  # (last position of the run, chance that a next draft is accepted)
    source: str
    task: str

    def tokens(self, draft: int) -> float:
        """Expected tokens of a step that checks `draft` drafts."""
        return 1 + sum(self.survival(draft))

    def survival(self, draft: int) -> list[float]:
        """S(1) … S(draft)."""
        chances, alive = [], 1.0
        for position in range(1, draft + 1):
            alive *= next((rate for last, rate in self.rates if position <= last), self.rates[-1][1])
            chances.append(alive)
        return chances


@dataclass(frozen=True)
class Table:
    """One published table."""

    target: str
    method: str
    temperature: float
    nodes: int | None
    source: str
    tau: Mapping[str, Mapping[int, float]]


def fit_rates(tau: Mapping[int, float], source: str = "given", task: str = "mean") -> Acceptance:
    """From tau at one K or more. Raises UserError if no acceptance could yield them."""
    rates: list[tuple[int, float]] = []
    known, alive, tokens = 0, 1.0, 1.0
    for draft, wanted in sorted(tau.items()):
        run = draft - known
        rate = _solve(run, (wanted - tokens) / alive) if run and alive else None
        if rate is None:
            what = f"{wanted:g} tokens a step cannot come from {draft} drafts"
            if known:
                what += f" when {known} of them yield {tokens:g}"
            raise UserError(what, where=source, fix=f"give between 1 and {draft + 1} tokens, more for more drafts")
        rates.append((draft, rate))
        known, alive, tokens = draft, alive * rate**run, wanted
    return Acceptance(tuple(rates), source, task)


def _solve(run: int, wanted: float) -> float | None:
    """The r with r + r^2 + … + r^run = wanted, within 0 … 1; None if there is none."""
    if not -1e-9 <= wanted <= run + 1e-9:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(1, run + 1)) < wanted else (low, middle)
    return high


@functools.cache
def read_tables() -> tuple[Table, ...]:
    return tuple(
        Table(
            target=entry["target"],
            method=entry["method"],
            temperature=entry.get("temperature", 0),
            nodes=entry.get("nodes"),
            source=entry["source"],
            tau=entry["tau"],
        )
        for entry in read_document(FILE).values["tables"]
    )


def find_acceptance(target: str, method: str, category: str, temperature: float = 0) -> Acceptance | None:
    """What is published for a target, the nearest there is to the category; None without a table.

    A task counts first, then its group's tasks together, then all of a table. Raises UserError for an unknown category.
    """
    if category not in CATEGORIES:
        meant = nearest(category, CATEGORIES)
        fix = f"did you mean {meant}?" if meant else f"choose of {', '.join(CATEGORIES)}"
        raise UserError(f"there is no category {category!r}", where="--category", fix=fix)
    tables = [t for t in read_tables() if (t.target, t.method, t.temperature) == (target, method, temperature)]
    group = GROUPS.get(category) or next((tasks for tasks in GROUPS.values() if category in tasks), ())
    for wanted in ((category,), group, TASKS):
        for table in tables:
            if tasks := [task for task in wanted if task in table.tau]:
                label = tasks[0] if len(tasks) == 1 else f"mean of {', '.join(tasks)}"
                return fit_rates(_mean([table.tau[task] for task in tasks]), table.source, label)
    return None


def _mean(columns: list[Mapping[int, float]]) -> dict[int, float]:
    """At each K that all have."""
    shared = set.intersection(*(set(column) for column in columns))
    return {draft: sum(column[draft] for column in columns) / len(columns) for draft in sorted(shared)}


@dataclass(frozen=True)
class Check:
    """The one-rate form, fed with a published tau at the longest K alone, beside what a shorter one is known to do."""

    target: str
    method: str
    task: str
    longest: int
    draft: int
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def check_constant_rate() -> list[Check]:
    """Of every table that has tau at several K."""
    checks = []
    for table in read_tables():
        for task, tau in table.tau.items():
            longest = max(tau)
            one = fit_rates({longest: tau[longest]})
            checks += [
                Check(table.target, table.method, task, longest, draft, published, one.tokens(draft))
                for draft, published in tau.items()
                if draft != longest
            ]
    return checks
