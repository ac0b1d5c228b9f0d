"""Continuous batching: what each slot does in the next call.

A request waits, is admitted to a slot, prefills its prompt chunk by chunk, decodes, and finishes. `plan` describes the
next call, `commit` takes in what that call decided.

Live slots stay dense: a hole is given to a waiting request, else the last live slot moves into it. A call spans a
contiguous range of slots, and a row inside it that has nothing to do is idle (n_valid = 0). The graph writes to the
caches of idle rows too, at positions `past_len …`, and that is harmless: no call writes below past_len, and whatever
lies at or above it is overwritten by the call that commits the position, before anything reads it. The same holds for
the padding behind short chunks and for rejected drafts, and it is why a new tenant needs no cleared cache.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dflash_trt.runtime.request import FinishReason
from dflash_trt.runtime.sampling import uniforms
from dflash_trt.runtime.session import Session, StepInputs, StepOutputs
from dflash_trt.runtime.slots import Sequence, Slots
from dflash_trt.runtime.statistics import Statistics

# split: a call holds one prefill chunk or all decode rows, in turn; no row is padded to a chunk's length (CPU).
# mixed: a call holds a chunk of every prefilling request and all decode rows; fewer calls read the weights (GPU).
Policy = Literal["split", "mixed"]


@dataclass(frozen=True)
class Event:
    """What happened to a sequence."""

    sequence: Sequence
    tokens: list[int]  # new ones, without a stop token
    finish_reason: FinishReason | None
    statistics: Statistics  # of the sequence, up to here


class Scheduler:
    """Plans the calls of `session`, which someone else makes. Prefill chunks are `prefill_chunk` tokens at most."""

    def __init__(self, session: Session, *, policy: Policy = "split", prefill_chunk: int | None = None):
        self.limits = limits = session.limits
        self.policy = policy
        self.chunk = min(prefill_chunk or limits.max_query, limits.max_query)
        self.waiting: deque[Sequence] = deque()
        self.slots = Slots(limits.max_batch, limits.block_size)
        self.statistics = Statistics(limits.block_size)
        self._session = session
        self._column = np.arange(limits.block_size)
        self._call: StepInputs | None = None
        self.prefilled = False  # did the last call hold a prefill chunk

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those that wait."""
        self.waiting.append(sequence)

    def cancel(self, request_id: str) -> Event | None:
        """Drop a request between two calls; None if there is no such request (any more)."""
        for sequence in self.waiting:
            if sequence.request.id == request_id:
                self.waiting.remove(sequence)
                return _cancelled(sequence)
        for slot, sequence in self.slots.tenant.items():
            if sequence.request.id == request_id:
                self._free(slot)
                return _cancelled(sequence)
        return None

    def plan(self) -> StepInputs | None:
        """The next call, or None if there is nothing to do. Its arrays are valid until `commit`."""
        slots, live = self.slots, self._fill_holes()
        if not live:
            return None
        prefilling = slots.past_len[:live] < slots.prompt_len[:live]
        running = self._choose(prefilling)
        first, last = np.flatnonzero(running)[[0, -1]].tolist()
        span = slice(first, last + 1)
        running, filling = running[span], (running & prefilling)[span]  # [B]

        past_len, left = slots.past_len[span], slots.prompt_len[span] - slots.past_len[span]
        n_given = np.where(filling, np.minimum(self.chunk, left), 1) * running
        n_valid = np.where(filling, n_given, np.minimum(self.limits.block_size, slots.remaining[span])) * running
        self.prefilled = bool(filling.any())
        self._call = StepInputs(
            first=first,
            input_ids=self._with_chunks(span, filling, n_valid) if self.prefilled else slots.block[span],
            n_valid=n_valid,
            n_given=n_given,
            past_len=past_len,
            temperature=slots.temperature[span],
            top_p=slots.top_p[span],
            top_k=slots.top_k[span],
            uniform=uniforms(slots.seed[span], (past_len + n_given)[:, None] + self._column),
        )
        return self._call

    def commit(self, outputs: StepOutputs) -> list[Event]:
        """Advance every row that ran in the planned call; the slots of those that finished are free afterwards."""
        call, slots, events = self._call, self.slots, []
        assert call is not None, "commit without plan"
        n_valid, n_given = call.n_valid.tolist(), call.n_given.tolist()
        n_accepted, next_token = outputs.n_accepted.tolist(), outputs.next_token.tolist()
        for row in np.flatnonzero(call.n_valid).tolist():
            slot, accepted = call.first + row, n_accepted[row]
            prefilling = slots.past_len[slot] < slots.prompt_len[slot]
            slots.past_len[slot] += n_given[row] + accepted
            if slots.past_len[slot] < slots.prompt_len[slot]:
                continue  # more of the prompt follows, so next_token means nothing
            tokens = [*slots.block[slot, 1 : 1 + accepted].tolist(), next_token[row]]
            slots.block[slot] = outputs.next_block[row]
            slots.remaining[slot] -= len(tokens)
            sequence, tokens, reason = self._end(slot, tokens)
            for statistics in (self.statistics, sequence.statistics):
                statistics.new_tokens += len(tokens)
                if prefilling:
                    statistics.prompt_tokens += int(slots.prompt_len[slot])
                else:
                    statistics.verified[n_valid[row] - 1, accepted] += 1
            events.append(Event(sequence, tokens, reason, sequence.statistics.copy()))
        self._call = None
        return events

    def abandon(self) -> list[Sequence]:
        """Give up the planned call, which failed, and the sequences that ran in it; none if the planning failed.

        The others are as they were.
        """
        call, self._call = self._call, None
        if call is None:
            return []
        slots = [call.first + row for row in np.flatnonzero(call.n_valid).tolist()]
        sequences = [self.slots.tenant[slot] for slot in slots]
        for slot in slots:
            self._free(slot)
        return sequences

    def _end(self, slot: int, tokens: list[int]) -> tuple[Sequence, list[int], FinishReason | None]:
        """A slot's sequence, those of its new `tokens` that count, and why they are its last; the slot is free then."""
        sequence = self.slots.tenant[slot]
        stop = next((i for i, token in enumerate(tokens) if token in sequence.stop), None)
        reason: FinishReason | None = "length" if self.slots.remaining[slot] <= 0 else None
        if stop is not None:
            reason = "stop"
        if reason:
            self._free(slot)
        return sequence, tokens[:stop], reason

    def _free(self, slot: int) -> None:
        del self.slots.tenant[slot]
        self._session.free_slot(slot)

    def _fill_holes(self) -> int:
        """Make the live slots 0 … n-1 and return n."""
        slots = self.slots
        for hole in range(slots.count):
            if hole in slots.tenant:
                continue
            if self.waiting:
                slots.admit(hole, self.waiting.popleft())
            elif (last := max(slots.tenant, default=-1)) > hole:
                self._session.move_slot(last, hole, int(slots.past_len[last]))
                self._session.free_slot(last)
                slots.move(last, hole)
            else:
                return hole
        return slots.count

    def _choose(self, prefilling: np.ndarray) -> np.ndarray:
        """Which of the live slots take part in the next call, given which have prompt left: both [live] bool."""
        if self.policy == "mixed" or not prefilling.any():
            return np.ones_like(prefilling)
        if self.prefilled and not prefilling.all():
            return ~prefilling  # a chunk has just run: no stream waits for two
        oldest = min(np.flatnonzero(prefilling), key=self.slots.arrival.__getitem__)
        return np.arange(len(prefilling)) == oldest

    def _with_chunks(self, span: slice, filling: np.ndarray, n_valid: np.ndarray) -> np.ndarray:
        """input_ids [B, Q] of a call in which the rows `filling` take the next chunk of their prompts."""
        slots, query = self.slots, int(n_valid.max())
        input_ids = np.zeros((len(n_valid), query), np.int64)
        input_ids[:, : self.limits.block_size] = slots.block[span, :query]
        for row in np.flatnonzero(filling).tolist():
            past = slots.past_len[span.start + row]
            prompt = slots.tenant[span.start + row].prompt
            input_ids[row, : n_valid[row]] = prompt[past : past + n_valid[row]]
        return input_ids


def _cancelled(sequence: Sequence) -> Event:
    return Event(sequence, [], "cancelled", sequence.statistics)
