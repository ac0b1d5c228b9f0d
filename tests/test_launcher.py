"""Where a process stands among those of its job, read from what the launcher left in the environment."""

from __future__ import annotations

import pytest

from dflash_trt import launcher
from dflash_trt.launcher import Place, find_place, leave_it_to_rank_0

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"}
PMI = {"PMI_SIZE": "8", "PMI_RANK": "3"}
SLURM = {"SLURM_NTASKS": "8", "PMIX_RANK": "3"}


@pytest.fixture
def started(monkeypatch):
    """Sets the variables given, and no others that a launcher would set; none to begin with."""

    def start(variables: dict[str, str]) -> None:
        for name in {**OPEN_MPI, **PMI, **SLURM}:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    start({})
    return start


@pytest.mark.parametrize("variables", [OPEN_MPI, PMI, SLURM], ids=["Open MPI", "PMI", "Slurm with PMIx"])
def test_each_launcher_says_rank_and_size(started, variables):
    started(variables)
    assert find_place() == Place(rank=3, size=8)


@pytest.mark.parametrize("variables", [OPEN_MPI, PMI, SLURM], ids=["Open MPI", "PMI", "Slurm with PMIx"])
@pytest.mark.parametrize("value", [None, "", "-1", "3.0", "three"])
def test_half_a_place_is_none(started, variables, value):
    """A batch script has SLURM_NTASKS without being a rank; and nothing but a number is one."""
    for name in variables:
        found = {**variables, name: value}
        started({name: value for name, value in found.items() if value is not None})
        assert find_place() == Place()


def test_nobody_else_is_there_without_a_launcher(started):
    assert find_place() == Place(rank=0, size=1)


def test_a_whole_place_counts_behind_half_of_another(started):
    """mpirun within a Slurm job, and the other way round."""
    started({"SLURM_NTASKS": "2", **OPEN_MPI})
    assert find_place() == Place(3, 8)
    started({"OMPI_COMM_WORLD_SIZE": "many", **SLURM})
    assert find_place() == Place(3, 8)


@pytest.mark.parametrize(("rank", "waits"), [("0", False), ("1", True), ("7", True)])
def test_every_rank_but_0_waits(started, monkeypatch, rank, waits):
    waited: list[float] = []
    monkeypatch.setattr(launcher.time, "sleep", waited.append)
    started(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": rank})
    leave_it_to_rank_0()
    assert bool(waited) == waits and all(seconds > 1 for seconds in waited)


def test_a_process_alone_does_not_wait(started, monkeypatch):
    monkeypatch.setattr(launcher.time, "sleep", lambda seconds: pytest.fail("it slept"))
    leave_it_to_rank_0()


@pytest.mark.parametrize(("root", "cores", "line"), [
    (False, 8, "mpirun -n 8"),
    (True, 8, "mpirun --allow-run-as-root -n 8"),
    (False, 2, "mpirun --oversubscribe -n 8"),
])  # fmt: skip
def test_the_line_that_starts_ranks_has_what_open_mpi_wants_here(monkeypatch, root, cores, line):
    monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert launcher.mpirun(8) == line
