"""Sizes of models of any family, from their config.json alone."""

from __future__ import annotations

import json

import pytest

from dflash_trt.checkpoint.draft import read_draft
from dflash_trt.checkpoint.shape import read_drafter_shape, read_shape
from dflash_trt.checkpoint.target import read_target
from dflash_trt.errors import UserError
from dflash_trt.published import published
from tests import tiny

BASE = {"model_type": "x", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
DRAFT = BASE | {"block_size": 8, "dflash_config": {"mask_token_id": 9, "target_layer_ids": [3, 1]}}


def test_it_agrees_with_the_readers_that_read_weights(tmp_path):
    target, draft = tiny.make_pair(tmp_path)
    shape, config = read_shape(target), read_target(target).config
    for field in ("hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
        assert getattr(shape, field) == getattr(config, field)
    assert shape.layers == config.layers and shape.tied == config.tie_embeddings
    drafter, drawn = read_drafter_shape(draft), read_draft(draft).config
    assert drafter.block_size == drawn.block_size and drafter.mask_token_id == drawn.mask_token_id
    assert drafter.target_layer_ids == drawn.target_layer_ids and drafter.causal == drawn.causal


@pytest.mark.parametrize(
    "repository, cached, kinds",
    [
        ("openai/gpt-oss-120b", 36 * 2 * 8 * 64, {"sliding": 18, "full": 18}),
        ("Qwen/Qwen3-8B", 36 * 2 * 8 * 128, {"full": 36}),
        ("Qwen/Qwen3.5-27B", 16 * 2 * 4 * 256, {"linear": 48, "full": 16}),
        ("moonshotai/Kimi-K2.6", 61 * (512 + 64), {"full": 61}),
        ("google/gemma-4-31B-it", 50 * 2 * 16 * 256 + 10 * 2 * 4 * 512, {"sliding": 50, "full": 10}),
    ],
)
def test_numbers_cached_for_a_token(repository, cached, kinds):
    shape = published(repository).shape()
    assert sum(shape.cached) == cached
    assert {kind: shape.kinds.count(kind) for kind in set(shape.kinds)} == kinds


def test_experts_whatever_their_keys_are_called():
    for repository, experts in {
        "openai/gpt-oss-120b": (128, 4, 2880, 0, 0),
        "Qwen/Qwen3-Coder-30B-A3B-Instruct": (128, 8, 768, 0, 0),
        "moonshotai/Kimi-K2.6": (384, 8, 2048, 2048, 1),
        "Qwen/Qwen3-8B": (0, 0, 0, 0, 0),
    }.items():
        shape = published(repository).shape()
        found = (shape.experts, shape.experts_per_token, shape.expert_ffn, shape.shared_ffn, shape.dense_layers)
        assert found == experts, repository


@pytest.mark.parametrize(
    "extra, kinds, causal",
    [
        ({}, ["full"] * 4, [False] * 4),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}, ["sliding", "full"] * 2,
         [True, False] * 2),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 8, "is_causal": False}, ["sliding"] * 4,
         [False] * 4),
        ({"use_swa": True, "swa_window_size": 8}, ["sliding"] * 4, [False] * 4),
        ({"causal": True}, ["full"] * 4, [True] * 4),
    ],
)  # fmt: skip
def test_windows_and_causality_of_drafters(extra, kinds, causal):
    drafter = read_drafter_shape(DRAFT | extra)
    assert (list(drafter.kinds), list(drafter.causal)) == (kinds, causal)
    assert drafter.window == (8 if "sliding" in kinds else None) and drafter.target_layer_ids == (3, 1)


def test_ids_of_the_speculators_format_count_the_embedding():
    layer = {key: BASE[key] for key in BASE if key != "model_type"}
    config = {"speculators_model_type": "dflash", "transformer_layer_config": layer, "draft_vocab_size": 32,
              "aux_hidden_state_layer_ids": [2, 4]}  # fmt: skip
    drafter = read_drafter_shape(config)
    assert drafter.target_layer_ids == (1, 3) and drafter.draft_vocab == 32
    assert drafter.variant == "the speculators format"


@pytest.mark.parametrize(
    "extra, variant",
    [
        ({"architectures": ["DFlashDraftModel"]}, None),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
        ({"markov_rank": 64}, "DSpark"),
        ({"projector_type": "dspark"}, "DSpark"),
        ({"projector_type": "domino"}, "Domino"),
        ({"markov_rank": 0, "shift_label": False}, None),
    ],
)
def test_relatives_of_dflash_are_known_by_name(extra, variant):
    assert read_drafter_shape(DRAFT | extra).variant == variant


@pytest.mark.parametrize(
    "quantization, packed",
    [
        (None, False),
        ({"quant_algo": "NVFP4", "ignore": ["lm_head"]}, True),
        ({"quant_algo": "NVFP4", "exclude_modules": ["*self_attn*"]}, False),
    ],
)
def test_packed_attention_is_seen_in_the_config_without_weights(quantization, packed):
    drafter = read_drafter_shape(DRAFT | ({"quantization_config": quantization} if quantization else {}))
    assert drafter.packed_qkv is packed and drafter.quantization == ("nvfp4" if quantization else None)


def test_hf_quant_config_wins(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"quantization_config": {"quant_method": "fp8"}}))
    assert read_shape(tmp_path).quantization == "fp8"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert read_shape(tmp_path).quantization == "nvfp4"


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_a_size_that_is_missing_is_named(key, tmp_path):
    config = {name: value for name, value in BASE.items() if name != key}
    with pytest.raises(UserError, match=f"{key} is missing — somewhere.yaml"):
        read_shape(config, tmp_path.joinpath("somewhere.yaml").relative_to(tmp_path))


def test_layer_types_that_name_other_layers_are_refused():
    with pytest.raises(UserError, match="names 1 layers, but num_hidden_layers is 4"):
        read_shape(BASE | {"layer_types": ["full_attention"]})
