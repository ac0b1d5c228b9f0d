"""The Session protocol as an executable specification, with a language model simple enough to check by hand.

The next token is a hash of the whole prefix, read from a cache that holds one number a position. So a stale, missing or
misplaced entry, a wrong position or a wrong uniform changes everything that follows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dflash_trt.runtime import Limits, Request, StepInputs, StepOutputs

VOCAB = 50


def _mix(x: int) -> int:
    x = (x ^ x >> 31) * 0x7FB5D329728EA185 & 2**64 - 1
    return (x ^ x >> 27) * 0x81DADEF4BC2DD44D & 2**64 - 1


def _entry(token: int, position: int) -> int:
    return _mix(token << 20 | position)


def _next_token(prefix: int, uniform: float | None) -> int:
    """`prefix` is the sum of its entries; `uniform` is None for greedy."""
    return _mix(prefix + (0 if uniform is None else 1 + int(uniform * 2**24)) & 2**64 - 1) % VOCAB


def continuation(prompt: list[int], length: int, uniform: list[float] | None = None) -> list[int]:
    """What the language says after `prompt`; `uniform[t]` decides new token t."""
    prefix = sum(_entry(token, position) for position, token in enumerate(prompt))
    tokens: list[int] = []
    for t in range(length):
        tokens.append(_next_token(prefix, uniform[t] if uniform else None))
        prefix += _entry(tokens[-1], len(prompt) + t)
    return tokens


class ToySession:
    """Drafts are right with probability `skill`, decided by the prefix. `calls` records what it was asked."""

    def __init__(self, limits: Limits, skill: float = 0.8):
        self.limits = limits
        self.skill = skill
        self.calls: list[StepInputs] = []
        self._garbage = np.random.default_rng(0)
        length = limits.max_seq_len + max(limits.max_query, limits.block_size)
        self.target_cache = self._noise(limits.max_batch, length)
        self.draft_cache = self._noise(limits.max_batch, length)

    def step(self, inputs: StepInputs) -> StepOutputs:
        self.calls.append(replace(inputs, **{k: v.copy() for k, v in vars(inputs).items() if k != "first"}))
        rows, k = len(inputs.input_ids), self.limits.block_size
        assert inputs.uniform.shape == (rows, k)
        outputs = StepOutputs(*self._garbage.integers(0, VOCAB, (2, rows)), self._garbage.integers(0, VOCAB, (rows, k)))
        for row in range(rows):
            slot, ids, past = inputs.first + row, inputs.input_ids[row].tolist(), int(inputs.past_len[row])
            given, valid = int(inputs.n_given[row]), int(inputs.n_valid[row])
            end = past + len(ids)
            assert end <= self.target_cache.shape[1], "the call writes past the end of the cache"
            for cache in (self.target_cache, self.draft_cache):  # all columns are written, padding and idle rows too
                cache[slot, past:end] = self._noise(len(ids))
                cache[slot, past : past + valid] = [_entry(t, past + c) for c, t in enumerate(ids[:valid])]
            if valid:
                hot = inputs.temperature[row] > 0
                choices = [
                    _next_token(
                        _total(self.target_cache[slot, : past + given + t]), inputs.uniform[row, t] if hot else None
                    )
                    for t in range(valid - given + 1)
                ]
                accepted = next((t for t in range(valid - given) if ids[given + t] != choices[t]), valid - given)
                outputs.n_accepted[row], outputs.next_token[row] = accepted, choices[accepted]
                outputs.next_block[row] = self._draft(slot, past + given + accepted, choices[accepted])
        return outputs

    def move_slot(self, source: int, target: int, length: int) -> None:
        for cache in (self.target_cache, self.draft_cache):
            cache[target] = self._noise(cache.shape[1])
            cache[target, :length] = cache[source, :length]

    def free_slot(self, slot: int) -> None:
        for cache in (self.target_cache, self.draft_cache):
            cache[slot] = self._noise(cache.shape[1])

    def _draft(self, slot: int, committed: int, token: int) -> list[int]:
        prefix, block = _total(self.draft_cache[slot, :committed]), [token]
        for position in range(committed, committed + self.limits.block_size - 1):
            prefix += _entry(block[-1], position)
            right = _mix(prefix & 2**64 - 1) / 2**64 < self.skill
            block.append((_next_token(prefix, None) + (0 if right else 1)) % VOCAB)
        return block

    def _noise(self, *shape: int) -> np.ndarray:
        return self._garbage.integers(0, 2**63, shape, dtype=np.uint64)


def _total(entries: np.ndarray) -> int:
    return int(entries.sum(dtype=np.uint64))


def expected(request: Request, eos_ids: frozenset[int], uniform: list[float] | None = None) -> tuple[list[int], str]:
    """Tokens and finish reason of `request`, from the language alone."""
    tokens = continuation(list(request.prompt), request.max_new_tokens, uniform)
    stop = set(request.stop_token_ids) | (set() if request.ignore_eos else eos_ids)
    ends = [i for i, token in enumerate(tokens) if token in stop]
    return (tokens[: ends[0]], "stop") if ends else (tokens, "length")
