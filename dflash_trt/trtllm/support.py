"""Which targets and drafters TensorRT-LLM's DFlash serves (`support.yaml`), and from which release on."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.shape import Shape
from dflash_trt.document import read_document

FILE = Path(__file__).with_name("support.yaml")
FIRST = "1.3.0rc14"  # PR 12794 came to the main branch on 2026-04-27; the earliest tag that can hold it
FINAL = 1 << 20  # a release comes after its candidates
YES, TESTED, UNLISTED, NO = "yes", "tested", "unlisted", "no"


@dataclass(frozen=True)
class Family:
    """Targets of one architecture."""

    name: str
    architectures: tuple[str, ...]  # patterns
    model_types: tuple[str, ...]
    verdict: str  # "yes", "tested", "unlisted" or "no"
    source: str

    def holds(self, shape: Shape) -> bool:
        named = shape.architecture
        if named is not None and any(fnmatchcase(named, pattern) for pattern in self.architectures):
            return True
        return any(fnmatchcase(shape.model_type, pattern) for pattern in self.model_types)


@dataclass(frozen=True)
class Variant:
    """A relative of DFlash."""

    name: str
    decoding_type: str | None
    since: str | None
    source: str


@functools.cache
def families() -> tuple[Family, ...]:
    return tuple(
        Family(
            name=values["name"],
            architectures=tuple(values["architectures"]),
            model_types=tuple(values["model_types"]),
            verdict=values["verdict"],
            source=values["source"],
        )
        for values in _table("families")
    )


@functools.cache
def variants() -> Mapping[str, Variant]:
    return {
        name: Variant(name, values["decoding_type"], values.get("since"), values["source"])
        for name, values in _table("variants").items()
    }


def find_family(shape: Shape) -> Family | None:
    return next((family for family in families() if family.holds(shape)), None)


def trained_on(drafter: str | None) -> str | None:
    """What a published drafter was trained on; a copy in a folder of that name counts as well."""
    if drafter is None:
        return None
    name = drafter.rstrip("/").rpartition("/")[2]
    known = {repository.rpartition("/")[2]: values["trained_on"] for repository, values in _table("drafters").items()}
    return known.get(name)


def older(release: str, other: str) -> bool:
    """Whether `release` came before `other`; a word that is no release number counts as new."""
    one, two = _order(release), _order(other)
    return one is not None and two is not None and one < two


def _order(release: str) -> tuple[int, ...] | None:
    """`1.3.0rc14` → (1, 3, 0, 14)"""
    matched = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(rc|post)(\d+))?", release)
    if not matched:
        return None
    major, minor, patch, kind, number = matched.groups()
    last = int(number) if kind == "rc" else FINAL + int(number or 0)
    return int(major), int(minor), int(patch or 0), last


@functools.cache
def _table(name: str) -> Any:
    return read_document(FILE).values[name]
