"""`verify` agrees with a right engine, and only with a right one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from dflash_trt.cli import app
from dflash_trt.engine import convert
from dflash_trt.errors import UserError
from dflash_trt.measure.agreement import TIE, Agreement
from dflash_trt.measure.verify import verify as run_verify
from tests.packed import pack
from tests.tiny import make_pair

PROMPTS = ["what comes next", "a", "hello there"]


@pytest.fixture(scope="module", params=[("tiny-llama", 4), ("tiny-qwen3", 6)], ids=lambda p: p[0])
def engine(request, tmp_path_factory) -> Path:
    base, seed = request.param
    root = tmp_path_factory.mktemp(base)
    target, draft = make_pair(root, base, words=2, seed=seed)
    (root / "prompts.json").write_text(json.dumps(PROMPTS))
    return convert(target, draft, root / "engine", max_batch=2, max_seq_len=96, max_query=8).path


def verify(engine: Path, *options: str):
    prompts = str(engine.parent / "prompts.json")
    return CliRunner().invoke(
        app, ["verify", str(engine), "--prompts", prompts, "--raw", "--max-new-tokens", "16", "--json", *options]
    )


def test_both_halves_agree_with_their_references(engine):
    result = verify(engine)
    verdict = json.loads(result.stdout)
    assert result.exit_code == 0 and verdict["holds"] and verdict["differing"] == 0
    for half in ("target", "draft"):
        assert verdict[half]["holds"] and verdict[half]["wrong"] == 0 and verdict[half]["relative"] < 1e-4
    assert verdict["target"]["tokens"] >= 16 * len(PROMPTS)


@pytest.mark.parametrize("activations", [True, False], ids=["W4A4", "W4A16"])
def test_an_nvfp4_drafter_and_weights_agree_with_references_that_round(activations, tmp_path):
    target, draft = make_pair(tmp_path, words=2, seed=6)
    pack(target, "*_proj", activations=False)
    pack(draft, "*_proj", "fc", activations=activations)
    engine = convert(target, draft, tmp_path / "engine", max_batch=2, max_seq_len=96, max_query=8)
    verdict = run_verify(engine, [[97, 98], [99]], 16)
    assert verdict.holds and verdict.draft.tokens and verdict.draft.rounded == activations
    assert verdict.draft.relative < 1e-4 and verdict.target.relative < 1e-4


def test_a_target_that_rounds_activations_is_refused_with_the_reason(tmp_path):
    target, draft = make_pair(tmp_path)
    pack(target, "*mlp*")
    engine = convert(target, draft, tmp_path / "engine", max_batch=2, max_seq_len=96, max_query=8)
    with pytest.raises(UserError, match=r"rounds its activations to 4 bits .* `bench --compare`"):
        run_verify(engine, [[97]], 4)


def test_tokens_behind_a_rounding_step_are_counted_and_must_be_few():
    reference = np.zeros((40, 3), np.float32)
    reference[:, 1] = 2
    off = reference.copy()
    off[:5, 2] = 3  # other logits, another token
    for wrong, holds in ((4, True), (5, False)):
        agreement = Agreement(rounded=True)
        agreement.add(
            np.where(np.arange(40)[:, None] < wrong, off, reference), [2] * wrong + [1] * (40 - wrong), reference
        )
        assert (agreement.stepped, agreement.wrong, agreement.tokens, agreement.holds) == (wrong, 0, 40, holds)


def test_without_the_drafter_the_target_alone_is_compared(engine):
    verdict = json.loads(verify(engine, "--no-draft").stdout)
    assert verdict["holds"] and "draft" not in verdict


def test_a_graph_that_computes_something_else_is_a_disagreement(tmp_path):
    target, draft = make_pair(tmp_path, "tiny-llama", words=2, seed=4)
    engine = convert(target, draft, tmp_path / "engine", max_batch=2, max_seq_len=96, max_query=8)
    prompts = [[97, 98], [99]]
    assert run_verify(engine, prompts, 16).holds
    model = onnx.load(engine.graph(), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "RMSNormalization":
            next(attribute for attribute in node.attribute if attribute.name == "epsilon").f = 5.0
    onnx.save(model, engine.graph())
    verdict = run_verify(engine, prompts, 16)
    assert verdict.differing and not verdict.holds


def test_a_token_is_wrong_unless_the_reference_ties():
    reference = np.array([[0.0, 1.0, 1.0 - TIE / 2, 0.5]], np.float32)
    counts = []
    for token in (1, 2, 3):
        agreement = Agreement()
        agreement.add(reference, [token], reference)
        counts.append((agreement.ties, agreement.wrong, agreement.holds))
    assert counts == [(0, 0, True), (1, 0, True), (0, 1, False)]


def test_logits_that_are_off_do_not_hold_even_if_every_token_is_right():
    reference = np.array([[0.0, 10.0]], np.float32)
    agreement = Agreement()
    agreement.add(reference + np.float32(0.01), [1], reference)
    assert agreement.wrong == 0 and not agreement.holds


@pytest.mark.parametrize(
    "module, fix", [("transformers", "requirements-dev.txt"), ("dflash", "requirements-nodeps.txt")]
)
def test_an_absent_reference_is_named_with_how_to_install_it(engine, module, fix):
    code = f"import sys; sys.modules[{module!r}] = None; from dflash_trt.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "verify",
        str(engine),
        "--prompts",
        str(engine.parent / "prompts.json"),
        "--raw",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert f"the reference {module} cannot be imported" in result.stderr and fix in result.stderr
