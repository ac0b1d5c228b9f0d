"""`bench` compares two lanes fairly and says what it saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_trt.cli import app
from dflash_trt.engine import convert
from dflash_trt.measure.lanes import Heat
from dflash_trt.measure.race import Result, differing, race
from tests.tiny import make_pair

PROMPTS = ["what comes next", "a", "hello there"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    target, draft = make_pair(root, "tiny-llama", words=2, seed=4)
    (root / "prompts.json").write_text(json.dumps(PROMPTS))
    return convert(target, draft, root / "engine", max_batch=2, max_seq_len=96, max_query=8).path


def bench(engine: Path, *options: str):
    prompts = str(engine.parent / "prompts.json")
    return CliRunner().invoke(
        app, ["bench", str(engine), "--prompts", prompts, "--raw", "--max-new-tokens", "12", *options]
    )


@pytest.mark.parametrize("batch", ["1", "2"])
def test_the_figures_of_both_lanes(engine, batch, tmp_path):
    result = bench(engine, "--batch", batch, "--repeat", "2", "--json", "--plot", str(tmp_path / "figures.png"))
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    plain, dflash = record["lanes"]
    assert (plain["lane"], dflash["lane"]) == ("autoregressive", "DFlash")
    assert plain["tokens"] == dflash["tokens"] > 0 and record["differing"] == 0
    assert 1 <= dflash["tau"] <= 8 and len(dflash["acceptance"]) == 7 and "tau" not in plain
    for lane in record["lanes"]:
        assert lane["step"]["engine_ms"] > 0 and 0 < lane["step"]["host_share"] < 1
        assert lane["peak_rss"] > 10 * 2**20
    assert record["machine"]["cores"] >= 1 and record["machine"]["versions"]["onnxruntime"]
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_fits_a_terminal(engine):
    result = bench(engine, "--repeat", "1")
    assert result.exit_code == 0 and "same tokens for all 3 prompts" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120


@pytest.mark.parametrize("content", ["", "[]", "{}", "[1]", "[", '["a", ""]'])
def test_a_file_without_prompts_is_a_user_error(engine, tmp_path, content):
    file = tmp_path / "prompts.json"
    file.write_text(content)
    result = CliRunner().invoke(app, ["bench", str(engine), "--prompts", str(file)])
    assert result.exception.exit_code == 2 and str(file) in str(result.exception)


def test_a_batch_beyond_the_engine_is_a_user_error(engine):
    result = bench(engine, "--batch", "3")
    assert result.exception.exit_code == 2 and "--max-batch" in str(result.exception)


class Metronome:
    """A lane whose answers take as long as it is told."""

    def __init__(self, name: str, seconds: list[float], log: list[str]):
        self.name, self._seconds, self._log = name, iter([0.0, *seconds]), log

    def answer(self, prompts, max_new_tokens) -> Heat:
        self._log.append(self.name)
        return Heat([(1, 2)] * len(prompts), next(self._seconds))


def test_lanes_take_turns_in_an_order_that_turns_and_medians_count():
    log: list[str] = []
    results = race([Metronome("a", [1, 9, 2], log), Metronome("b", [4, 4, 4], log)], [[[7]]], 2, rounds=3)
    assert "".join(log) == "ab" + "ab" + "ba" + "ab"  # warm-up, then three rounds
    assert [result.tokens_per_second for result in results] == [1.0, 0.5]


def test_one_other_token_in_one_round_is_seen():
    same, other = Heat([(1, 2), (3,)], 1.0), Heat([(1, 2), (4,)], 1.0)
    assert differing([Result("a", [[same, same]]), Result("b", [[same, same]])]) == 0
    assert differing([Result("a", [[same, same]]), Result("b", [[same, other]])]) == 1
