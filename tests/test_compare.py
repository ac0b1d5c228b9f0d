"""`bench --compare` tells how far drafts reach and texts agree, and refuses what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dflash_trt.checkpoint import read_target
from dflash_trt.cli import app
from dflash_trt.engine import convert, open_engine
from dflash_trt.measure import compare as comparing
from dflash_trt.measure.compare import labels
from dflash_trt.measure.follow import choices
from dflash_trt.measure.oracles import TargetOracle
from dflash_trt.measure.texts import agreement
from dflash_trt.runtime import Request
from dflash_trt.runtime.open import open_generator, open_session
from tests.tiny import edit_config, make_draft, make_pair, make_target

PROMPTS = ["what comes next", "a", "hello there", "one more"]
TOKENS = 24


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict[str, Path]:
    """A pair, its target with another drafter and with a shorter block, and a coarser target with the first drafter."""
    root = tmp_path_factory.mktemp("compare")
    target, draft = make_pair(root, "tiny-llama", words=2, seed=4)
    other_draft = make_draft(root / "other-draft", {"rope_theta": 5e5}, seed=9)
    other_target = make_target(root / "other-target", "tiny-llama", words=2, seed=4)
    round_weights(other_target / "model.safetensors")
    (root / "prompts.json").write_text(json.dumps(PROMPTS))
    limits = {"max_batch": 2, "max_seq_len": 96, "max_query": 8}
    made = {
        "pair": convert(target, draft, root / "pair", **limits),
        "other-draft": convert(target, other_draft, root / "redrafted", **limits),
        "short": convert(target, draft, root / "short", block_size=3, **limits),
        "other-target": convert(other_target, draft, root / "rounded", **limits),
        "alone": convert(target, None, root / "alone", **limits),
    }
    return {name: engine.path for name, engine in made.items()}


def round_weights(file: Path) -> None:
    """As a quantization would, to three bits of mantissa."""
    coarse = {name: tensor.to(torch.float8_e4m3fn).to(tensor.dtype) for name, tensor in load_file(file).items()}
    save_file(coarse, file, metadata={"format": "pt"})


def run(engines: dict[str, Path], *names: str | Path, options: tuple[str, ...] = ("--repeat", "1")):
    directories = [str(engines.get(name, name)) for name in names]
    prompts = str(engines["pair"].parent / "prompts.json")
    common = ["--prompts", prompts, "--raw", "--max-new-tokens", str(TOKENS)]
    return CliRunner().invoke(app, ["bench", "--compare", *directories, *common, *options])


def record(engines: dict[str, Path], *names: str | Path) -> dict:
    result = run(engines, *names, options=("--repeat", "1", "--json"))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def answers(engine: Path) -> list[list[int]]:
    """Of an engine by itself, its drafter unused."""
    generator = open_generator(open_engine(engine), draft=False)
    texts = []
    for prompt in PROMPTS:
        outs = list(generator.generate([Request(prompt, TOKENS)]))
        texts.append([token for out in outs for token in out.token_ids])
    return texts


def test_an_engine_agrees_with_itself(engines):
    both = record(engines, "pair", "pair")
    (entry,) = both["comparisons"]
    assert entry["same_target"] and entry["tau_ratio"] == 1 and entry["identical"] == len(PROMPTS)
    assert [entry[key] for key in ("next_token_share", "position_share", "prefix_share", "identical_share")] == [1] * 4
    assert entry["first_difference"] == [None] * len(PROMPTS) and both["broken"] == []
    assert len(set(entry["engines"])) == 2


def test_drafters_of_one_target_differ_in_tau_and_not_in_text(engines):
    both = record(engines, "pair", "other-draft", "short")
    long, other, short = both["engines"]
    assert long["tau"] != other["tau"] and (len(long["acceptance"]), len(short["acceptance"])) == (7, 2)
    for engine, entry in zip((other, short), both["comparisons"], strict=True):
        assert entry["same_target"] and entry["identical_share"] == entry["next_token_share"] == 1
        assert entry["tau_ratio"] == pytest.approx(engine["tau"] / long["tau"])
    assert both["broken"] == []


def test_the_bytes_of_weights_are_those_of_the_checkpoints(engines):
    for engine in record(engines, "pair", "other-target")["engines"]:
        manifest = open_engine(Path(engine["path"])).manifest
        for half, model in {"target": manifest.target, "draft": manifest.draft}.items():
            file = Path(model.path) / "model.safetensors"
            header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            assert engine["weight_bytes"][half] == file.stat().st_size - header


def test_two_targets_part_where_their_texts_do(engines):
    (entry,) = record(engines, "pair", "other-target")["comparisons"]
    assert not entry["same_target"] and entry["identical"] < len(PROMPTS)
    ours, theirs = answers(engines["pair"]), answers(engines["other-target"])
    for a, b, first in zip(ours, theirs, entry["first_difference"], strict=True):
        assert a[:first] == b[:first] and (a == b if first is None else a[first : first + 1] != b[first : first + 1])
    equal = sum(x == y for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=False))
    longest = sum(max(len(a), len(b)) for a, b in zip(ours, theirs, strict=True))
    assert entry["position_share"] == equal / longest


def test_next_token_agreement_is_what_transformers_finds_along_the_first_engines_text(engines):
    (entry,) = record(engines, "pair", "other-target")["comparisons"]
    oracle = TargetOracle(read_target(engines["pair"].parent / "other-target"))
    equal = total = 0
    for prompt, answer in zip(PROMPTS, answers(engines["pair"]), strict=True):
        logits, _ = oracle.read([*prompt.encode(), *answer])
        chosen = logits.argmax(-1)[len(prompt) - 1 : -1]
        equal, total = equal + int((chosen == answer).sum()), total + len(answer)
    assert entry["next_token_share"] == equal / total
    assert entry["prefix_share"] < entry["next_token_share"] < 1


@pytest.mark.parametrize("name", ["pair", "short", "other-target"])
def test_choices_along_a_text_are_those_of_transformers(engines, name):
    text = [*b"what comes next", *b"abbabaab" * 2]
    engine = open_engine(engines[name])
    session, oracle = open_session(engine), TargetOracle(read_target(Path(engine.manifest.target.path)))
    expected = oracle.read(text)[0].argmax(-1)
    for start in (1, 7, 8, 9, 16, 29, len(text) - 1, 15):  # around prefill chunks of 8, in one slot again and again
        assert choices(session, text, start) == expected[start - 1 : -1].tolist()


def test_texts_of_one_target_that_differ_are_a_failure(engines, monkeypatch):
    monkeypatch.setattr(comparing, "_identity", lambda engine, target: ("one",))
    result = run(engines, "pair", "other-target")
    assert result.exit_code == 1 and "under one target: pair and rounded" in " ".join(result.stdout.split())


def test_the_tables_fit_a_terminal_and_the_picture_is_drawn(engines, tmp_path):
    picture = tmp_path / "figures.png"
    options = ("--repeat", "1", "--batch", "2", "--plot", str(picture))
    result = run(engines, "pair", "other-draft", "other-target", options=options)
    assert result.exit_code == 0 and "Engines of one target gave the same tokens for all 4" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_answers_of_one_token_tell_nothing_of_drafts(engines, tmp_path):
    picture = tmp_path / "figures.svg"
    options = ("--repeat", "1", "--max-new-tokens", "1", "--plot", str(picture))
    result = run(engines, "pair", "other-draft", options=options)
    assert result.exit_code == 0 and "4 of 4" in result.stdout and picture.exists()
    record = json.loads(run(engines, "pair", "other-draft", options=(*options, "--json")).stdout)
    assert [engine["tau"] for engine in record["engines"]] == [None, None]
    assert record["comparisons"][0]["tau_ratio"] is None and record["comparisons"][0]["next_token_share"] == 1


def test_an_engine_without_a_drafter_is_refused(engines):
    result = run(engines, "pair", "alone")
    assert result.exception.exit_code == 2 and "this engine has no drafter to compare" in str(result.exception)
    assert str(engines["alone"]) in str(result.exception)


def test_another_vocabulary_is_refused(engines, tmp_path):
    target, draft = make_pair(tmp_path, "tiny-llama", target_config={"vocab_size": 300})
    wide = convert(target, draft, tmp_path / "wide", max_batch=2, max_seq_len=96).path
    result = run(engines, "pair", wide)
    assert result.exception.exit_code == 2 and "256 and 300 tokens" in str(result.exception)


def test_another_tokenizer_is_refused(engines, tmp_path):
    target, draft = make_pair(tmp_path, "tiny-llama")
    file = target / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["x"], vocab["y"] = vocab["y"], vocab["x"]
    file.write_text(json.dumps(tokenizer))
    other = convert(target, draft, tmp_path / "engine", max_batch=2, max_seq_len=96).path
    result = run(engines, "pair", other)
    assert result.exception.exit_code == 2 and "tokenizers differ, first in token 120" in str(result.exception)


def test_a_prompt_too_long_for_one_of_them_is_refused_before_any_work(engines, tmp_path):
    root = engines["pair"].parent
    small = convert(root / "target", root / "draft", tmp_path / "small", max_batch=2, max_seq_len=30, max_query=8).path
    result = run(engines, "pair", small)
    assert result.exception.exit_code == 2 and "max_seq_len 30" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--compare", "pair"], "--compare needs two or more"), (["pair", "short"], "add --compare")],
)
def test_the_number_of_directories_must_fit(engines, arguments, words):
    given = [str(engines.get(argument, argument)) for argument in arguments]
    result = CliRunner().invoke(app, ["bench", *given, "--prompts", "none.json"])
    assert result.exception.exit_code == 2 and words in str(result.exception)


def test_a_copy_of_a_target_is_the_same_target_and_another_config_is_not(engines, tmp_path):
    made = {}
    for name in ("copy", "changed"):
        (tmp_path / name).mkdir()
        target, draft = make_pair(tmp_path / name, "tiny-llama", words=2, seed=4)
        if name == "changed":
            edit_config(target, set={"rope_parameters.rope_theta": 1e4})
        made[name] = convert(target, draft, tmp_path / name / "engine", max_batch=2, max_seq_len=96).path
    copy, changed = record(engines, "pair", *made.values())["comparisons"]
    assert copy["same_target"] and copy["identical"] == len(PROMPTS) and not changed["same_target"]


def test_agreement_counts_what_follows_the_shorter_answer_as_differing():
    texts = agreement([(1, 2, 3, 4), (1, 2), (), (5,)], [(1, 9, 3, 4), (1, 2, 3), (), (5,)])
    assert texts.first == [1, 2, None, None] and texts.identical == 2
    assert texts.prefix_share == (1 + 2 + 0 + 1) / 8 and texts.position_share == (3 + 2 + 0 + 1) / 8
    assert agreement([()], [()]).prefix_share is None


def test_engines_are_named_as_shortly_as_tells_them_apart():
    assert labels([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert labels([Path("/a/x"), Path("/b/x"), Path("/a/y")]) == ["/a/x", "/b/x", "y"]
    assert labels([Path("/a/x"), Path("/a/x")]) == ["/a/x (1)", "/a/x (2)"]
