"""What a TensorRT build says while it runs. The base classes come from whichever compiler module is at hand."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dflash_trt.engine.progress import Progress


def make_logger(trt: ModuleType) -> Any:
    """A logger that keeps the compiler's warnings and errors: `messages` are (severity name, text)."""

    class Logger(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[tuple[str, str]] = []

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.WARNING:
                self.messages.append((severity.name, text))

        def errors(self) -> list[str]:
            """The errors, each once, in order."""
            return list(dict.fromkeys(text.strip() for severity, text in self.messages if "ERROR" in severity))

    return Logger()


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


def make_monitor(trt: ModuleType, what: str, progress: Progress) -> Any:
    """A progress monitor that reports one fraction for the tree of phases; set `cancelled` to end the build early."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.cancelled = False
            self._phases: dict[str, _Phase] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._phases[name] = _Phase(parent, steps)

        def phase_finish(self, name: str) -> None:
            self._phases.pop(name, None)

        def step_complete(self, name: str, step: int) -> bool:
            if name in self._phases:
                self._phases[name].done = step + 1
            progress(what, sum(self._fraction(root) for root, phase in self._phases.items() if phase.parent is None))
            return not self.cancelled

        def _fraction(self, name: str) -> float:
            phase = self._phases[name]
            inner = max((self._fraction(n) for n, p in self._phases.items() if p.parent == name), default=0.0)
            return min(1.0, (phase.done + inner) / max(phase.steps, 1))

    return Monitor()
