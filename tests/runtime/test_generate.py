"""`dflash-trt generate` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.engine import convert
from tests.tiny import make_pair

COMMAND = [sys.executable, "-c", "from dflash_trt.cli import main; main()", "generate"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("generate")
    target, draft = make_pair(root, "tiny-qwen3", words=4)
    return convert(target, draft, root / "engine", max_batch=2, max_seq_len=2048).path


def generate(engine: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, str(engine), "--threads", "1", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_text_is_the_same_with_and_without_the_drafter(engine):
    plain = generate(engine, "--prompt", "one", "--max-new-tokens", 30)
    assert (plain.returncode, plain.stderr) == (0, "")
    assert len(plain.stdout.strip()) == 30
    assert generate(engine, "--prompt", "one", "--max-new-tokens", 30, "--no-draft").stdout == plain.stdout


def test_a_stop_string_ends_the_text_before_it(engine):
    text = generate(engine, "--prompt", "one", "--max-new-tokens", 30).stdout.strip("\n")
    done = generate(engine, "--prompt", "one", "--max-new-tokens", 30, "--stop", text[9:12], "--json")
    record = json.loads(done.stdout)
    assert record["text"] == text[: text.find(text[9:12])] and record["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.json", '["one", "two\\nlines", "three"]'),
        ("prompts.jsonl", '"one"\n{"prompt": "two\\nlines"}\n\n{"prompt": "three"}\n'),
        ("prompts.txt", "one\n\ntwo lines\nthree\n"),
    ],
)
def test_prompts_of_a_file_are_answered_in_order(engine, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    done = generate(engine, "--prompts", tmp_path / name, "--max-new-tokens", 5, "--json", "--raw")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["prompt"].split()[0] for record in records] == ["one", "two", "three"]
    for record in records:
        assert len(record["token_ids"]) == record["new_tokens"] == len(record["text"]) == 5
        assert record["finish_reason"] == "length" and record["prompt_tokens"] == len(record["prompt"])
        assert 1 <= record["tau"] <= 5 and len(record["acceptance"]) == 7


def test_stats_go_to_stderr(engine):
    done = generate(engine, "--prompt", "one", "--max-new-tokens", 8, "--stats")
    assert len(done.stdout.strip()) == 8
    for word in ("acceptance length", "prefill", "decode", "host", "tokens/s"):
        assert word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no prompt"),
        (["--prompt", ""], "no tokens"),
        (["--prompt", "one", "--top-p", 0], "top_p is 0"),
        (["--prompt", "one", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "one", "--top-k", 2000], "top_k is 2000"),
        (["--prompt", "one", "--stop", ""], "stop is ['']"),
        (["--prompt", "one", "--max-new-tokens", 3000], "max_seq_len 2048"),
        (["--prompts", "missing.txt"], "missing.txt"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(engine, arguments, words):
    done = generate(engine, *arguments, "--raw")
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_with_130_and_no_traceback(engine):
    process = subprocess.Popen(
        [*COMMAND, str(engine), "--prompt", "one", "--max-new-tokens", "2000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout and process.stdout.read(1), "the text appears while it is made"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")
