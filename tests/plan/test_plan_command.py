"""`dflash-trt plan`: what it prints, draws and refuses; and docs/plan.md says what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from matplotlib import image
from typer.testing import CliRunner

from dflash_trt.cli import app
from dflash_trt.errors import UserError
from dflash_trt.plan.acceptance import check_constant_rate
from dflash_trt.plan.measured import is_available
from dflash_trt.plan.residuals import acceptance_markdown, markdown, residuals
from dflash_trt.published import published
from dflash_trt.recipes import read_recipe
from tests.plan.pairs import card
from tests.tiny import make_pair

DOCS = Path(__file__).parents[2] / "docs"
RECIPES = DOCS.parent / "build_recipes"
PAIR = ["--target", "openai/gpt-oss-120b", "--gpus", "B300x8"]
QUICK = [*PAIR, "--tp", "8", "--data", "roofline", "--batch", "1,8,64", "--draft-length", "4,9"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_ratios_stand_beside_those_that_nvidia_published():
    output = run(*PAIR, "--tp", "8", "--data", "roofline")
    for over, claimed in (("AR", "more than 15 x"), ("EAGLE-3", "1.5 x")):
        for speed in (500, 550, 600):
            [line] = [line for line in output.splitlines() if line.startswith(f"DFlash / {over} at {speed} tok/s/user")]
            assert f"(NVIDIA: {claimed} at 500 to 600" in line
            assert "error" in line or "not that fast" in line
    assert "not published" in output and "model card of z-lab/gpt-oss-120b-DFlash" in output


def test_the_choice_is_printed_as_the_keys_of_a_recipe():
    output = run(*QUICK, "--goal", "latency")
    assert "draft_length: 9\nparallel: {tp: 8, ep: 1, attention_dp: false}" in output
    assert "limits: {batch: 1, sequence: 8192, tokens: 8192}" in output


def test_a_recipe_takes_the_keys_also_where_copies_share_a_machine(tmp_path):
    words = [*PAIR, "--tp", "4", "--data", "roofline", "--batch", "64", "--draft-length", "5"]
    assert "2 copies of it, on 4 GPUs each" in run(*words) and "\ngpus: B300x4\ndraft_length: 5\n" in run(*words)
    keys = json.loads(run(*words, "--json"))["choice"]["keys"]
    former = yaml.safe_load((RECIPES / "gpt-oss-120b-b300x8-interactive.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(former | keys | {"name": "mine"}))
    recipe = read_recipe(str(tmp_path / "mine.yaml")).recipe
    assert (str(recipe.machine), recipe.parallel.tp, recipe.limits.batch) == ("B300x4", 4, 64)


def test_json_has_all_of_it():
    record = json.loads(run(*QUICK, "--json"))
    assert record["target"] == "openai/gpt-oss-120b" and record["gpus"] == "B300x8" and record["data"] == "roofline"
    assert record["points"] == 3 * (1 + 7 + 2) and record["fitting"] == record["points"]
    assert set(record["fronts"]) == {"ar", "eagle3", "dflash"}
    assert record["acceptance"]["dflash"]["tokens"]["9"] == pytest.approx(4.5)
    point = record["fronts"]["dflash"][0]
    assert set(point) == {
        "method", "tp", "ep", "attention_dp", "batch", "draft_length", "tokens_per_step", "step_seconds", "parts",
        "tokens_per_second_per_user", "tokens_per_second_per_gpu", "memory",
    }  # fmt: skip
    assert set(point["parts"]) == {"target", "head", "sampling", "drafter", "waiting"}
    assert point["memory"]["weights"] == 8_169_246_720 and point["memory"]["fits"]
    assert record["claim"] == {"ar": 15.0, "eagle3": 1.5}
    assert {"per_user", "over", "dflash", "other", "fastest", "ratio"} == set(record["ratios"][0])
    assert record["choice"]["keys"]["parallel"] == {"tp": 8, "ep": 1, "attention_dp": False}


def test_a_recipe_is_planned_with_its_own_split_and_limits():
    record = json.loads(run("gpt-oss-120b-b300x8-interactive", "--data", "roofline", "--batch", "1,64", "--json"))
    assert record["goal"] == "interactive" and record["workload"]["sequence"] == 65_536
    assert all(point["tp"] == 8 and point["ep"] == 1 for front in record["fronts"].values() for point in front)


def test_the_picture_shows_three_lines_and_is_not_overwritten_unasked(tmp_path):
    file = tmp_path / "front.png"
    run(*PAIR, "--tp", "8", "--data", "roofline", "--output", str(file))
    assert file.read_bytes().startswith(b"\x89PNG") and [*tmp_path.iterdir()] == [file]
    pixels = (image.imread(file)[..., :3] * 255).round().astype(int)
    assert pixels.shape == (896, 1440, 3)
    for color in ("8792a0", "d98e32", "2f7d4f", "b03a2e", "f2ead9"):
        wanted = [int(color[i : i + 2], 16) for i in (0, 2, 4)]
        assert (pixels == wanted).all(axis=-1).sum() > 100, color
    assert "pass --force" in refused(*QUICK, "--output", str(file))
    before = file.read_bytes()
    run(*QUICK, "--output", str(file), "--force")
    assert file.read_bytes() != before


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path):
    result = CliRunner().invoke(app, ["plan", *QUICK, "--output", str(tmp_path / "front.xyz")])
    assert "no name of a picture" in str(result.exception) and not [*tmp_path.iterdir()]
    for name, says in {"": "no name of a picture", "front": "no name of a picture", "no/a.png": "mkdir -p"}.items():
        assert says in refused(*QUICK, "--force", "--output", str(tmp_path / name))
    (tmp_path / "link.png").symlink_to("nowhere")
    assert "pass --force" in refused(*QUICK, "--output", str(tmp_path / "link.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["link.png"]


def test_without_the_wheel_the_roofline_is_used_and_a_note_says_so(monkeypatch):
    monkeypatch.setattr("dflash_trt.plan.measured.PACKAGE", "no_such_package")
    plain = [argument for argument in QUICK if argument not in ("--data", "roofline")]
    output = run(*plain)
    assert "times: roofline" in output and "note: aiconfigurator-core" in output and "'dflash-trt[plan]'" in output
    assert "not installed" in json.loads(run(*plain, "--json"))["notes"][-1]
    assert "not installed" not in run(*QUICK)
    assert "is not installed" in refused(*plain, "--data", "measured")


def test_directories_are_planned_and_their_names_printed_as_they_are(tmp_path):
    target, draft = make_pair(tmp_path / "a[red]b")
    words = ["--target", str(target), "--draft", str(draft), "--gpus", "H200", "--tau", "3@7", "--data", "roofline"]
    output = run(*words)
    assert f"{target} in bf16 on H200x1" in output and "draft_length: 7" in output


def test_a_drafter_of_ones_own_has_the_published_acceptance_and_that_is_said(tmp_path):
    """Sizes of Qwen3-8B's, from its config alone."""
    (tmp_path / "config.json").write_text(json.dumps(dict(published("z-lab/Qwen3-8B-DFlash-b16").config)))
    words = ["--target", "Qwen/Qwen3-8B", "--draft", str(tmp_path), "--gpus", "B200", "--data", "roofline"]
    assert "that is of the published drafter: pass --tau" in run(*words)
    assert "published drafter" not in run(*words, "--tau", "4@15")


def test_under_attention_dp_the_batch_is_told_of_all_gpus_and_of_each():
    output = run(*PAIR, "--tp", "8", "--ep", "8", "--attention-dp", "--data", "roofline", "--batch", "64")
    assert "batch 64 (8 on each GPU, as limits count)" in output and "limits: {batch: 8, " in output


def test_what_does_not_fit_is_told_with_the_largest_batch_that_does():
    said = refused(*PAIR, "--tp", "8", "--data", "roofline", "--batch", "8000", "--sequence", "131072")
    assert "the largest batch is AR 415, EAGLE-3 393, DFlash 287" in said
    said = refused("--target", "openai/gpt-oss-120b", "--gpus", "RTX PRO 6000", "--data", "roofline", "--batch", "999")
    assert "nothing fits in RTX PRO 6000's memory" in said


def test_nothing_as_fast_as_asked_is_an_answer():
    output = run("--target", "openai/gpt-oss-120b", "--gpus", "H200", "--per-user", "5000", "--data", "roofline")
    assert "no setting; the fastest has" in output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give a recipe, or --target and --gpus"),
        (["no-such-recipe"], "there is no recipe"),
        (["gpt-oss-120b-b300x8-interactive", "--tp", "4"], "--tp beside a recipe"),
        (["--target", "openai/gpt-oss-120b", "--gpus", "B900x8"], "names no GPU known here"),
        ([*PAIR, "--attention-dp"], "about a --tp"),
        ([*PAIR, "--draft-length", "10"], "does not fit a block of 10"),
        ([*PAIR, "--category", "codin"], "did you mean coding"),
        ([*PAIR, "--context", "9000", "--sequence", "100"], "a context of 9,000 tokens on average is more"),
        ([*PAIR, "--sequence", "200000"], "that openai/gpt-oss-120b was made for"),
        ([*PAIR, "--context", "200000"], "that openai/gpt-oss-120b was made for — --context"),
        ([*PAIR, "--search"], "--search is about a recipe"),
        (["--residuals", *PAIR], "--residuals is about all that is published"),
        ([*PAIR, "--kv-dtype", "int4"], "there is no KV cache in int4"),
        ([*PAIR, "--precision", "int4"], "weights in int4 are not known"),
        (["--target", "google/gemma-4-31B-it", "--gpus", "B200"], "no acceptance length of DFlash is published"),
    ],
)
def test_mistakes_are_told(arguments, says):
    assert says in refused(*arguments)


@pytest.mark.skipif(not is_available(card()), reason="the table has measured data")
def test_docs_have_the_residuals_that_the_command_prints():
    page = (DOCS / "plan.md").read_text()
    assert markdown(residuals()) in page
    assert acceptance_markdown(check_constant_rate()) in page


def test_docs_show_the_picture_of_the_command():
    assert "![" in (DOCS / "plan.md").read_text() and (DOCS / "plan.png").stat().st_size > 20_000
