"""Published drafters: their configs, over weights that are holes of the right shapes.

`configs/*.json` hold a repository's `config`, the keys of it that no source shows and that were `inferred`, and either
the DraftConfig to `expect`, with the file's number of `tensors` and their size, or the words of its refusal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint import DraftConfig, Rope, read_draft
from dflash_trt.errors import UserError
from tests.checkpoint.sparse import write_draft

PUBLISHED = {file.stem: json.loads(file.read_text()) for file in (Path(__file__).parent / "configs").glob("*.json")}
READ = sorted(stem for stem, case in PUBLISHED.items() if "expect" in case)


def expected(fields: dict[str, Any]) -> DraftConfig:
    lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return DraftConfig(**fields | lists | {"rope": Rope(**fields["rope"])})


@pytest.mark.parametrize("stem", READ)
def test_a_published_drafter_is_read(tmp_path, stem):
    case = PUBLISHED[stem]
    draft = read_draft(write_draft(tmp_path, case["config"]))
    assert draft.config == expected(case["expect"])
    assert len(draft.tensors) == case["tensors"]
    gib = sum(ref.nbytes for ref in draft.tensors.values()) / 2**30
    assert gib == pytest.approx(case["gib"], abs=0.005)


@pytest.mark.parametrize("stem", sorted(PUBLISHED.keys() - READ))
def test_a_published_relative_is_refused_by_its_name(tmp_path, stem):
    case = PUBLISHED[stem]
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError) as error:
        read_draft(tmp_path)
    assert all(word in str(error.value) for word in [*case["refused"], "not supported"])
