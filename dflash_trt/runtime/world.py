"""The ranks of one job: who they are, what they tell each other, and how they end, together or not at all.

    with find_world() as world:
        ...

Inside, an error that all ranks know of (`together`, `agree`) is printed once and ends all of them with its exit code.
Any other error ends the rank it happened on, with its number, and so all others. Values travel as pickles: all ranks
are processes of one job, with the same rights.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

from dflash_trt.errors import DflashError, Failure, UserError, explain
from dflash_trt.launcher import Place, find_place
from dflash_trt.runtime.mail import Mail
from dflash_trt.runtime.peers import Peer, Watch, describe, this_process

T = TypeVar("T")


class World:
    """`size` ranks, of which this process is `rank`; by default one, to which all of this comes for free."""

    def __init__(self, mail: Mail | None = None, place: Place = Place()):
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = 0, 1  # among the ranks on this machine; local_rank is the number of its GPU
        self.hosts = 1
        self._mail = mail
        self._watch: Watch | None = None
        if mail:
            own = this_process(self.rank)
            peers: list[Peer] = self.share("start", own)
            self.local_rank = sum(peer.host == own.host for peer in peers[: self.rank])
            self.local_size = sum(peer.host == own.host for peer in peers)
            self.hosts = len({peer.host for peer in peers})
            self._watch = Watch(own, peers)

    # -- numbers -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: np.ndarray, group: Sequence[int]) -> np.ndarray:
        """The sum of every rank's x, added in the order of the ranks: the same bits on all of them."""
        parts = self._arrays(f"sum of {x.dtype} {list(x.shape)}", x, group)
        total = parts[0].copy()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, x: np.ndarray, group: Sequence[int]) -> np.ndarray:
        """Every rank's x [n, …] in the order of the ranks, along the first axis; n may differ."""
        return np.concatenate(self._arrays(f"rows of {x.dtype} {list(x.shape[1:])}", x, group))

    def _arrays(self, what: str, x: np.ndarray, group: Sequence[int]) -> list[np.ndarray]:
        x = np.ascontiguousarray(x)
        what = f"{what} over ranks {','.join(map(str, group))}"
        others = [rank for rank in group if rank != self.rank]
        if not others:
            return [x]
        received = self._post.exchange(what, x, to=others, of=others)
        return [x if rank == self.rank else _as_rows(received[rank], x) for rank in group]

    # -- values --------------------------------------------------------------------------------------------------

    def share(self, what: str, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        values = self._swap(what, value, others, others)
        return [value if rank == self.rank else values[rank] for rank in range(self.size)]

    def broadcast(self, what: str, value: Any = None) -> Any:
        """Rank 0's value."""
        if self.rank:
            return self._swap(what, None, [], [0])[0]
        self._swap(what, value, range(1, self.size), [])
        return value

    def collect(self, what: str, value: T) -> list[T] | None:
        """On rank 0 every rank's value, in the order of the ranks; None elsewhere."""
        if self.rank:
            self._swap(what, value, [0], [])
            return None
        values = self._swap(what, None, [], range(1, self.size))
        return [value, *(values[rank] for rank in range(1, self.size))]

    def _swap(self, what: str, value: Any, to: Sequence[int], of: Sequence[int]) -> dict[int, Any]:
        if self.size == 1:
            return {}
        received = self._post.exchange(what, pickle.dumps(value), to=to, of=of)
        return {rank: pickle.loads(content) for rank, content in received.items()}

    # -- agreement -----------------------------------------------------------------------------------------------

    def together(self, what: str, work: Callable[[], T]) -> T:
        """Do `work` on every rank. If it fails on any, the first failing rank's error is raised on all of them."""
        fault: DflashError | None = None
        try:
            result = work()
        except Exception as error:
            if os.environ.get("DFLASH_TRT_TRACEBACK"):
                traceback.print_exc()
            fault = error if isinstance(error, DflashError) else Failure(explain(error)[0].removeprefix("error: "))
        for rank, found in enumerate(self.share(f"outcome of {what}", fault)):
            if found:
                raise _known(found if rank == 0 else _of_rank(rank, found))
        return result

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise UserError on all ranks unless each of them states the same `facts`."""
        ours, *others = self.share("facts", facts)
        for rank, theirs in enumerate(others, 1):
            for name, value in ours.items():
                if theirs.get(name) != value:
                    what = f"{name}: {theirs.get(name)} on rank {rank}, {value} on rank 0"
                    fix = "start all of them with the same engine directory, options and version"
                    raise _known(UserError(what, where="ranks of one job", fix=fix))

    # -- losses --------------------------------------------------------------------------------------------------

    def lost(self) -> str:
        """Which ranks of this machine are gone at this moment; empty if none is."""
        gone = self._watch.lost() if self._watch else []
        return describe(gone) if gone else ""

    def before_end(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the reason, from a thread, shortly before this process ends because another rank is gone."""
        if self._watch:
            self._watch.before_end = tell

    # -- the end -------------------------------------------------------------------------------------------------

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.size == 1:
            return
        if error is not None and not (isinstance(error, DflashError) and error.everywhere):
            self._fail(error)
        try:
            if error and self.rank == 0:
                _print(explain(error)[0])
            self._leave()
        except BaseException as late:  # the others wait for a word from here
            self._fail(late)
        if error:
            raise SystemExit(explain(error)[1]) from None

    def _leave(self) -> None:
        """Wait for the others and let them go."""
        _flush()
        self.share("the end", None)
        if self._watch:
            self._watch.stop()

    def _fail(self, error: BaseException) -> NoReturn:
        """End this process, and with it all others."""
        message, code = explain(error)
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 1
            message = f"error: ended with exit code {code}"
        message = message.replace("error: ", f"error: rank {self.rank}: ", 1)
        if os.environ.get("DFLASH_TRT_TRACEBACK"):
            message = "".join(traceback.format_exception(error)) + message
        with contextlib.suppress(OSError):  # a closed pipe
            _print(message)
            _flush()
        if self.hosts > 1:  # processes elsewhere cannot be watched from here
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(code or 1)
        os._exit(code or 1)

    @property
    def _post(self) -> Mail:
        if self._mail is None:
            raise Failure("a rank is asked to speak to others — there is one rank — start it with mpirun")
        return self._mail


def find_world() -> World:
    """The ranks that the launcher started; one if there was none. MPI is loaded only if there are several.

    Raises UserError if MPI is not installed, or is not the launcher's.
    """
    place = find_place()
    if place.size == 1:
        return World()
    # A collective cannot be left halfway, and MPI's launcher waits for those it told to end: so end at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"several ranks need MPI, which cannot be loaded: {error}",
            where=f"rank {place.rank} of {place.size}",
            fix="pip install 'dflash-trt[ranks]'",
        ) from None
    if MPI.COMM_WORLD.size != place.size:
        raise UserError(
            f"the launcher started {place.size} ranks; MPI knows of {MPI.COMM_WORLD.size}",
            where=f"rank {place.rank}",
            fix=f"use the mpirun of the MPI that mpi4py loads ({MPI.Get_library_version().split(',')[0]})",
        )
    return World(Mail(MPI), place)


def _as_rows(content: memoryview, like: np.ndarray) -> np.ndarray:
    """An array of that dtype and shape, except perhaps for the length of its first axis."""
    array = np.frombuffer(content, like.dtype)
    return array.reshape(like.shape if array.size == like.size else (-1, *like.shape[1:]))


def _known(error: DflashError) -> DflashError:
    error.everywhere = True
    return error


def _of_rank(rank: int, error: DflashError) -> DflashError:
    kind = UserError if isinstance(error, UserError) else Failure
    return kind(f"rank {rank}: {error}")


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _flush() -> None:
    if sys.stdout:  # which is None where it was closed from the start
        sys.stdout.flush()
