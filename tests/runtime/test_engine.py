"""The whole runtime on tiny real engines: random weights, ONNX Runtime, transformers as the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dflash_trt.engine import Engine, convert
from dflash_trt.errors import UserError
from dflash_trt.runtime import Generator, Limits, Output, Request, Sampling, StepInputs, StepOutputs
from dflash_trt.runtime.open import open_generator, open_session
from dflash_trt.runtime.ort_session import OrtSession
from dflash_trt.runtime.sampling import uniforms
from tests.tiny import make_pair

LETTERS = st.integers(ord("a"), ord("z"))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A target that speaks four words, beside a drafter that is right about every fourth time."""
    return make_pair(tmp_path_factory.mktemp("pair"), "tiny-llama", words=4)[0]


@pytest.fixture(scope="module")
def engine(target) -> Engine:
    output = target.parent / "engine"
    return convert(target, target.parent / "draft", output, max_batch=8, max_seq_len=96, max_query=16)


@pytest.fixture(scope="module")
def sessions(engine) -> dict[bool, OrtSession]:
    """With the drafter and without."""
    return {draft: open_session(engine, draft=draft, threads=1) for draft in (True, False)}


def run(generator: Generator, requests: list[Request]) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {request.id: [] for request in requests}
    for out in generator.generate(requests):
        outputs[out.request_id].append(out)
    return outputs


def answer(session: OrtSession, request: Request) -> tuple[list[int], str | None]:
    outputs = run(Generator(session), [request])[request.id]
    return [token for out in outputs for token in out.token_ids], outputs[-1].finish_reason


@st.composite
def requests(draw: st.DrawFn) -> Request:
    return Request(
        draw(st.lists(LETTERS, min_size=1, max_size=50)),
        max_new_tokens=draw(st.integers(1, 24)),
        sampling=draw(st.sampled_from([Sampling(), Sampling(1.0, seed=1), Sampling(0.8, 0.9, 3, seed=2)])),
    )


@settings(max_examples=12)
@given(
    st.lists(requests(), min_size=2, max_size=12),
    st.sampled_from(["split", "mixed"]),
    st.integers(1, 16),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_a_request_gets_the_same_tokens_in_any_company(sessions, mix, policy, chunk, gaps):
    """Whatever the mix, the policy, the chunk size and the order of arrival, with the drafter as without."""
    generator = Generator(sessions[True], policy=policy, prefill_chunk=chunk)
    arriving, got = list(zip(mix, gaps, strict=False)), {request.id: [] for request in mix}
    outputs: list[Output] = []
    while arriving:
        request, gap = arriving.pop(0)
        generator.add(request)
        for _ in range(gap):
            outputs += generator.step()
    while generator.busy:
        outputs += generator.step()
    for out in outputs:
        got[out.request_id] += out.token_ids
    for request in mix:
        assert got[request.id] == answer(sessions[False], request)[0]


def test_greedy_text_is_what_transformers_generates(target, sessions):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for prompt in ([97], list(b"hello there"), list(b"the quick brown fox jumps over it")):
        with torch.no_grad():
            text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)[0].tolist()
        assert answer(sessions[True], Request(prompt, 40))[0] == text[len(prompt) :]


def test_a_reused_slot_shows_nothing_of_its_former_tenant(engine):
    former, later = Request([120] * 60, 30), Request([97, 98], 30)
    used, fresh = (open_session(engine, threads=1, max_batch=1) for _ in range(2))
    answer(used, former)
    for cache in used._caches.values():
        cache[:] = np.where(cache == 0, 7.0, cache)  # whatever was never written is no help either
    outputs = run(Generator(used), [later])[later.id]
    alone = run(Generator(fresh), [later])[later.id]
    assert [out.token_ids for out in outputs] == [out.token_ids for out in alone]


@pytest.mark.parametrize("sampling", [Sampling(0.7, seed=s) for s in range(3)] + [Sampling(1.3, 0.8, 5, seed=9)])
def test_a_seed_gives_the_same_text_with_the_drafter_and_without(sessions, sampling):
    request = Request(list(b"once upon"), 60, sampling)
    with_drafter, without = (answer(sessions[draft], request) for draft in (True, False))
    assert with_drafter == without
    other = Request(list(b"once upon"), 60, Sampling(sampling.temperature, sampling.top_p, sampling.top_k, seed=77))
    assert answer(sessions[True], other) != with_drafter


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> dict[bool, OrtSession]:
    """Experts, sinks, a window of 16; three slots, which short requests leave to long ones."""
    root = tmp_path_factory.mktemp("gpt-oss")
    pair = make_pair(root, "tiny-gptoss", seed=6, words=2, experts="mxfp4")
    engine = convert(*pair, root / "engine", max_batch=3, max_seq_len=96, max_query=16)
    return {draft: open_session(engine, draft=draft, threads=1) for draft in (True, False)}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, seed=1), Sampling(1.3, 0.8, 5, seed=9)], ids=str)
def test_gpt_oss_gives_one_text_with_the_drafter_and_without_in_any_company(gpt_oss, sampling):
    mix = [Request([97, 98] * n, 8 * n, sampling, id=str(n)) for n in (1, 3, 5, 2, 4)]
    alone = {request.id: answer(gpt_oss[False], request)[0] for request in mix}
    assert len({*map(tuple, alone.values())}) == len(mix)
    for session in gpt_oss.values():
        together = run(Generator(session), mix)
        assert {key: [token for out in outs for token in out.token_ids] for key, outs in together.items()} == alone


@pytest.mark.parametrize("length", range(1, 21))
def test_max_new_tokens_is_exact(sessions, length):
    tokens, reason = answer(sessions[True], Request(list(b"count"), length))
    assert (len(tokens), reason) == (length, "length")
    assert tokens == answer(sessions[False], Request(list(b"count"), length))[0]


def test_a_stop_token_inside_an_accepted_block_ends_the_text_there(sessions):
    found = 0
    for letter in range(ord("a"), ord("z") + 1):
        endless = Request([letter], 40)
        outputs = run(Generator(sessions[True]), [endless])[endless.id]
        seen: set[int] = set()
        for out in outputs:
            for index, token in enumerate(out.token_ids[:-1]):
                if token in seen or token in out.token_ids[:index]:
                    continue
                found += 1
                request = Request([letter], 40, stop_token_ids=(token,))
                text = [token for out in outputs for token in out.token_ids]
                assert answer(sessions[True], request) == (text[: text.index(token)], "stop")
                assert answer(sessions[False], request) == (text[: text.index(token)], "stop")
            seen.update(out.token_ids)
    assert found >= 5


@pytest.mark.parametrize("sampling", [Sampling(0.3), Sampling(0.5, top_k=3), Sampling(0.4, top_p=0.7)], ids=str)
@pytest.mark.parametrize("draft", [True, False], ids=["with the drafter", "without"])
def test_20000_draws_follow_the_targets_softmax(target, tmp_path, draft, sampling):
    """The token after a prompt, verified against the drafter's guess or drawn by the target alone."""
    rows, prompt = 400, list(b"what comes next")
    shares = reference_shares(target, prompt, sampling)
    engine = convert(target, target.parent / "draft", tmp_path / "engine", max_seq_len=96, block_size=2)
    k = engine.limits.block_size if draft else 1
    drafts = [int(shares.argmax())] * (k - 1)  # right often, but not always
    session = OrtSession(engine.graph(draft=draft), Limits(rows, 96, k, 16))
    likes = {
        "temperature": np.full(rows, sampling.temperature, np.float32),
        "top_p": np.full(rows, sampling.top_p, np.float32),
        "top_k": np.full(rows, sampling.top_k, np.int64),
    }

    def step(past: int, given: list[int], drafts: list[int], first_seed: int) -> StepOutputs:
        seeds = first_seed + np.arange(rows, dtype=np.uint64)[:, None]
        uniform = uniforms(seeds, past + len(given) + np.arange(k))
        lengths = [np.full(rows, n) for n in (len(given) + len(drafts), len(given), past)]
        return session.step(StepInputs(0, np.tile([*given, *drafts], (rows, 1)), *lengths, uniform=uniform, **likes))

    step(0, prompt[:-1], [], 0)
    drawn, accepted = [], 0
    for seed in range(0, 20_000, rows):  # the same position again and again: the caches' last column is rewritten
        out = step(len(prompt) - 1, prompt[-1:], drafts, seed)
        drawn += np.where(out.n_accepted > 0, drafts[0] if draft else -1, out.next_token).tolist()
        accepted += int((out.n_accepted > 0).sum())
    assert not draft or 2_000 < accepted < 18_000, "the drafts decide nothing"

    counts = np.bincount(drawn, minlength=len(shares))
    assert not counts[shares == 0].any()
    frequent = 20_000 * shares >= 5  # the others together
    observed, wanted = (np.append(x[frequent], x[~frequent].sum()) for x in (counts, 20_000 * shares))
    kept = wanted > 0
    assert stats.chisquare(observed[kept], wanted[kept], sum_check=False).pvalue > 1e-3


def reference_shares(target: Path, prompt: list[int], sampling: Sampling) -> np.ndarray:
    """Probabilities [V] as transformers' own logit processors leave them."""
    from transformers import AutoModelForCausalLM, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        scores = TemperatureLogitsWarper(sampling.temperature)(None, model(torch.tensor([prompt])).logits[:, -1])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0].double().numpy()


@pytest.mark.parametrize(("draft", "block", "theirs"), [(True, 4, 8), (False, 8, 1)])
def test_limits_of_another_block_than_the_graphs_are_refused(engine, draft, block, theirs):
    graph, what = engine.graph(draft=draft), f"limits.block_size is {block}, but the graph drafts blocks of {theirs}"
    with pytest.raises(UserError, match=rf"^{what} — {graph} — "):
        OrtSession(graph, Limits(2, 96, block, 16))


def test_an_engine_directory_opens_with_its_tokenizer_and_stop_tokens(engine):
    generator = open_generator(engine, threads=1, max_batch=2)
    assert generator.session.limits == Limits(2, 96, 8, 16)
    assert generator.eos_ids == {2} and generator.vocab == 256
    text = "".join(out.text for out in generator.generate([Request("hello", 12)]))
    assert len(text) == 12 and set(text) <= set("abcd")
