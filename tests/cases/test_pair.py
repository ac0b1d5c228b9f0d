"""Every case of `pair/` behaves as its file says: through the reader, the command line and the finished graph."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from dflash_trt.checkpoint import DraftConfig, pair, read_draft, read_target
from dflash_trt.cli import main
from dflash_trt.errors import UserError
from dflash_trt.runtime import Generator, Output, Request, Session
from tests.cases import ACCEPTED, CASES, REFUSED
from tests.graph.drive import Row, inputs, load
from tests.graph.oracle import Oracle

READS = {
    "block_size": lambda config: config.block_size,
    "mask_token_id": lambda config: config.mask_token_id,
    "target_layer_ids": lambda config: list(config.target_layer_ids),
    "rope_theta": lambda config: config.rope.theta,
    "causal": lambda config: list(config.causal),
    "window": lambda config: list(config.windows),
}


@pytest.fixture
def command(monkeypatch, capfd):
    """Run `dflash-trt` as the shell does: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dflash-trt", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code or 0, *capfd.readouterr()

    return run


@pytest.mark.parametrize("stem", REFUSED)
def test_a_refused_pair_names_the_fault_on_one_line_and_leaves_nothing(stem, tmp_path, command):
    case = CASES[stem]
    target, draft = case.write(tmp_path)
    options = ["--block-size", case.block_size] if case.block_size else []
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command("convert", "--target", target, "--draft", draft, "--output", tmp_path / "engine", *options)
    assert (code, out) == (2, "")
    assert err.strip().count("\n") == 0 and err.strip().startswith("error: ")
    missing = [word for word in case.refused if word.lower() not in err.lower()]
    assert not missing, err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("stem", CASES)
def test_inspect_reports_what_is_wrong_with_the_drafter_alone(stem, tmp_path, command):
    _, draft = CASES[stem].write(tmp_path)
    code, out, _ = command("inspect", draft, "--json", "--scan")
    try:
        read_draft(draft)
    except UserError as error:
        assert (code, json.loads(out)["problems"]) == (2, [str(error)])
    else:
        assert (code, json.loads(out)["problems"]) == (0, [])


@pytest.mark.parametrize("stem", [stem for stem in ACCEPTED if CASES[stem].reads])
def test_keys_are_read_wherever_they_stand(stem, tmp_path):
    _, draft = CASES[stem].write(tmp_path)
    config: DraftConfig = read_draft(draft).config
    assert {key: READS[key](config) for key in CASES[stem].reads} == CASES[stem].reads


@pytest.mark.parametrize("stem", ACCEPTED)
def test_drafts_equal_the_reference(stem, tmp_path):
    target, draft = CASES[stem].write(tmp_path, dtype="float32")
    assert pair(read_target(target), read_draft(draft)).draft
    oracle, session = Oracle(target, draft), load(target, draft, tmp_path / "engine")
    K = session.limits.block_size
    text = [int(token) for token in np.random.default_rng(1).integers(0, 250, 24)]
    out, debug = session.debug_step(inputs(K, [Row(text, len(text), 0)]))
    text.append(int(oracle.logits(text)[-1].argmax()))
    expected = oracle.draft_logits(text, K)
    np.testing.assert_allclose(debug["draft_logits"][0], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert out.next_block[0].tolist() == [text[-1], *expected.argmax(-1).tolist()]


def generate(session: Session, prompt: str, length: int, *stops: int) -> list[Output]:
    return list(Generator(session).generate([Request(list(prompt.encode()), length, stop_token_ids=stops)]))


def tokens(outputs: list[Output]) -> list[int]:
    return [token for out in outputs for token in out.token_ids]


def stop_inside_a_block(session: Session) -> tuple[str, int]:
    """A prompt, and a token whose first appearance in the answer is followed by others of the same step."""
    for prompt in "abcdefghijklmnopqrstuvwxyz":
        outputs = generate(session, prompt, 40)
        text = tokens(outputs)
        for end, out in zip(np.cumsum([len(out.token_ids) for out in outputs]), outputs, strict=True):
            for token in out.token_ids[:-1]:
                if text.index(token) >= end - len(out.token_ids):
                    return prompt, token
    pytest.fail("no answer holds such a token")


@pytest.mark.parametrize("stem", [stem for stem in ACCEPTED if CASES[stem].generate])
def test_generation_ends_where_it_must_with_the_drafter_as_without(stem, tmp_path):
    case = CASES[stem]
    target, draft = case.write(tmp_path, words=4)
    fast, plain = load(target, draft, tmp_path / "engine"), load(target, None, tmp_path / "plain")
    for length in case.generate.get("max_new_tokens", []):
        outputs = generate(fast, "count", length)
        assert (len(tokens(outputs)), outputs[-1].finish_reason) == (length, "length")
        assert tokens(outputs) == tokens(generate(plain, "count", length))
    if "stop" in case.generate:
        prompt, stop = stop_inside_a_block(fast)
        endless, outputs = tokens(generate(fast, prompt, 40)), generate(fast, prompt, 40, stop)
        assert tokens(outputs) == endless[: endless.index(stop)]
        assert outputs[-1].finish_reason == "stop"
        assert tokens(outputs) == tokens(generate(plain, prompt, 40, stop))
