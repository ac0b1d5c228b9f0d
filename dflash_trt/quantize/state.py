"""What survives a crash between calibration and the last checkpoint: one hidden file in the output folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt import __version__
from dflash_trt.durable import sync
from dflash_trt.quantize.pack import Layer
from dflash_trt.quantize.plan import Amax, Plan
from dflash_trt.quantize.resume import work_folder
from dflash_trt.quantize.write import Written

NAME = ".quantize.json"
READ = (".safetensors", ".json")  # what counts of a checkpoint; a chat template shows in the texts


@dataclass
class State:
    """Amaxes and finished checkpoints of one job, by role."""

    file: Path
    job: str
    amax: dict[str, dict[str, Amax]] | None = None
    written: dict[str, Written] = field(default_factory=dict)

    @classmethod
    def read(cls, output: Path, job: str) -> State:
        """That of an interrupted run of the same job, or an empty one."""
        state = cls(output / NAME, job)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            values = json.loads(state.file.read_text("utf-8"))
            if values["job"] == job:
                if values["amax"] is not None:
                    state.amax = {
                        role: {module: Amax(*pair) for module, pair in modules.items()}
                        for role, modules in values["amax"].items()
                    }
                state.written = {
                    role: Written(**record | {"path": output / role, "layers": tuple(Layer(**x) for x in layers)})
                    for role, record in values["written"].items()
                    if (layers := record["layers"]) is not None and _is_complete(output / role)
                }
        return state

    def save(self) -> None:
        """Amaxes of blocks are not kept: a search that needs a GPU is soon repeated. While nothing is known there is no
        file; another job's goes, for it tells of checkpoints that this one replaces."""
        if not (self.amax or self.written):
            return self.remove()
        pairs: dict[str, dict[str, tuple[float | None, float | None]]] | None = None
        if self.amax and not any(one.block is not None for modules in self.amax.values() for one in modules.values()):
            pairs = {
                role: {module: (one.weight, one.input) for module, one in modules.items()}
                for role, modules in self.amax.items()
            }
        values = {
            "job": self.job,
            "amax": pairs,
            "written": {role: dataclasses.asdict(w) | {"path": str(w.path)} for role, w in self.written.items()},
        }
        partial = self.file.with_name(f"{NAME}.partial")
        partial.write_text(json.dumps(values), "utf-8")
        sync(partial)
        partial.replace(self.file)

    def remove(self) -> None:
        self.file.unlink(missing_ok=True)


def _is_complete(checkpoint: Path) -> bool:
    """Has it its name? Until then another one, to be replaced, may have it."""
    return checkpoint.is_dir() and not work_folder(checkpoint).exists()


def fingerprint(plans: Mapping[str, Plan], target: Path | None, texts: Sequence[Sequence[int]], settings: Any) -> str:
    """Of all that the result depends on. Checkpoints count by the sizes and times of their files."""
    digest = hashlib.sha256(__version__.encode())
    kept = {"presets", "include", "seed", "input_amax", "block_size", "shard_bytes"}
    digest.update(repr([(name, getattr(settings, name)) for name in sorted(kept)]).encode())
    folders = [(role, plan.source) for role, plan in sorted(plans.items())]
    for role, folder in [*folders, *([("", target)] if target else [])]:
        for file in sorted(file for file in folder.iterdir() if file.suffix in READ and file.is_file()):
            facts = file.stat()
            digest.update(repr((role, file.name, facts.st_size, facts.st_mtime_ns)).encode())
    digest.update(json.dumps(list(texts)).encode())
    return digest.hexdigest()
