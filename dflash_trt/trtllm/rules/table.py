"""What a rule is, and the table of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dflash_trt.document import Keys
from dflash_trt.trtllm.deployment import SEVERITIES, Deployment, Finding


@dataclass(frozen=True)
class Fault:
    """What a rule found; `keys`: where in the file, `severity`: if it differs from the rule's own."""

    what: str
    fix: str
    keys: Keys = ()
    severity: str | None = None


Check = Callable[[Deployment], Iterator[Fault]]


@dataclass(frozen=True)
class Row:
    """One row of `check --list` and docs/preflight.md."""

    id: str
    severity: str
    title: str  # what is asked for
    why: str  # what happens otherwise
    source: str  # who says so

    def finding(self, fault: Fault, line: int | None = None) -> Finding:
        return Finding(self.id, fault.severity or self.severity, fault.what, self.why, self.source, fault.fix, line)


@dataclass(frozen=True)
class Rule(Row):
    """A row and the function that judges by it."""

    check: Check

    def findings(self, deployment: Deployment) -> Iterator[Finding]:
        for fault in self.check(deployment):
            yield self.finding(fault, deployment.line(fault.keys) if fault.keys else None)


RULES: dict[str, Rule] = {}


def rule(id: str, severity: str, title: str, *, why: str, source: str) -> Callable[[Check], Check]:
    """Enter a check in the table. `id` never changes its meaning, nor is one used again."""
    if severity not in SEVERITIES or id in RULES:
        raise AssertionError(f"{id} is no new rule")

    def enter(check: Check) -> Check:
        RULES[id] = Rule(id, severity, title, why, source, check)
        return check

    return enter
