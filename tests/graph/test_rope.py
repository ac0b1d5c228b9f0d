"""Frequencies of every RoPE kind against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash_trt.checkpoint import Rope
from dflash_trt.graph.rope import inverse_frequencies

KINDS = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("parameters", KINDS, ids=lambda p: f"{p['rope_type']}-{p['rope_theta']:g}")
def test_frequencies_equal_those_of_transformers(parameters, head_dim):
    names = {"rope_type": "kind", "rope_theta": "theta", "original_max_position_embeddings": "original_max_position"}
    rope = Rope(**{names.get(key, key): value for key, value in parameters.items()})
    ours, factor = inverse_frequencies(rope, head_dim)
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    reference = LlamaRotaryEmbedding(config)
    np.testing.assert_allclose(ours, reference.inv_freq.numpy(), rtol=2e-6)
    assert factor == pytest.approx(reference.attention_scaling)
