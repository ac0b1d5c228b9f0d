"""How the model runs its engine: the `parameters` of config.pbtxt, which the environment may override."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE = "DFLASH_TRT_ENGINE"  # the engine directory, where a container has it elsewhere
COMMAND = "DFLASH_TRT_COMMAND"  # how to start dflash-trt there; may be several words


@dataclass(frozen=True)
class Settings:
    """`socket` is where somebody else serves the engine; empty: this model starts it."""

    engine: str
    ranks: int
    command: tuple[str, ...]
    arguments: tuple[str, ...]  # further options of `dflash-trt serve`
    socket: str
    grace: float  # seconds running requests have when the server stops
    max_waiting: int
    identity: str  # of the engine that the model was made for, as `dflash-trt serve` calls it in its header

    @classmethod
    def read(cls, parameters: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
        """`parameters` as Triton hands them over: {"ranks": {"string_value": "2"}, …}."""
        values = {key: value["string_value"] for key, value in parameters.items()}
        return cls(
            engine=environment.get(ENGINE) or values["engine_directory"],
            ranks=int(values["ranks"]),
            command=tuple(shlex.split(environment.get(COMMAND, ""))) or (_installed(values["command"]),),
            arguments=tuple(shlex.split(values["arguments"])),
            socket=values["socket"],
            grace=float(values["grace"]),
            max_waiting=int(values["max_waiting"]),
            identity=values["identity"],
        )

    def serve(self, socket: str, parent: int) -> list[str]:
        """The command that serves the engine on a Unix socket until the process `parent` is gone."""
        options = ["--socket", socket, "--no-http", "--parent", str(parent), "--json"]
        limits = ["--max-waiting", str(self.max_waiting), "--grace", str(self.grace)]
        return [*self._launcher(), *self.command, "serve", self.engine, *options, *limits, *self.arguments]

    def _launcher(self) -> list[str]:
        """`mpirun`, with what it wants of the root user and of machines with fewer cores than ranks."""
        if self.ranks == 1:
            return []
        beside = Path(self.command[0]).with_name("mpirun")
        words = [str(beside) if beside.is_file() else "mpirun", "-n", str(self.ranks)]
        words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return words + (["--oversubscribe"] if (os.cpu_count() or 1) < self.ranks else [])


def _installed(command: str) -> str:
    """The dflash-trt that made the repository; where there is none, as in a container, the one in PATH."""
    return command if Path(command).is_file() else shutil.which(Path(command).name) or command
