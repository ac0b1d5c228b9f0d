"""Drafters: keys wherever exporters put them, attention per layer, and exactly the expected tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.checkpoint import DraftConfig, pair, read_draft, read_target
from dflash_trt.errors import UserError
from tests.checkpoint.sparse import write_draft, write_file, write_target
from tests.tiny import DRAFT, TARGETS, draft_shapes

FLAT = {key: value for key, value in DRAFT.items() if key not in ("block_size", "dflash_config")}
BLOCK, MASK, IDS = {"block_size": 8}, {"mask_token_id": 250}, {"target_layer_ids": [1, 3, 4]}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}

UPPER = {"layer_types": None, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def read(path: Path, config: dict[str, Any], block_size: int | None = None, **files: Any) -> DraftConfig:
    return read_draft(write_draft(path, config, **files), block_size).config


def refused(path: Path, config: dict[str, Any], *words: str, **options: Any) -> None:
    with pytest.raises(UserError) as error:
        read(path, config, **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["block_size", "mask_token_id", "target_layer_ids"])
@pytest.mark.parametrize("place", ["top level", "nested", "both"])
def test_keys_are_found_at_top_level_in_dflash_config_and_in_both(tmp_path, name, place):
    keys = BLOCK | MASK | IDS
    one = {name: keys.pop(name)}
    top = FLAT | (one if place != "nested" else {}) | {"dflash_config": keys | (one if place != "top level" else {})}
    assert read(tmp_path, top) == read(tmp_path, DRAFT)


@pytest.mark.parametrize("nested", [None, {}])
def test_all_keys_may_stand_at_top_level(tmp_path, nested):
    assert read(tmp_path, FLAT | BLOCK | MASK | IDS | {"dflash_config": nested}) == read(tmp_path, DRAFT)


@pytest.mark.parametrize("name", ["block_size", "mask_token_id", "target_layer_ids"])
def test_a_key_with_two_values_is_refused_with_both(tmp_path, name):
    keys = BLOCK | MASK | IDS
    other = [0, 2, 5] if name == "target_layer_ids" else 77
    config = FLAT | {name: other, "dflash_config": keys}
    refused(tmp_path, config, name, str(other), str(keys[name]), "dflash_config")


def test_a_missing_block_size_is_asked_for(tmp_path):
    config = FLAT | MASK | IDS
    refused(tmp_path, config, "block_size", "--block-size", str(tmp_path / "config.json"))
    assert read(tmp_path, config, block_size=4).block_size == 4


def test_a_block_may_be_shortened_but_not_lengthened(tmp_path):
    assert read(tmp_path, DRAFT, block_size=2) == replace(read(tmp_path, DRAFT), block_size=2)
    refused(tmp_path, DRAFT, "block_size", "12", "8", "--block-size 8 or less", block_size=12)
    for size in (-1, 0, 1):
        refused(tmp_path, DRAFT, "block_size", str(size), block_size=size)
        refused(tmp_path, DRAFT | {"block_size": size}, "block_size", str(size))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (MASK | {"target_layer_ids": []}, ["target_layer_ids", "[]"]),
        (MASK | {"target_layer_ids": [1, 3, 3]}, ["target_layer_ids", "each once"]),
        (MASK | {"target_layer_ids": [1, 3, 6]}, ["target_layer_ids", "6", "0 to 5"]),
        (MASK | {"target_layer_ids": [-1, 3, 4]}, ["target_layer_ids", "-1", "0 to 5"]),
        (MASK | {"target_layer_ids": [True, 3, 4]}, ["target_layer_ids", "not a list of integers"]),
        (IDS | {"mask_token_id": 256}, ["mask_token_id", "256"]),
        (IDS | {"mask_token_id": -1}, ["mask_token_id", "-1"]),
        (IDS | {"mask_token_id": 250.0}, ["mask_token_id", "250.0"]),
        (IDS, ["mask_token_id is missing"]),
        (IDS | MASK | {"taste": "sweet"}, ["dflash_config.taste is not supported"]),
    ],
)
def test_values_that_cannot_be_are_refused(tmp_path, keys, words):
    write_draft(tmp_path, DRAFT)
    (tmp_path / "config.json").write_text(json.dumps(DRAFT | {"dflash_config": keys}))
    with pytest.raises(UserError) as error:
        read_draft(tmp_path)
    assert all(word in str(error.value) for word in words)


def test_missing_target_layer_ids_are_refused(tmp_path):
    write_draft(tmp_path, DRAFT)
    (tmp_path / "config.json").write_text(json.dumps(DRAFT | {"dflash_config": MASK}))
    with pytest.raises(UserError, match="target_layer_ids is missing"):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("keys", "windows", "causal"),
    [
        ({}, (None, None), (False, False)),
        (MIXED, (8, None), (True, False)),
        (MIXED | {"layer_types": ["full_attention", "sliding_attention"]}, (None, 8), (False, True)),
        (MIXED | {"causal": False}, (8, None), (False, False)),
        (MIXED | {"causal": True}, (8, None), (True, True)),
        (MIXED | {"is_causal": False, "causal": True}, (8, None), (False, False)),
        (MIXED | {"is_causal": True, "causal": False}, (8, None), (True, True)),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"use_swa": True, "swa_window_size": 16}, (16, 16), (False, False)),
        ({"use_swa": True, "sliding_window": 32}, (32, 32), (False, False)),
        ({"use_swa": True, "swa_window_size": 16, "causal": True}, (16, 16), (True, True)),
        ({"use_swa": False, "swa_window_size": 16}, (None, None), (False, False)),
        (UPPER, (None, 8), (False, True)),
        (UPPER | {"use_sliding_window": None}, (None, None), (False, False)),
        (UPPER | {"sliding_window": None}, (None, None), (False, False)),
    ],
)  # fmt: skip
def test_each_layer_has_its_window_and_causality(tmp_path, keys, windows, causal):
    nested = {key: keys[key] for key in keys.keys() & {"causal", "use_swa", "swa_window_size"}}
    for config in (DRAFT | keys, DRAFT | keys | {"dflash_config": DRAFT["dflash_config"] | nested}):
        config = read(tmp_path, config)
        assert (config.windows, config.causal) == (windows, causal)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers is 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention' is not supported"),
        (MIXED | {"sliding_window": None}, "sliding_window is missing"),
        (MIXED | {"use_sliding_window": False}, "use_sliding_window is false, but layer_types"),
        (MIXED | {"sliding_window": 0}, "sliding_window is 0"),
        ({"use_swa": True}, "swa_window_size is missing beside use_swa"),
        ({"is_causal": "no"}, "is_causal is 'no', not true or false"),
    ],
)
def test_attention_that_contradicts_itself_is_refused(tmp_path, keys, words):
    refused(tmp_path, DRAFT | keys, words)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_target_layers": 4}, "target_layer_ids holds 4"),
    ],
)
def test_sizes_that_cannot_be_are_refused(tmp_path, keys, words):
    write_draft(tmp_path, DRAFT)
    (tmp_path / "config.json").write_text(json.dumps(DRAFT | keys))
    with pytest.raises(UserError) as error:
        read_draft(tmp_path)
    assert words in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_biases_are_decided_by_the_tensors_and_checked_against_the_config(tmp_path):
    biased = DRAFT | {"attention_bias": True}
    biases = {name: shape for name, shape in draft_shapes(biased).items() if name.endswith("bias")}
    unsaid = DRAFT | {"attention_bias": None}
    assert len(biases) == 8
    assert read(tmp_path, biased).attention_bias
    assert read(tmp_path, unsaid, add=biases).attention_bias
    assert not read(tmp_path, unsaid).attention_bias
    refused(tmp_path, DRAFT, "attention_bias is false, but layers.0.self_attn.q_proj.bias is there", add=biases)
    (tmp_path / "config.json").write_text(json.dumps(biased))
    write_file(tmp_path / "model.safetensors", draft_shapes(DRAFT))
    with pytest.raises(UserError, match="attention_bias is true, but there are no self_attn biases"):
        read_draft(tmp_path)


def test_a_bias_on_some_projections_only_is_a_missing_tensor(tmp_path):
    refused(tmp_path, DRAFT | {"attention_bias": None}, "missing tensor layers.0.self_attn.k_proj.bias",
            add={"layers.0.self_attn.q_proj.bias": (64,)})  # fmt: skip


@pytest.mark.parametrize("prefixed", ["*", "layers.*", "norm.weight"])
def test_the_prefix_model_is_optional_for_each_tensor(tmp_path, prefixed):
    plain = read_draft(write_draft(tmp_path, DRAFT))
    shapes = draft_shapes(DRAFT)
    names = {name: f"model.{name}" if Path(name).match(prefixed) else name for name in shapes}
    write_file(tmp_path / "model.safetensors", {names[name]: shape for name, shape in shapes.items()})
    draft = read_draft(tmp_path)
    assert draft.config == plain.config and draft.tensors.keys() == plain.tensors.keys()
    assert {name: ref.name for name, ref in draft.tensors.items()} == names


def test_a_tensor_with_and_without_prefix_is_refused(tmp_path):
    refused(tmp_path, DRAFT, "norm.weight and model.norm.weight are the same", add={"model.norm.weight": (64,)})


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_every_float_type_is_kept_per_tensor(tmp_path, dtype):
    draft = read_draft(write_draft(tmp_path, DRAFT, dtypes={"norm.weight": dtype, "fc.weight": "F32"}))
    assert (draft.tensors["norm.weight"].dtype, draft.tensors["fc.weight"].dtype) == (dtype, "F32")
    assert draft.tensors["hidden_norm.weight"].dtype == "BF16"


@pytest.mark.parametrize("dtype", ["F64", "F8_E4M3", "I32", "U8"])
def test_other_types_are_refused_by_name(tmp_path, dtype):
    why = "fc.weight_scale is missing" if dtype == "U8" else "not supported"  # U8 could be NVFP4
    refused(tmp_path, DRAFT, "fc.weight", dtype, why, dtypes={"fc.weight": dtype})


def test_unknown_missing_and_misshapen_tensors_are_named(tmp_path):
    refused(tmp_path, DRAFT, "tensor layers.2.norm.weight is not supported", add={"layers.2.norm.weight": (64,)})
    refused(tmp_path, DRAFT, "norm.weight has shape [63], config.json says [64]", add={"norm.weight": (63,)})
    refused(tmp_path, DRAFT, "fc.weight has shape [64, 128]", "3 target_layer_ids", "192", add={"fc.weight": (64, 128)})
    refused(tmp_path, DRAFT, "fc.weight has shape [64]", add={"fc.weight": (64,)})
    refused(tmp_path, DRAFT, "fc.weight has shape [63, 192]", add={"fc.weight": (63, 192)})
    shapes = draft_shapes(DRAFT)
    del shapes["layers.1.mlp.up_proj.weight"]
    write_file(tmp_path / "model.safetensors", shapes)
    with pytest.raises(UserError, match=r"missing tensor layers\.1\.mlp\.up_proj\.weight"):
        read_draft(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_target_layers"])
def test_a_drafter_of_another_target_is_refused_with_both_values(tmp_path, key):
    target = read_target(write_target(tmp_path / "target", TARGETS["tiny-qwen3"]))
    assert pair(target, read_draft(write_draft(tmp_path / "draft", DRAFT))).target is target
    draft = read_draft(write_draft(tmp_path / "draft", DRAFT | {key: DRAFT[key] + 2}))
    with pytest.raises(UserError) as error:
        pair(target, draft)
    assert all(word in str(error.value) for word in (key, str(DRAFT[key]), str(DRAFT[key] + 2), str(target.path)))


def test_ids_are_checked_against_the_target_when_the_drafter_does_not_tell_its_depth(tmp_path):
    target = read_target(write_target(tmp_path / "target", TARGETS["tiny-qwen3"]))
    config = DRAFT | {"num_target_layers": None, "dflash_config": MASK | {"target_layer_ids": [1, 3, 6]}}
    with pytest.raises(UserError, match="target_layer_ids holds 6, but the target has layers 0 to 5"):
        pair(target, read_draft(write_draft(tmp_path / "draft", config)))


def test_gemma_and_other_scales_are_read(tmp_path):
    nested = DRAFT["dflash_config"] | {"input_embedding_scale": 8.0, "output_multiplier": 0.5}
    config = read(tmp_path, DRAFT | {"dflash_config": nested, "final_logit_softcapping": 30.0})
    assert (config.embedding_scale, config.logit_scale, config.logit_softcap) == (8.0, 0.5, 30.0)
