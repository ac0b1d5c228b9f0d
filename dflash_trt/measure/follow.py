"""What an engine would have said at every place of a text that another one wrote.

Two free answers part at the first other token and then speak of different things. Along the same text every position
can be compared, so this is the finer measure of what, say, quantizing a target changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_trt.runtime import Limits, Session, StepInputs


def choices(session: Session, text: Sequence[int], start: int) -> list[int]:
    """The greedy choice for each position of `text` from `start` (1 or more) on, behind the tokens before it.

    The text's own tokens serve as the drafts of a step, so one call judges a block of them. Where the engine chooses
    otherwise the text's token is given to it all the same. Uses slot 0, which must be free.
    """
    limits = session.limits
    for past in range(0, start, limits.max_query):
        chunk = text[past : min(past + limits.max_query, start)]
        outputs = session.step(_row(chunk, len(chunk), past, limits))
    chosen = [int(outputs.next_token[0])]  # for position `past`, behind the tokens that are in the caches
    past = start
    while past + 1 < len(text):
        block = text[past : past + limits.block_size]
        outputs = session.step(_row(block, 1, past, limits))
        accepted = int(outputs.n_accepted[0])
        chosen += [*block[1 : 1 + accepted], int(outputs.next_token[0])]
        past += 1 + accepted
    session.free_slot(0)
    return chosen[: len(text) - start]


def _row(tokens: Sequence[int], given: int, past: int, limits: Limits) -> StepInputs:
    """A greedy call on slot 0 alone. Rows of few tokens are padded to a block, the shape of a decode call."""
    input_ids = np.zeros((1, max(len(tokens), limits.block_size)), np.int64)
    input_ids[0, : len(tokens)] = tokens
    return StepInputs(
        first=0,
        input_ids=input_ids,
        n_valid=np.array([len(tokens)]),
        n_given=np.array([given]),
        past_len=np.array([past]),
        temperature=np.zeros(1, np.float32),
        top_p=np.ones(1, np.float32),
        top_k=np.zeros(1, np.int64),
        uniform=np.zeros((1, limits.block_size), np.float32),
    )
