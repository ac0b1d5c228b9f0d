"""gpt-oss: sinks, windows, clamped experts. Logits and text are those of transformers, with and without a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.checkpoint import pair as make_checked
from dflash_trt.checkpoint import read_draft, read_target
from dflash_trt.engine import worker
from dflash_trt.engine.manifest import Limits
from dflash_trt.graph import write_step
from dflash_trt.runtime.ort_session import OrtSession
from tests.graph.drive import Row, inputs, load
from tests.graph.oracle import Oracle
from tests.tiny import dequantized, make_pair

WINDOW = 16
SEED, WORDS = 6, 2  # a drafter that is often right
SIZES: dict[str, dict[str, Any]] = {
    "8 experts, top 2": {},
    "128 experts, top 4": {
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "hidden_size": 96,
        "num_key_value_heads": 1,
    },
}
TEXT = [int(token) for token in np.random.default_rng(3).integers(0, 250, 80)]


@pytest.fixture(scope="module", params=[(size, storage) for size in SIZES for storage in ("float", "mxfp4")], ids=str)
def pair(request, tmp_path_factory) -> tuple[Path, Path, Oracle]:
    """Target, drafter and the reference of the target."""
    size, storage = request.param
    config = {"sliding_window": WINDOW, "num_attention_heads": 8} | SIZES[size]
    root = tmp_path_factory.mktemp("pair")
    target, draft = make_pair(
        root, "tiny-gptoss", target_config=config, dtype="float32", experts=storage, words=WORDS, seed=SEED
    )
    return target, draft, Oracle(dequantized(target) if storage == "mxfp4" else target)


@pytest.fixture(params=["native", "plugin"])
def ops(request) -> str:
    return request.param


def close(ours: np.ndarray, reference: np.ndarray) -> None:
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_logits_are_those_of_transformers(pair, ops, length, tmp_path):
    """A prompt at once and in chunks, and decoding after it: below, at and beyond the window."""
    target, _, reference = pair
    expected = reference.logits(TEXT[: length + 4])
    session = load(target, None, tmp_path / "engine", max_batch=2, ops=ops)
    for chunk in (length, 7):
        for first in range(0, length, chunk):
            part = TEXT[first : min(first + chunk, length)]
            out, debug = session.debug_step(inputs(1, [Row(part, len(part), first)]))
            close(debug["logits"][0, 0], expected[first + len(part) - 1])
        for position in range(length, length + 4):
            out, debug = session.debug_step(inputs(1, [Row([TEXT[position]], 1, position)]))
            close(debug["logits"][0, 0], expected[position])
            assert out.next_token[0] == expected[position].argmax()
        session.free_slot(0)


def test_drafts_are_verified_as_if_the_target_stood_alone(pair, ops, tmp_path):
    """Greedy text through windows and rejected drafts, of two slots at once."""
    target, draft, reference = pair
    prompts = [TEXT[:9], TEXT[9:30]]
    expected = [reference.continue_greedily(prompt, 40) for prompt in prompts]
    session = load(target, draft, tmp_path / "engine", max_batch=2, ops=ops)
    texts, accepted = speak(session, prompts, 40)
    assert texts == expected
    assert accepted > 5


def test_what_a_former_tenant_left_in_a_slot_is_never_seen(pair, tmp_path):
    """Except at position 0, which is the sink's and nobody's to write."""
    target, _, reference = pair
    session = load(target, None, tmp_path / "engine")
    session.step(inputs(1, [Row(TEXT[:3], 3)]))
    for cache in session._caches.values():
        assert not cache[:, :, 0].any()
        cache[:, :, 1:] = 1e9
    _, debug = session.debug_step(inputs(1, [Row(TEXT[:20], 20)]))
    close(debug["logits"][0, 0], reference.logits(TEXT[:20])[-1])
    assert not any(cache[:, :, 0].any() for cache in session._caches.values())


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float", "mxfp4"])
def test_the_step_graph_compiles_with_native_attention_and_caches(storage, tmp_path):
    wide = {"num_hidden_layers": 3, "head_dim": 64}
    target, draft = make_pair(
        tmp_path, "tiny-gptoss", target_config=wide, draft_config={"head_dim": 64}, experts=storage
    )
    (tmp_path / "engine").mkdir()
    checked = make_checked(read_target(target), read_draft(draft))
    graph = write_step(checked, tmp_path / "engine", "rank0", dtype="bfloat16", cache_len=128)
    limits = Limits(2, 96, checked.draft.config.block_size, 32)
    packed = 2 * 3 if storage == "mxfp4" else 0
    job = worker.Job("tensorrt-rtx", 120, str(graph), 3 + 2, packed, limits, str(tmp_path / "out"))
    layers = worker.run(job, lambda what, fraction: None)
    assert (layers["ATTENTION"], layers["KV_CACHE_UPDATE"]) == (3 + 2, 2 * (3 + 2))


def speak(session: OrtSession, prompts: list[list[int]], count: int) -> tuple[list[list[int]], int]:
    """Prompts and `count` tokens after each; how many drafts were accepted."""
    total = 0
    K, texts = session.limits.block_size, [list(prompt) for prompt in prompts]
    past = [0] * len(prompts)
    rows = [Row(prompt, len(prompt)) for prompt in prompts]
    while any(len(text) < len(prompt) + count for text, prompt in zip(texts, prompts, strict=True)):
        out = session.step(inputs(K, rows))
        for slot, (row, text) in enumerate(zip(rows, texts, strict=True)):
            accepted = int(out.n_accepted[slot])
            text += [*row.ids[row.given : row.given + accepted], int(out.next_token[slot])]
            past[slot] += row.given + accepted
            total += accepted
        rows = [Row(out.next_block[slot].tolist(), 1, past[slot]) for slot in range(len(prompts))]
    return [text[: len(prompt) + count] for text, prompt in zip(texts, prompts, strict=True)], total
