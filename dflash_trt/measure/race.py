"""Lanes take turns, group of prompts by group of prompts, so that a busy machine slows all of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from statistics import median
from typing import Any

from dflash_trt.measure.lanes import Heat, Lane
from dflash_trt.progress import Progress, silent
from dflash_trt.runtime import Statistics


@dataclass(frozen=True)
class Result:
    """What one lane did: `heats[group][round]`, at least one of each."""

    lane: str
    heats: list[list[Heat]]

    @property
    def answers(self) -> list[tuple[int, ...]]:
        """By prompt; greedy answers are the same in every round."""
        return [answer for rounds in self.heats for answer in rounds[0].answers]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def seconds(self) -> float:
        """For all groups: the sum of each one's median over the rounds."""
        return sum(median(heat.seconds for heat in rounds) for rounds in self.heats)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def statistics(self) -> Statistics | None:
        """Acceptance over all prompts, or None for a lane that is not ours."""
        counted = [rounds[0].statistics for rounds in self.heats]
        total = Statistics(counted[0].block_size) if counted[0] else None
        for statistics in counted:
            if total and statistics:
                total.verified += statistics.verified
        return total

    @property
    def step(self) -> dict[str, float]:
        """Mean milliseconds of a decode call in the engine and of any call on the host, and the host's share of all
        time; empty for a lane that is not ours."""
        timings = [heat.timing for rounds in self.heats for heat in rounds if heat.timing]
        if not timings:
            return {}
        host = sum(t.host_seconds for t in timings)
        decode, prefill = sum(t.decode_seconds for t in timings), sum(t.prefill_seconds for t in timings)
        decode_calls = sum(t.decode_calls for t in timings)
        calls = decode_calls + sum(t.prefill_calls for t in timings)
        return {
            "engine_ms": 1e3 * decode / max(decode_calls, 1),
            "host_ms": 1e3 * host / calls,
            "host_share": host / (host + decode + prefill),
        }

    def as_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"lane": self.lane, "tokens": self.tokens, "seconds": self.seconds}
        record |= {"tokens_per_second": self.tokens_per_second, "step": self.step}
        if (statistics := self.statistics) and statistics.block_size > 1:
            record |= {"tau": _number(statistics.tau), "acceptance": list(map(_number, statistics.acceptance))}
        return record


def _number(value: float) -> float | None:
    """JSON has no nan, which stands for a position where nothing was verified."""
    return None if isnan(value) else value


def race(
    lanes: Sequence[Lane],
    groups: Sequence[Sequence[Sequence[int]]],
    max_new_tokens: int,
    *,
    rounds: int = 1,
    progress: Progress = silent,
) -> list[Result]:
    """Every lane answers every group of prompts in every round. Each lane warms up first; the order turns round by
    round, so that none always follows the same other."""
    for lane in lanes:
        progress(f"warming up: {lane.name}", 0)
        lane.answer(groups[0], min(max_new_tokens, 8))
    results = [Result(lane.name, [[] for _ in groups]) for lane in lanes]
    for turn in range(rounds):
        for index, group in enumerate(groups):
            progress(f"round {turn + 1} of {rounds}", (turn * len(groups) + index) / (rounds * len(groups)))
            for lane, result in list(zip(lanes, results, strict=True))[:: -1 if turn % 2 else 1]:
                result.heats[index].append(lane.answer(group, max_new_tokens))
    progress("done", 1)
    return results


def differing(results: Sequence[Result]) -> int:
    """Prompts on which not all lanes gave the same tokens in every round."""
    count = 0
    for index in range(len(results[0].heats)):
        heats = [heat.answers for result in results for heat in result.heats[index]]
        count += sum(len(set(answers)) > 1 for answers in zip(*heats, strict=True))
    return count
