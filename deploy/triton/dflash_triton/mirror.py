"""The engine's own metrics, shown again on Triton's metrics port.

Triton knows counters and gauges. A histogram of the engine is shown as the counters it consists of, `…_bucket` with its
label `le`, `…_sum` and `…_count`: Prometheus computes quantiles from these series whatever their declared type is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

START = "dflash_start_time_seconds"  # tells one process of the engine from the next
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class Mirror:
    """`family_class` is Triton's MetricFamily; `model` becomes a label of everything."""

    def __init__(self, family_class: Any, model: str):
        self._new = family_class
        self._model = model
        self._families: dict[str, Any] = {}  # a metric dies with the last reference to its family
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._seen: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # counters, in the process that is there
        self._start: float | None = None  # of that process

    def show(self, exposition: str) -> None:
        """Bring Triton's metrics up to what the engine says now, in Prometheus' text format."""
        samples = list(_samples(exposition))
        start = next((value for name, *_, value in samples if name == START), None)
        if start != self._start:  # a new process counts from zero, and may be further by now than the last one was
            self._start, self._seen = start, dict.fromkeys(self._seen, 0.0)
        for name, kind, text, labels, value in samples:
            if math.isnan(value):
                continue  # nothing to tell yet
            key = (name, labels)
            if key not in self._metrics:
                if name not in self._families:
                    chosen = self._new.GAUGE if kind == "gauge" else self._new.COUNTER
                    self._families[name] = self._new(name=name, description=text, kind=chosen)
                self._metrics[key] = self._families[name].Metric(labels={"model": self._model, **dict(labels)})
            if kind == "gauge":
                self._metrics[key].set(value)
                continue
            before = self._seen.get(key, 0.0)
            # less than before: a new process of a server that does not tell its start
            self._metrics[key].increment(value - before if value >= before else value)
            self._seen[key] = value

    def down(self) -> None:
        """The engine does not answer: its gauges are zero; counters stay."""
        for (name, labels), metric in self._metrics.items():
            if (name, labels) not in self._seen:
                metric.set(0.0)


def _samples(text: str) -> Iterator[tuple[str, str, str, tuple[tuple[str, str], ...], float]]:
    """Name, kind, description, labels and value of every sample of ours."""
    kinds: dict[str, str] = {}
    texts: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split(" ", 3)
        if words[:2] == ["#", "TYPE"]:
            kinds[words[2]] = words[3]
        elif words[:2] == ["#", "HELP"]:
            texts[words[2]] = words[3]
        elif (found := _SAMPLE.match(line)) and found["name"].startswith("dflash_"):
            name = found["name"]
            family = name if name in kinds else re.sub(r"_(bucket|sum|count)$", "", name)
            if not name.endswith("_created"):
                labels = tuple((key, _plain(value)) for key, value in _LABEL.findall(found["labels"] or ""))
                yield name, kinds.get(family, "gauge"), texts.get(family, name), labels, float(found["value"])


def _plain(value: str) -> str:
    return re.sub(r"\\.", lambda match: _ESCAPES.get(match[0], match[0]), value)
