"""Where `mpirun` (or another launcher) put this process, as its environment says; MPI itself is not touched."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

_NAMES = (  # variables of the world's size and of the rank
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI
    ("PMI_SIZE", "PMI_RANK"),  # MPICH and its kin
    ("SLURM_NTASKS", "PMIX_RANK"),  # srun --mpi=pmix
)
_GRACE = 5.0  # seconds; ranks do not start at the same instant


@dataclass(frozen=True)
class Place:
    """One process of a job of `size`."""

    rank: int = 0
    size: int = 1


def find_place() -> Place:
    """The process's place; alone, if nothing started it as one of several."""
    for size, rank in _NAMES:
        found = os.environ.get(size, ""), os.environ.get(rank, "")
        if all(value.isdecimal() for value in found):
            return Place(int(found[1]), int(found[0]))
    return Place()


def mpirun(ranks: int) -> str:
    """How to start so many here, with what Open MPI wants of the root user and of machines with fewer cores."""
    root, cores = os.geteuid() == 0, os.cpu_count() or 1
    words = ["mpirun", "--allow-run-as-root" if root else "", "--oversubscribe" if cores < ranks else "", f"-n {ranks}"]
    return " ".join(filter(None, words))


def leave_it_to_rank_0() -> None:
    """Called by a rank that failed before it knew of the others, at something they all do: one message is enough.

    A launcher ends all processes once one has failed, so rank 0 does not return from here alone.
    """
    if find_place().rank:
        time.sleep(_GRACE)
