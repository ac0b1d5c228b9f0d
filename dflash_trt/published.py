"""Configs of published checkpoints (`build_recipes/checkpoints/`): what can be checked and planned before a download.

A file holds the keys of a config.json that sizes and compatibility hang on, the revision they were seen in, and which
of them nobody has seen but were inferred from sizes or relatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.shape import DrafterShape, Shape, read_drafter_shape, read_shape
from dflash_trt.document import nearest, read_document
from dflash_trt.errors import UserError

FOLDER = Path(str(files("dflash_trt.build_recipes"))) / "checkpoints"


@dataclass(frozen=True)
class Published:
    """One checkpoint as somebody published it."""

    file: Path
    repository: str  # owner/name
    role: str  # "target" or "drafter"
    target: str | None  # of a drafter: the repository it was trained for
    revision: str | None
    source: str
    config: Mapping[str, Any]
    inferred: tuple[str, ...]  # keys of `config`, with dots

    def shape(self) -> Shape:
        return read_shape(self.config, self.file)

    def drafter_shape(self) -> DrafterShape:
        return read_drafter_shape(self.config, self.file)


def repositories() -> list[str]:
    """All that are known, targets and drafters."""
    return sorted(file.stem.replace("--", "/", 1) for file in FOLDER.glob("*.yaml"))


def published(repository: str, where: object = None) -> Published:
    """By `owner/name`. Raises UserError for one that is not known here, with the nearest name that is."""
    file = FOLDER / f"{repository.replace('/', '--')}.yaml"
    if repository not in repositories():
        names = {name.lower(): name for name in repositories()}
        meant = nearest(repository, names)
        fix = f"did you mean {names[meant]}?" if meant else f"known: {', '.join(names.values())}"
        raise UserError(f"the config of {repository!r} is not known here", where=where, fix=fix)
    values = read_document(file).values
    return Published(
        file=file,
        repository=values["repository"],
        role=values["role"],
        target=values.get("target"),
        revision=values["revision"],
        source=values["source"],
        config=values["config"],
        inferred=tuple(values.get("inferred", ())),
    )
