"""Every case of `gpt_oss/` behaves as its file says, through the command line, under mpirun where there are ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cases import Case, load
from tests.graph.drive import Row, inputs
from tests.graph.drive import load as load_session
from tests.graph.oracle import Oracle
from tests.runtime import mpi

CASES = load("gpt_oss")
RANKED = [stem for stem, case in CASES.items() if case.world]
LIMITS = ["--max-query", "16", "--max-seq-len", "256"]


def convert(case: Case, root: Path, **options) -> tuple[Path, tuple[int, str]]:
    """The engine directory and what `convert` said."""
    target, draft = case.write(root, **options)
    ranks = [str(word) for name, value in case.ranks.items() for word in (f"--{name}", value)]
    command = ["convert", "--target", target, "--draft", draft, "--output", root / "engine", *ranks, *LIMITS]
    done = mpi.run_alone(*mpi.CLI, *command)
    return root / "engine", (done.returncode, done.stderr)


def refuses(case: Case, code: int, errors: str) -> bool:
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    return code == 2 and len(lines) == 1 and all(word.lower() in lines[0].lower() for word in case.refused)


def test_experts_that_cannot_be_split_are_refused(tmp_path):
    case = CASES["ep-uneven"]
    engine, said = convert(case, tmp_path)
    assert refuses(case, *said), said
    assert not engine.exists()


@pytest.mark.parametrize("stem", RANKED)
def test_engines_of_several_ranks(stem, tmp_path):
    case = CASES[stem]
    engine, (code, _) = convert(case, tmp_path, words=4)
    assert code == 0
    prompt = ["--prompt", "abca bc", "--max-new-tokens", "8", "--raw", "--json"]
    done = mpi.run(case.world, *mpi.CLI, "generate", engine, *prompt)
    if case.refused:
        assert refuses(case, done.returncode, done.stderr), done.stderr
        return
    alone = tmp_path / "alone"
    options = ["--target", tmp_path / "target", "--draft", tmp_path / "draft", "--output", alone, *LIMITS]
    assert mpi.run_alone(*mpi.CLI, "convert", *options).returncode == 0
    expected = mpi.run_alone(*mpi.CLI, "generate", alone, *prompt).stdout
    assert done.returncode == 0 and done.stdout == expected and len(json.loads(expected)["token_ids"]) == 8


def test_even_rows_are_gate_and_odd_rows_up(tmp_path):
    target, draft = CASES["gate-up-order"].write(tmp_path)
    session = load_session(target, draft, tmp_path / "engine")
    text = np.random.default_rng(0).integers(0, 256, 12).tolist()
    _, debug = session.debug_step(inputs(8, [Row(text, given=12)]))
    np.testing.assert_allclose(debug["logits"][0, 0], Oracle(target).logits(text)[-1], atol=1e-4)


def test_prompts_around_and_beyond_the_window(tmp_path):
    case = CASES["window-longer-prompt"]
    target, draft = case.write(tmp_path)
    oracle, session = Oracle(target), load_session(target, draft, tmp_path / "engine")
    for length in case.generate["prompt_tokens"]:
        text = np.random.default_rng(length).integers(0, 256, length).tolist()
        outputs, debug = session.debug_step(inputs(8, [Row(text, given=length)]))
        wanted = oracle.logits(text)[-1]
        np.testing.assert_allclose(debug["logits"][0, 0], wanted, atol=1e-4)
        assert outputs.next_token[0] == wanted.argmax()
