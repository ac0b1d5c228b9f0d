"""Every case of `tensorrt_llm/` behaves as its file says, through the command line.

name, why
config                  the YAML for trtllm-serve
target, draft           published names
draft_config            keys to set in the drafter's config.json, which then lies in a folder
gpus                    each of these is checked
rule, refused           which rule speaks, and words that the message must hold
line                    what stands in the line that it names
cured                   dotted keys to set, after which that rule is silent
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.cli import main
from dflash_trt.published import published
from tests.trtllm.rules.build import change

FOLDER = Path(__file__).parent / "tensorrt_llm"


@dataclass(frozen=True)
class Case:
    name: str
    why: str
    config: Mapping[str, Any]
    target: str
    draft: str
    gpus: Sequence[str]
    rule: str
    refused: Sequence[str]
    draft_config: Mapping[str, Any] = field(default_factory=dict)
    line: str | None = None
    cured: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, changes: Mapping[str, Any] | None = None) -> list[str]:
        """The arguments of `check`."""
        file = folder / "serve.yaml"
        draft = self.draft
        if self.draft_config:
            draft = str(folder / "draft")
            Path(draft).mkdir(exist_ok=True)
            config = {**published(self.draft).config, **self.draft_config}
            (Path(draft) / "config.json").write_text(json.dumps(config))
        values = change(dict(self.config), dict(changes or {}))
        values["speculative_config"].setdefault("speculative_model", draft)
        file.write_text(yaml.safe_dump(values, sort_keys=False))
        return ["check", "--config", str(file), "--target", self.target, "--draft", draft]


CASES = {file.stem: Case(**yaml.safe_load(file.read_text())) for file in sorted(FOLDER.glob("*.yaml"))}
CURED = [(stem, card) for stem, case in CASES.items() if case.cured for card in case.gpus]


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `dflash-trt` as the shell does: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["dflash-trt", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("stem", "card"), [(stem, card) for stem, case in CASES.items() for card in case.gpus])
def test_what_a_case_asks_for_is_refused_by_its_rule(stem, card, tmp_path, command):
    case = CASES[stem]
    arguments = [*case.write(tmp_path), "--gpus", card]
    code, out, err = command(*arguments, "--json")
    findings = [one for one in json.loads(out)["findings"] if one["rule"] == case.rule and one["severity"] == "error"]
    assert (code, err) == (2, "")
    assert findings
    said = f"{findings[0]['what']} {findings[0]['fix']}"
    assert not [word for word in case.refused if word.lower() not in said.lower()], said
    if case.line:
        lines = (tmp_path / "serve.yaml").read_text().splitlines()
        assert lines[findings[0]["line"] - 1].strip() == case.line


@pytest.mark.parametrize("stem", CASES)
def test_people_read_it_too(stem, tmp_path, command):
    case = CASES[stem]
    code, out, _ = command(*case.write(tmp_path), "--gpus", case.gpus[0])
    text = " ".join(out.split())
    assert code == 2
    assert not [word for word in case.refused if word.lower() not in text.lower()], out
    assert "Traceback" not in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(("stem", "card"), CURED)
def test_following_the_advice_cures_it(stem, card, tmp_path, command):
    case = CASES[stem]
    _, out, _ = command(*case.write(tmp_path, case.cured), "--gpus", card, "--json")
    assert case.rule not in {finding["rule"] for finding in json.loads(out)["findings"]}
