"""The step graph against transformers and z-lab's wheel, over prompts in chunks and several speculative steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.drive import Row, inputs, load
from tests.graph.oracle import Oracle
from tests.tiny import make_pair

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
TAPS = "dflash_config.target_layer_ids"

VARIANTS = {
    "qwen3": ("tiny-qwen3", {}, {}),
    "llama": ("tiny-llama", {}, {}),
    "qwen3 sliding and full layers": ("tiny-qwen3", {}, SLIDING),
    "llama drafter all sliding, not causal": (
        "tiny-llama",
        {},
        {**SLIDING, "layer_types": ["sliding_attention"] * 2, "is_causal": False},
    ),
    "qwen3 drafter causal everywhere": ("tiny-qwen3", {}, {"is_causal": True}),
    "qwen3 yarn": ("tiny-qwen3", {"rope_parameters": YARN}, {"rope_scaling": YARN, "rope_theta": 10000.0}),
    "qwen3 yarn without truncation": (
        "tiny-qwen3",
        {"rope_parameters": {**YARN, "truncate": False}},
        {"rope_parameters": {**YARN, "truncate": False}},
    ),
    "llama llama3 rope": ("tiny-llama", {"rope_parameters": LLAMA3}, {"rope_parameters": LLAMA3}),
    "qwen3 biases": ("tiny-qwen3", {"attention_bias": True}, {"attention_bias": True}),
    "llama biases": ("tiny-llama", {"attention_bias": True, "mlp_bias": True}, {"attention_bias": True}),
    "qwen3 one KV head": ("tiny-qwen3", {"num_key_value_heads": 1}, {"num_key_value_heads": 1}),
    "llama as many KV heads as heads": ("tiny-llama", {"num_key_value_heads": 4}, {"num_key_value_heads": 4}),
    "qwen3 drafter of another head count": (
        "tiny-qwen3",
        {},
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96},
    ),
    "qwen3 last layer tapped": ("tiny-qwen3", {}, {TAPS: [1, 3, 5]}),
    "llama last layer tapped": ("tiny-llama", {}, {TAPS: [0, 5]}),
    "qwen3 ids out of order": ("tiny-qwen3", {}, {TAPS: [4, 1, 3]}),
    "qwen3 sliding target": (
        "tiny-qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {},
    ),
    "llama tied head": ("tiny-llama", {"tie_word_embeddings": True}, {}),
}


def close(ours: np.ndarray, reference: np.ndarray) -> None:
    """Within 1e-4 of the largest logit: float32 sums in another order over six layers stay below 1e-5 of it."""
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-4 * max(1.0, np.abs(reference).max()))


@pytest.mark.parametrize("ops", ["native", "plugin"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_drafts_equal_the_oracles(name, ops, tmp_path):
    base, target_config, draft_config = VARIANTS[name]
    target, draft = make_pair(tmp_path, base, target_config=target_config, draft_config=draft_config, dtype="float32")
    oracle = Oracle(target, draft)
    session = load(target, draft, tmp_path / "engine", ops=ops)
    K = session.limits.block_size

    text = [int(t) for t in np.random.default_rng(0).integers(0, 250, 37)]
    past = 0
    for chunk in (text[:16], text[16:17], text[17:]):  # a prompt in uneven chunks
        out, debug = session.debug_step(inputs(K, [Row(chunk, len(chunk), past)]))
        past += len(chunk)
    for wanted in (0, K - 1, 2, 1, 5):  # drafts to accept: handed over by the test, so that every length occurs
        text.append(int(oracle.logits(text)[-1].argmax()))
        assert out.next_token[0] == text[-1]
        drafts = oracle.draft_logits(text, K)
        close(debug["draft_logits"][0], drafts)
        assert out.next_block[0].tolist() == [text[-1], *drafts.argmax(-1).tolist()]

        block = oracle.continue_greedily(text, K - 1)[-K:]
        block[1 + wanted :] = [(token + 1) % 250 for token in block[1 + wanted :]]
        out, debug = session.debug_step(inputs(K, [Row(block, 1, past)]))
        close(debug["logits"][0], oracle.logits([*text, *block[1:]])[-K:])
        assert out.n_accepted[0] == wanted
        text += block[1 : 1 + wanted]
        past += 1 + wanted
