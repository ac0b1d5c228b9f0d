"""Inputs that must work or be refused, one YAML file a case: `pair/` at conversion, `nvfp4/` around quantization,
`gpt_oss/` around experts and ranks.

name, why
base                             tiny-qwen3, tiny-llama or tiny-gptoss (tests/tiny.py)
target_config, draft_config      set, remove: dotted keys of config.json, whatever the weights are
target_tensors, draft_tensors    remove, add {name: {shape, dtype}}, rename {old: new}, split N
truncate_draft                   bytes to cut from the end of its file
block_size                       the option of `convert`
pack_draft                       modules (globs) to pack as NVFP4, declared: keys to change in hf_quant_config.json
zeros                            weights of the drafter to zero: [row or null for all, first column, end]
ranks, world                     tp and ep of the engine, and how many processes run it
quantize                         a preset: `quantize` instead of `convert`
refused                          words that the message must hold
reads                            values that the drafter's config must come to
generate, gives                  a request to the finished engine and what must come of it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.packed import pack, redeclare, zero
from tests.tiny import edit_config, edit_tensors, make_pair, make_target

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    name: str
    why: str
    base: str
    target_config: Mapping[str, Any] = field(default_factory=dict)
    draft_config: Mapping[str, Any] = field(default_factory=dict)
    target_tensors: Mapping[str, Any] = field(default_factory=dict)
    draft_tensors: Mapping[str, Any] = field(default_factory=dict)
    pack_draft: Mapping[str, Any] = field(default_factory=dict)
    zeros: Mapping[str, tuple[int | None, int, int]] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    world: int | None = None
    quantize: str = ""
    truncate_draft: int = 0
    block_size: int | None = None
    refused: tuple[str, ...] = ()
    reads: Mapping[str, Any] = field(default_factory=dict)
    generate: Mapping[str, Any] = field(default_factory=dict)
    gives: str = ""

    def write(self, root: Path, **options: Any) -> tuple[Path, Path]:
        """The case's target and drafter directories; `options` go to `make_pair`."""
        target, draft = make_pair(root, self.base, **options)
        if self.target_config:  # a real target of that shape, beside a drafter of the base's
            make_target(target, self.base, self.target_config["set"])
        if self.draft_config:
            edit_config(draft, **self.draft_config)
        for tensor, place in self.zeros.items():
            zero(draft, tensor, *place)
        if self.pack_draft:
            pack(draft, *self.pack_draft["modules"])
            redeclare(draft, self.pack_draft.get("declared", {}))
        for directory, edits in ((target, self.target_tensors), (draft, self.draft_tensors)):
            if edits:
                edit_tensors(directory, **edits)
        if self.truncate_draft:
            file = draft / "model.safetensors"
            file.write_bytes(file.read_bytes()[: -self.truncate_draft])
        return target, draft


def load(folder: str) -> dict[str, Case]:
    files = sorted((FOLDER / folder).glob("*.yaml"))
    return {file.stem: Case(**yaml.safe_load(file.read_text())) for file in files}


CASES, NVFP4 = load("pair"), load("nvfp4")
REFUSED = [stem for stem, case in CASES.items() if case.refused]
ACCEPTED = [stem for stem, case in CASES.items() if not case.refused]
