"""The shipped pair by every preset that a CPU has: quantized on the command line, converted, answering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_trt.checkpoint import read_draft, read_target
from dflash_trt.cli import app
from dflash_trt.engine import Engine, convert
from dflash_trt.measure.prompts import encode_prompts
from dflash_trt.measure.verify import answer_together
from dflash_trt.quantize.presets import PRESETS
from dflash_trt.runtime import Tokenizer
from dflash_trt.runtime.open import open_session
from examples.smollm2.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DRAFTER = Path(__file__).parents[2] / "examples/smollm2/drafter"
PACKED = {"nvfp4": 7, "nvfp4-weight-only": 7, "nvfp4-mlp": 4}  # weights of a layer
PROMPTS, LENGTH = 4, 32


@pytest.fixture(scope="module")
def target() -> Path:
    return prepare()


@pytest.fixture(scope="module")
def said(target, tmp_path_factory) -> list[list[int]]:
    """The unquantized pair's answers."""
    return answers(convert(target, DRAFTER, tmp_path_factory.mktemp("plain") / "engine", max_seq_len=512))


def answers(engine: Engine) -> list[list[int]]:
    texts = json.loads((DRAFTER / "heldout_prompts.json").read_text())[:PROMPTS]
    return answer_together(open_session(engine), encode_prompts(Tokenizer(engine.path), texts), LENGTH)


def quantize(target: Path, output: Path, preset: str):
    options = ["--target", str(target), "--draft", str(DRAFTER), "--output", str(output), "--preset", preset]
    return CliRunner().invoke(app, ["quantize", *options, "--calib-samples", "8", "--json"])


def test_the_table_of_presets_holds_no_other_for_a_dense_pair_on_a_cpu(target, tmp_path):
    others = [name for name, preset in PRESETS.items() if name not in PACKED and not preset.needs_cuda]
    assert others == ["nvfp4-experts"]
    result = quantize(target, tmp_path / "output", "nvfp4-experts")
    assert result.exception.exit_code == 2 and "nothing to quantize" in str(result.exception)


@pytest.mark.parametrize("preset", PACKED)
def test_a_preset_gives_checkpoints_that_convert_and_answer(preset, target, said, tmp_path):
    """The drafter's precision changes no token; the target's may change all."""
    result = quantize(target, tmp_path, preset)
    assert result.exit_code == 0, result.output
    models = read_target(tmp_path / "target"), read_draft(tmp_path / "draft")
    for model in models:
        assert len(model.quantization.packed) == PACKED[preset] * model.config.layers
        assert model.quantization.nbytes <= 0.30 * 2 * model.quantization.values
        assert set(model.quantization.packed.values()) == {preset != "nvfp4-weight-only"}
    drafter = convert(target, tmp_path / "draft", tmp_path / "drafter-engine", max_seq_len=512)
    assert answers(drafter) == said
    both = convert(tmp_path / "target", tmp_path / "draft", tmp_path / "engine", max_seq_len=512)
    assert [len(answer) for answer in answers(both)] == [LENGTH] * PROMPTS
