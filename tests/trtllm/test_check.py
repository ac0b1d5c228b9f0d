"""`dflash-trt check`: exit codes, what people and scripts read, and the table in docs/preflight.md."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from dflash_trt.cli import main
from dflash_trt.trtllm.rulebook import markdown, rows
from tests.trtllm.rules.build import CONFIG, DRAFT, GONE, TARGET, change, write

DOCS = Path(__file__).parents[2] / "docs" / "preflight.md"
RECORDED = Path(__file__).parent / "recorded"
BEGIN, END = "<!-- rules -->\n", "<!-- /rules -->\n"


@pytest.fixture
def check(monkeypatch, capsys):
    """Run `dflash-trt check` as the shell does: (exit code, stdout, stderr)."""

    def run(*arguments: object, columns: int = 80) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["dflash-trt", "check", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def config(tmp_path):
    """Write the good YAML, changed, and name the pair."""

    def make(changes=None) -> list[object]:
        return ["--config", write(tmp_path, change(CONFIG, changes or {})).file, "--target", TARGET, "--draft", DRAFT]

    return make


def test_the_docs_hold_the_table_of_all_rules():
    text = DOCS.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == markdown().strip()


def test_the_list_names_every_rule(check):
    code, out, _ = check("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.strip()[:2] in ("DF", "DM")] == [
        row.id for row in rows()
    ]
    assert max(map(len, out.splitlines())) <= 80
    listed = json.loads(check("--list", "--json")[1])
    assert {row.id: row.why for row in rows()} == {row["id"]: row["why"] for row in listed}


def test_ids_titles_and_reasons_are_each_rules_own():
    assert len({row.id for row in rows()}) == len({row.title for row in rows()}) == len(rows())
    assert all(row.why and row.source and row.title for row in rows())


def test_a_good_file_passes(check, config):
    code, out, err = check(*config())
    assert (code, err) == (0, "")
    assert "no errors" in out and "B300x8" in out


def test_warnings_pass_unless_strict(check, config):
    arguments = config({"kv_cache_config.enable_block_reuse": True})
    assert check(*arguments)[0] == 0
    code, out, _ = check(*arguments, "--strict")
    assert code == 2 and "DF071" in out


def test_errors_end_with_code_2_and_all_are_told(check, config):
    code, out, err = check(*config({"max_num_tokens": 8, "max_beam_width": 4, "max_seq_length": 7}))
    assert (code, err) == (2, "")
    assert [rule for rule in ("DF000", "DF012", "DF073") if rule not in out] == []


def test_a_screen_of_80_columns_holds_it(check, config):
    bad = {"max_num_tokens": 8, "speculative_config.max_draft_len": 20, "kv_cache_config": GONE}
    lines = check(*config(bad))[1].splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 48


def test_why_is_said_of_errors_and_on_request_of_all(check, config):
    arguments = config({"kv_cache_config.enable_block_reuse": True})
    brief, full = (" ".join(check(*arguments, *more)[1].split()) for more in ((), ("--why",)))
    assert "issue 16005" not in brief and "issue 16005" in full


def test_scripts_get_one_object(check, config):
    code, out, _ = check(*config({"max_num_tokens": 8}), "--json")
    card = json.loads(out)
    assert code == 2 and card["counts"]["error"] == 1 == len(
        [one for one in card["findings"] if one["severity"] == "error"]
    )
    [error] = [one for one in card["findings"] if one["severity"] == "error"]
    assert error.keys() == {"rule", "severity", "what", "why", "source", "fix", "line"}
    assert card["gpus"] == "B300x8" and card["memory"]["weights"] > 1e9


def test_a_recipe_is_checked_by_its_name(check):
    code, out, _ = check("gpt-oss-120b-b300x8-interactive")
    assert code == 0 and "openai/gpt-oss-120b" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a recipe or a file"),
        (["gpt-oss-120b-b300x8-interactive", "--config", "x.yaml"], "one thing"),
        (["--config", "/nowhere.yaml"], "nowhere.yaml"),
        (["gpt-oss-120b-b300x8-interactiv"], "did you mean gpt-oss-120b-b300x8-interactive"),
        (["gpt-oss-120b-b300x8-interactive", "--goal", "latency"], "a recipe names its own"),
        (["gpt-oss-120b-b300x8-interactive", "--nodes", "2"], "--gpus"),
        (["gpt-oss-120b-b300x8-interactive", "--gpus", "B3000x8"], "B300"),
    ],
)
def test_what_cannot_be_checked_is_one_line(arguments, words, check):
    code, out, err = check(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and words in err and err.strip().count("\n") == 0


def test_what_a_terminal_would_obey_is_shown_as_text(check, config):
    code, out, _ = check(*config({"backend": "\x1b[31mred[/]\nDF999"}))
    assert code == 2 and "\x1b" not in out and r"\x1b[31mred[/]\nDF999" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_narrow_screen_holds_it(check, config):
    bad = {"max_num_tokens": 8, "speculative_config.max_draft_len": 20, "kv_cache_config": GONE}
    assert max(map(len, check(*config(bad), columns=60)[1].splitlines())) <= 60


def test_paths_that_do_not_exist_are_problems_too(check, config):
    code, out, _ = check(*config()[:2], "--target", "/no/target", "--draft", "/no/draft", "--json")
    found = {one["rule"]: one["what"] for one in json.loads(out)["findings"]}
    assert code == 2
    assert "/no/draft does not exist" in found["DF003"] and "/no/target does not exist" in found["DF007"]


def programs(folder: Path, monkeypatch, **answers: str) -> None:
    """A PATH with nvidia-smi alone, which answers as recorded."""
    cases = "".join(f"{pattern}) cat {RECORDED / name} ;;\n" for pattern, name in answers.items())
    file = folder / "nvidia-smi"
    file.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}esac\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


def test_the_doctor_finds_links_that_are_down(check, config, tmp_path, monkeypatch):
    answers = {
        "--query*": "b300x8.gpus",
        "nvlink*": "b300x8-link-down.links",
        "topo*": "b300x8.topo",
        "-q": "b300x8.query",
    }
    programs(tmp_path, monkeypatch, **answers)
    code, out, _ = check(*config(), "--doctor", "--json")
    found = {one["rule"]: one["what"] for one in json.loads(out)["findings"]}
    assert code == 2
    assert "GPU 3: 0 of 18" in found["DM006"]
    assert not {"DM001", "DM002", "DM003", "DM004", "DM007"} & found.keys()


def test_the_doctor_of_a_machine_without_a_gpu_says_just_that(check, config, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, _ = check(*config(), "--doctor", "--json")
    machine = [one for one in json.loads(out)["findings"] if one["rule"].startswith("DM")]
    assert code == 2
    assert [one["what"] for one in machine] == [
        "no NVIDIA GPU here (nvidia-smi is not installed): nothing else of this machine was checked"
    ]


def test_a_driver_that_does_not_answer_is_quoted(check, config, tmp_path, monkeypatch):
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    file = tmp_path / "nvidia-smi"
    file.write_text(f'#!/bin/sh\necho "{said}"\nexit 9\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    out = check(*config(), "--doctor", "--json")[1]
    assert said in next(one["what"] for one in json.loads(out)["findings"] if one["rule"] == "DM001")
