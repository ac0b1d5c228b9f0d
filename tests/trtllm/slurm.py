"""A Slurm cluster of this machine alone, for as long as a test needs one.

    with Cluster(folder) as environment:   # SLURM_CONF is in it
        subprocess.run(["sbatch", …], env=environment)

Needs root and the programs of Debian's packages slurm-wlm and libpmix-dev; it has sixteen CPUs and eight GPUs, which
are terminals, for Slurm only counts them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from pathlib import Path

from tests.waiting import until

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scancel")
SLURM = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SlurmdPort={next_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=5
NodeName={host} CPUs=16 Gres=gpu:8
PartitionName=all Nodes={host} Default=YES State=UP
"""
GRES = "AutoDetect=off\nNodeName={host} Name=gpu File=/dev/tty[0-7]\n"


def missing() -> str | None:
    """Why there can be no cluster here."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    search = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [program for program in PROGRAMS if not shutil.which(program, path=search)]:
        return f"no {absent[0]} here: apt-get install slurm-wlm libpmix-dev"
    if not Path("/dev/tty7").is_char_device():
        return "no terminals here that could count as GPUs"
    return None


class Cluster:
    """Up once entered, down once left."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def __enter__(self) -> Cluster:
        folder, host = self._folder, socket.gethostname()
        folder.mkdir()
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o400)
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        (folder / "slurm.conf").write_text(SLURM.format(host=host, folder=folder, port=port, next_port=port + 1))
        (folder / "gres.conf").write_text(GRES.format(host=host))
        own = {name: folder / f"munge.{name}" for name in ("socket", "log", "pid", "seed")}
        munge = [f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in own.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={folder / 'key'}", *munge)
        until(own["socket"].exists)
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        until(lambda: "idle" in self.run("sinfo", "-h", "-o", "%t"))
        return self

    def __exit__(self, *error: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(timeout=30)

    def run(self, *words: object) -> str:
        done = subprocess.run([*map(str, words)], env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def _start(self, *words: str) -> None:
        log = (self._folder / f"{words[0]}.out").open("wb")
        self._daemons.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log))
