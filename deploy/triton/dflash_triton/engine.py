"""The engine's process: started, watched and started again. Or one that somebody else runs, known by its socket."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .settings import Settings
from .unix_http import engine_at, fetch, listens

LIBRARY_PATH = "DFLASH_TRT_LD_LIBRARY_PATH"  # what LD_LIBRARY_PATH was before start.py put Triton's own libraries there
FOLDER = "DFLASH_TRT_FOLDER"  # a folder that start.py removes in the end
STOPPING = "stopping"  # a file that start.py puts there when the server is told to end
_LAUNCHERS = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_")  # variables of a job around tritonserver
_PATIENCE = 60.0  # seconds for somebody else's server to appear
_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between two attempts to start: at first, at last
_CLOSE = 3.0  # seconds an idle engine may take to end
_STEADY = 60.0  # seconds; an engine that ran so long failed anew, it does not keep failing
_LOGGED = re.compile(r"\d{4}-\d\d-\d\d ")  # lines of the server's log: they may hold text of requests


class EngineFailed(Exception):
    """The engine did not start. The message is its own where it left one."""


class Engine:
    """The public methods may be called from any thread. `log` takes lines for the server's log."""

    def __init__(self, settings: Settings, log: Callable[[str], None]):
        self._settings = settings
        self._log = log
        parent = os.environ.get(FOLDER)
        self._folder = "" if settings.socket else tempfile.mkdtemp(prefix="dflash-", dir=parent)  # mode 0700
        self.socket = settings.socket or f"{self._folder}/engine.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._words: collections.deque[str] = collections.deque(maxlen=20)
        self._reader: threading.Thread | None = None  # of its log
        self._fault = ""  # the last words of the one that ended, until the next one is ready
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keep the engine", daemon=True)

    @property
    def trouble(self) -> str:
        """What to tell a caller while nobody answers at the socket, or has just stopped to."""
        if self._stopping.is_set():
            return "the server is shutting down — send the request elsewhere"
        if self._settings.socket:
            return f"no engine answers — {self.socket} — start one: {self._serve}"
        why = f" ({self._fault.replace(' — ', ', ')})" if self._fault else ""
        return f"the engine has ended{why} and is being started again — {self._settings.engine} — send it again soon"

    def hangs(self, how: str) -> str:
        """What to tell a caller whose request was taken by a process that does not get on; `how` is what it has not."""
        if self._settings.socket:
            fix = f"if it is not just being started, end it and start another: {self._serve}"
            return f"the engine {how} — {self.socket} — {fix}"
        if self._fault or self._stopping.is_set():
            return self.trouble
        return f"the engine {how} — {self._settings.engine} — ask elsewhere; if it stays so, start the server again"

    def another(self, found: str) -> str:
        """What to tell a caller if the server that somebody runs has the engine `found` instead of the right one."""
        there, right = found or "one that does not say its name", self._settings.identity
        what = f"the server there has the engine {there}, but this model was made for {right}"
        return f"{what} — {self.socket} — start that one: {self._serve}; or run `dflash-trt deploy` for the other"

    @property
    def expected(self) -> str:
        """The engine that answers must come from; empty where this model starts it."""
        return self._settings.identity if self._settings.socket else ""

    @property
    def told_to_end(self) -> bool:
        """Has start.py been told to end? Triton itself tells only when no request runs any more."""
        folder = os.environ.get(FOLDER)
        return folder is not None and Path(folder, STOPPING).exists()

    def start(self) -> None:
        """Return when the engine is ready. Raises EngineFailed if it refuses to be."""
        if self._settings.socket:
            self._attach()
            return
        try:
            self._launch()
        except EngineFailed:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._keeper.start()

    def stop(self, patience: float) -> None:
        """End the engine; requests that still run there have `patience` seconds."""
        self._stopping.set()
        if self._settings.socket:
            return
        if self._process:
            self._end(self._process, patience)
        if self._keeper.is_alive():
            self._keeper.join(5)
        if self._process and self._process.poll() is None:  # one that was just being started
            self._end(self._process, 0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _attach(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while (found := engine_at(self.socket)) is None:
            if time.monotonic() > deadline or self._stopping.wait(0.2):
                is_there = listens(self.socket)
                raise EngineFailed(self.hangs("takes no requests") if is_there else self.trouble)
        if found != self.expected:
            raise EngineFailed(self.another(found))

    @property
    def _serve(self) -> str:
        return shlex.join(["dflash-trt", "serve", self._settings.engine, "--socket", self.socket])

    def _launch(self) -> None:
        words = self._settings.serve(self.socket, os.getpid())
        self._log(f"starting {shlex.join(words)}")
        self._words.clear()
        try:
            # Its own session: Ctrl-C at a terminal reaches tritonserver alone, which ends the engine in its turn.
            self._process = process = subprocess.Popen(
                [word.encode(errors="surrogateescape") for word in words],  # Triton's Python may take all for ASCII
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            name = os.fsdecode(error.filename or words[0])
            raise EngineFailed(f"{error.strerror} — {name} — install it, or set DFLASH_TRT_COMMAND") from None
        self._reader = threading.Thread(target=self._pass_on, args=(process,), name="the engine's log", daemon=True)
        self._reader.start()
        while fetch(self.socket, "/health") is None:
            if process.poll() is not None:
                raise EngineFailed(self._last_words(process.returncode))
            if self._stopping.wait(0.05):
                raise EngineFailed(self.trouble)

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            text = line.decode(errors="replace").rstrip()
            self._words.append(text)
            self._log(text)

    def _keep(self) -> None:
        """Start the engine again whenever it ends, after 1, 2, 4 … seconds."""
        wait, began = _WAIT, time.monotonic()
        while True:
            if not self._fault:
                assert self._process
                self._fault = self._last_words(self._process.wait())
            if self._stopping.is_set():
                return
            if time.monotonic() - began > _STEADY:
                wait = _WAIT
            self._log(f"{self._fault}; starting it again in {wait:g} s")
            if self._stopping.wait(wait):
                return
            wait, began = min(2 * wait, _LONGEST_WAIT), time.monotonic()
            try:
                self._launch()
                self._fault = ""
            except EngineFailed as error:
                self._fault = str(error)

    def _last_words(self, code: int) -> str:
        """Its own error, if it said one; else how it ended, and the last line that was not about a request."""
        if self._reader:
            self._reader.join(2)
        errors = [line.removeprefix("error: ") for line in self._words if line.startswith("error: ")]
        if errors:
            return errors[-1]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        lines = [line for line in self._words if re.search(r"\w", line) and not _LOGGED.match(line)]
        last = f", after saying: {lines[-1][:200]}" if lines else ""
        return f"the engine ended with {how}{last} — {self._settings.engine} — see the log above"

    def _end(self, process: subprocess.Popen[bytes], patience: float) -> None:
        """SIGUSR1 means: drain, and the second time: end at once. Unlike SIGTERM, mpirun passes it on."""
        steps = ((signal.SIGUSR1, patience + _CLOSE), (signal.SIGUSR1, _CLOSE), (signal.SIGTERM, _CLOSE))
        for number, wait in steps:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
                return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(around: Mapping[str, str]) -> dict[str, str]:
    """Without the libraries that are Triton's, and without traces of a job: the engine is one of its own."""
    found = {name: value for name, value in around.items() if not name.startswith(_LAUNCHERS)}
    if LIBRARY_PATH in found:
        found["LD_LIBRARY_PATH"] = found.pop(LIBRARY_PATH)
        if not found["LD_LIBRARY_PATH"]:
            del found["LD_LIBRARY_PATH"]
    return found
