"""The calibration module computes what z-lab's wheel computes, for every kind of drafter."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.checkpoint import read_draft
from dflash_trt.quantize.draft_model import load_draft_model
from tests.graph.oracle import Oracle, extract_context_feature
from tests.graph.test_oracles import LLAMA3, SLIDING, YARN
from tests.tiny import make_pair

TEXT, ANCHORS = 37, [1, 2, 9, 20, 33, 36, 37]
VARIANTS = {
    "full": {},
    "sliding and full layers": SLIDING,
    "all sliding, not causal": {**SLIDING, "layer_types": ["sliding_attention"] * 2, "is_causal": False},
    "causal everywhere": {"is_causal": True},
    "biases": {"attention_bias": True},
    "yarn": {"rope_scaling": YARN, "rope_theta": 10000.0},
    "llama3 rope": {"rope_parameters": LLAMA3, "rope_theta": 10000.0},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "another head count": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "last layer tapped": {"dflash_config.target_layer_ids": [1, 3, 5]},
    "scaled embedding": {"input_embedding_scale": 3.0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_equal_the_wheels(name, tmp_path):
    target, path = make_pair(tmp_path, draft_config=VARIANTS[name], dtype="float32")
    oracle, draft = Oracle(target, path), read_draft(path)
    config = draft.config
    ids = torch.randint(0, 250, (1, TEXT + 1), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        states = oracle.target(ids, output_hidden_states=True).hidden_states
        features = extract_context_feature(states, config.target_layer_ids)[:, :TEXT]
        masks = torch.full((len(ANCHORS), config.block_size - 1), config.mask_token_id)
        tokens = torch.cat([ids[0, ANCHORS][:, None], masks], dim=1)
        block = oracle.target.get_input_embeddings()(tokens)
        ours = load_draft_model(draft)(features[0], torch.tensor(ANCHORS), block)
        for anchor, rows, hidden in zip(ANCHORS, block, ours, strict=True):
            theirs = oracle.draft(
                target_hidden=features[:, :anchor],
                noise_embedding=rows[None] * config.embedding_scale,
                position_ids=torch.arange(anchor + config.block_size)[None],
            )
            torch.testing.assert_close(hidden, theirs[0], rtol=0, atol=2e-5)


def test_modules_have_the_files_names_and_its_values_unrounded(tmp_path):
    _, path = make_pair(tmp_path, draft_config={"attention_bias": True})
    draft = read_draft(path)
    model = load_draft_model(draft)
    assert dict(model.state_dict()).keys() == draft.tensors.keys()
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
