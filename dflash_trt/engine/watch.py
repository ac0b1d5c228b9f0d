"""What a TensorRT build says while it runs. The base classes come from whichever compiler module is at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


def make_logger(trt: ModuleType, say: Callable[[str], None]) -> Any:
    """A logger that passes warnings and errors on; `errors` keeps the errors, each once, in order."""

    class Logger(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            text = text.strip()
            if severity <= trt.ILogger.WARNING:
                say(text)
            if severity <= trt.ILogger.ERROR and text not in self.errors:
                self.errors.append(text)

    return Logger()


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


def make_monitor(trt: ModuleType, report: Callable[[float], None]) -> Any:
    """A progress monitor that reports one fraction for the tree of phases."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self._phases: dict[str, _Phase] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._phases[name] = _Phase(parent, steps)

        def phase_finish(self, name: str) -> None:
            self._phases.pop(name, None)

        def step_complete(self, name: str, step: int) -> bool:
            if name in self._phases:
                self._phases[name].done = step + 1
            report(sum(self._fraction(root) for root, phase in self._phases.items() if phase.parent is None))
            return True

        def _fraction(self, name: str) -> float:
            phase = self._phases[name]
            inner = max((self._fraction(n) for n, p in self._phases.items() if p.parent == name), default=0.0)
            return min(1.0, (phase.done + inner) / max(phase.steps, 1))

    return Monitor()
