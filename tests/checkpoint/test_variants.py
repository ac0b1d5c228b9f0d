"""Relatives of DFlash are refused by their names: guessing would run them as something they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoint import read_draft
from dflash_trt.errors import UserError
from tests.checkpoint.sparse import write_draft
from tests.tiny import DRAFT


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        read_draft(path)
    for word in (*words, "not supported"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("speculators_model_type", "dflash", "speculators"),
        ("transformer_layer_config", {"hidden_size": 64}, "speculators"),
        ("conv_kernel_size", 2, "DFlash2"),
        ("selector_rank", 256, "DFlash2"),
        ("markov_rank", 256, "DSpark"),
        ("dspark_bonus_anchor", True, "DSpark"),
        ("projector_type", "domino", "Domino"),
        ("sample_from_anchor", True, "anchor"),
        ("shift_label", True, "anchor"),
        ("attention_sink_bias", True, "sinks"),
        ("attention_value_scale", 0.6, "scaled values"),
        ("has_embed_tokens", True, "embedding of its own"),
        ("has_lm_head", True, "head of its own"),
        ("draft_vocab_size", 128, "reduced draft vocabulary"),
        ("target_hidden_size", 256, "wider features"),
        ("is_neox_style", False, "neighbouring"),
        ("model_type", "gemma3", "gemma3"),
    ],
)
def test_a_key_gives_a_variant_away_at_both_levels(tmp_path, key, value, name):
    refused(write_draft(tmp_path, DRAFT | {key: value}), key, name)
    if key not in DRAFT:
        refused(write_draft(tmp_path, DRAFT | {"dflash_config": DRAFT["dflash_config"] | {key: value}}), key)


def test_keys_that_switch_a_variant_off_are_no_variant(tmp_path):
    off = dict.fromkeys(["sample_from_anchor", "attention_sink_bias", "has_embed_tokens", "has_lm_head"], False)
    off |= {"markov_rank": 0, "draft_vocab_size": 256, "target_hidden_size": 64, "quantization_config": None}
    plain = read_draft(write_draft(tmp_path, DRAFT)).config
    assert read_draft(write_draft(tmp_path, DRAFT | off | {"is_neox_style": True})).config == plain


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("DFlash2DraftModel", "DFlash2"),
        ("Qwen3DSparkModel", "DSpark"),
        ("DominoDraftModel", "Domino"),
        ("DFlashLagunaForCausalLM", "Laguna"),
        ("DFlashSpeculator", "speculators"),
        ("Qwen3ForCausalLM", "only DFlashDraftModel is read"),
    ],
)
def test_an_architecture_is_named(tmp_path, architecture, name):
    refused(write_draft(tmp_path, DRAFT | {"architectures": [architecture]}), architecture, name)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("embed_tokens.weight", "embedding of its own"),
        ("model.embed_tokens.weight", "embedding of its own"),
        ("lm_head.weight", "head of its own"),
        ("d2t", "draft vocabulary"),
        ("t2d", "draft vocabulary"),
        ("mask_embedding", "mask embedding"),
        ("layers.0.self_attn.sinks", "sinks"),
        ("layers.0.self_attn.attention_sink_bias", "sinks"),
        ("layers.0.attention_conv.base_kernel", "DFlash2"),
        ("candidate_selector.predecessor_codebook", "DFlash2"),
        ("markov_head.markov_w1.weight", "DSpark"),
        ("confidence_head.proj.bias", "DSpark"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("embed_proj.0.weight", "Domino"),
        ("layers.0.self_attn.g_proj.weight", "Laguna"),
        ("layers.0.self_attn.qkv_proj.weight", "Laguna"),
        ("aux_hidden_norms.0.weight", "Laguna"),
    ],
)
def test_a_tensor_gives_a_variant_away(tmp_path, tensor, name):
    refused(write_draft(tmp_path, DRAFT, add={tensor: (2, 2)}), tensor.removeprefix("model."), name)


def test_a_side_file_gives_a_variant_away(tmp_path):
    write_draft(tmp_path, DRAFT)
    (tmp_path / "mask_embedding.pt").touch()
    refused(tmp_path, "mask_embedding.pt")
