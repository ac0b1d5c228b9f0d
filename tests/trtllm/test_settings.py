"""The YAML's values reach the rules, and what is missing gets TensorRT-LLM's default."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.trtllm.settings import VANILLA, read_settings


def test_an_empty_file_is_tensorrt_llms_defaults():
    settings = read_settings({})
    assert settings.speculation is None
    assert (settings.batch, settings.tokens, settings.sequence, settings.beams) == (2048, 8192, None, 1)
    assert (settings.kv_fraction, settings.kv_dtype, settings.prefix_reuse) == (0.9, "auto", True)
    assert (settings.world, settings.graphs, settings.graph_padding, settings.overlap) == (1, True, False, True)


def test_a_step_is_one_wider_than_the_drafts():
    settings = read_settings({"speculative_config": {"decoding_type": "DFlash", "max_draft_len": 7}})
    assert settings.width == 8
    assert settings.speculation.attention_backend == VANILLA


def test_both_spellings_of_the_drafter_are_read():
    for key in ("speculative_model", "speculative_model_dir"):
        assert read_settings({"speculative_config": {key: "/models/drafter"}}).speculation.model == "/models/drafter"


def test_ranks_are_the_product_of_all_ways_to_split():
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "context_parallel_size": 2}
    assert read_settings(sizes).world == 16


@pytest.mark.parametrize("keys", [{1: 9, 8: 4}, {"1": 9, "8": 4}])
def test_a_schedule_may_have_come_through_json(keys):
    assert read_settings({"speculative_config": {"draft_len_schedule": keys}}).speculation.schedule == {1: 9, 8: 4}


def test_graphs_are_off_only_if_the_file_says_null():
    assert read_settings({"cuda_graph_config": None}).graphs is False
    assert read_settings({"cuda_graph_config": {}}).graphs is True


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["max_batch_size", "speculative_config", "kv_cache_config", "cuda_graph_config", "moe_config", "env_overrides",
     "backend", "attn_backend", "sampler_type", "guided_decoding_backend", "lora_config"]
)  # fmt: skip
INNER = st.sampled_from(
    ["decoding_type", "max_draft_len", "target_layer_ids", "draft_len_schedule", "mask_token_id", "dtype", "backend",
     "free_gpu_memory_fraction", "batch_sizes", "max_batch_size"]
)  # fmt: skip


@given(st.dictionaries(KEYS, VALUES | st.dictionaries(INNER, VALUES, max_size=4), max_size=6))
def test_no_value_of_any_kind_is_too_much(config):
    settings = read_settings(config)
    assert settings.batch >= 1 and settings.world >= 1
