"""Several ranks as one session: rank 0 schedules, and every rank makes the same calls on its own part.

    session = open_session(engine, world=world)
    if world.rank:
        follow(session, world)     # until rank 0 is done
    else:
        with lead(session, world) as leading:
            Generator(leading, …)  # as with any session

What goes to the followers is what a session is asked for: a step's small inputs, a few hundred bytes a row, and the
moves of slots between steps. There is one scheduler, so nothing can drift apart but the sessions themselves; each
follower reports what its step decided, and rank 0 compares before it asks for the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dflash_trt.errors import DflashError, Failure
from dflash_trt.runtime.mail import Parted
from dflash_trt.runtime.session import Session, StepInputs, StepOutputs
from dflash_trt.runtime.world import World

_CALL, _DECIDED = "next call", "what the step decided"  # labels of messages


class Leading:
    """Rank 0's session: does a call, and has the others do it. As a session, for one caller at a time."""

    def __init__(self, session: Session, world: World):
        self.limits = session.limits
        self._session, self._world = session, world
        self._decided: str | None = None  # by our last step, not yet compared
        self._stepping = False

    def step(self, inputs: StepInputs) -> StepOutputs:
        self._call("step", inputs)
        self._stepping = True
        outputs = self._session.step(inputs)
        self._stepping = False
        self._decided = _digest(inputs, outputs)
        return outputs

    def move_slot(self, source: int, target: int, length: int) -> None:
        self._call("move_slot", source, target, length)
        self._session.move_slot(source, target, length)

    def free_slot(self, slot: int) -> None:
        self._call("free_slot", slot)
        self._session.free_slot(slot)

    def stop(self, fault: DflashError | None = None) -> None:
        """Let the followers go, with the error that ends all."""
        self._call("stop", fault)

    @property
    def between_steps(self) -> bool:
        """Is every follower waiting for a call, or about to?"""
        return not self._stepping

    def _call(self, *call: object) -> None:
        if self._stepping:
            return  # our last step failed in its midst: nobody listens
        self._compare()
        self._world.broadcast(_CALL, call)

    def _compare(self) -> None:
        if self._decided is None:
            return
        ours, self._decided = self._decided, None
        digests = self._world.collect(_DECIDED, ours) or []
        odd = [rank for rank, digest in enumerate(digests) if digest != ours]
        if odd:
            # Most ranks are right; of two, rank 0 is as good as the other.
            first = 0 if 2 * len(odd) > len(digests) else odd[0]
            raise Failure(
                f"rank {first} decided otherwise than {'rank 0' if first else 'the others'} in the same step — "
                "between ranks — "
                "see that all ranks have the same hardware and library versions"
            )


@contextmanager
def lead(session: Session, world: World) -> Iterator[Session]:
    """On rank 0: `session` with the followers behind it. They stop when the block ends, however it does.

    An error of the block itself, between two steps, ends all ranks as one that they all know of.
    """
    if world.size == 1:
        yield session
        return
    leading = Leading(session, world)
    try:
        yield leading
        leading.stop()
    except DflashError as error:
        if leading.between_steps and not isinstance(error, Parted):
            leading.stop(error)
            error.everywhere = True
        raise


def follow(session: Session, world: World) -> None:
    """On every other rank: do as rank 0 does, until it stops. Raises the error it stopped for."""
    while True:
        name, *arguments = world.broadcast(_CALL)
        if name == "step":
            (inputs,) = arguments
            world.collect(_DECIDED, _digest(inputs, session.step(inputs)))
        elif name == "stop":
            (fault,) = arguments
            if fault:
                fault.everywhere = True
                raise fault
            return
        else:
            getattr(session, name)(*arguments)


def _digest(inputs: StepInputs, outputs: StepOutputs) -> str:
    """Of what the rows that ran have decided."""
    ran = inputs.n_valid > 0
    digest = hashlib.sha256()
    for array in (outputs.n_accepted, outputs.next_token, outputs.next_block):
        digest.update(np.ascontiguousarray(array[ran]).tobytes())
    return digest.hexdigest()
