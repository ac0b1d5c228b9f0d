"""Targets by `model_type`, their tensors, tied heads and stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from dflash_trt.checkpoint import TargetConfig, read_target
from dflash_trt.errors import UserError
from tests.checkpoint.sparse import write_file, write_target
from tests.tiny import TARGETS, edit_tensors, make_target

QWEN3, LLAMA = TARGETS["tiny-qwen3"], TARGETS["tiny-llama"]


def read(path: Path, config: dict[str, Any], **files: Any) -> TargetConfig:
    return read_target(write_target(path, config, **files)).config


def refused(path: Path, config: dict[str, Any], words: str, **files: Any) -> None:
    with pytest.raises(UserError) as error:
        read(path, config, **files)
    assert words in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("base", TARGETS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_is_read(tmp_path, base, biased, tied):
    path = make_target(tmp_path / "target", base, {"attention_bias": biased, "tie_word_embeddings": tied})
    target = read_target(path)
    assert (target.config.attention_bias, target.config.tie_embeddings) == (biased, tied)
    assert target.config.o_bias == biased
    assert target.config.qk_norm == (base == "tiny-qwen3")
    assert target.config.windows == ((16, None) * 2 if base == "tiny-gptoss" else (None,) * 6)
    assert ("lm_head.weight" in target.tensors) != tied
    assert {name for name in target.tensors if not name.startswith(("model.", "lm_head."))} == set()


def test_a_bare_decoder_without_prefix_has_the_same_tensors(tmp_path):
    config = QWEN3 | {"tie_word_embeddings": True}
    whole = read_target(write_target(tmp_path, config))
    write_file(tmp_path / "model.safetensors", {n.removeprefix("model."): r.shape for n, r in whole.tensors.items()})
    assert read_target(tmp_path).tensors.keys() == whole.tensors.keys()


def test_a_head_in_the_file_wins_over_tying_as_in_transformers(tmp_path):
    path = make_target(tmp_path / "target", "tiny-qwen3", {"tie_word_embeddings": True})
    edit_tensors(path, add={"lm_head.weight": {"shape": (256, 64), "dtype": "BF16"}})
    model = AutoModelForCausalLM.from_pretrained(path)
    assert not model.lm_head.weight.equal(model.get_input_embeddings().weight)
    assert not read_target(path).config.tie_embeddings


def test_old_llama_files_hold_a_rotary_buffer_and_no_theta(tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "rope_parameters"}
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    assert read(tmp_path, config, add=buffer).rope.theta == 10000
    refused(tmp_path, {**config, "model_type": "qwen3"}, "rope_theta is missing")


def test_only_qwen3_reads_a_sliding_window(tmp_path):
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}
    assert read(tmp_path, QWEN3 | sliding).windows == (None,) * 4 + (8,) * 2
    assert read(tmp_path, LLAMA | sliding).windows == (None,) * 6


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 2, (2,)),
        (None, [2, 5], (2, 5)),
        (None, None, ()),
        ({"eos_token_id": [7, 8]}, 2, (7, 8)),
        ({"eos_token_id": None}, 2, (2,)),
        ({}, 2, (2,)),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(tmp_path, generation, config, expected):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read(tmp_path, QWEN3 | {"eos_token_id": config}).eos_ids == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "qwen3_moe"}, "model_type qwen3_moe is not supported yet"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method FP8 is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"attention_bias": True}, "attention_bias is true, but there are no self_attn biases"),
        ({"vocab_size": 300}, "model.embed_tokens.weight has shape [256, 64], config.json says [300, 64]"),
    ],
)
def test_targets_that_do_not_fit_are_refused(tmp_path, keys, words):
    write_target(tmp_path, QWEN3)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | keys))
    with pytest.raises(UserError) as error:
        read_target(tmp_path)
    assert words in str(error.value)


def test_an_untied_target_without_head_misses_a_tensor(tmp_path):
    write_target(tmp_path, QWEN3 | {"tie_word_embeddings": True})
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    with pytest.raises(UserError, match=r"missing tensor lm_head\.weight"):
        read_target(tmp_path)


def test_biases_in_the_mlp_are_read_for_llama(tmp_path):
    names = {"gate_proj": 128, "up_proj": 128, "down_proj": 64}
    biases = {f"model.layers.{i}.mlp.{name}.bias": (size,) for i in range(6) for name, size in names.items()}
    assert read(tmp_path, LLAMA | {"mlp_bias": True}, add=biases).mlp_bias
    refused(tmp_path, LLAMA | {"mlp_bias": False}, "mlp_bias is false, but", add=biases)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\udcff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=r"config\.json is not"):
        read_target(tmp_path)


def test_a_missing_directory_is_refused_by_its_path(tmp_path):
    with pytest.raises(UserError, match=rf"cannot read config\.json.*{tmp_path}/nowhere"):
        read_target(tmp_path / "nowhere")
