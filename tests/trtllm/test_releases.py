"""Keys that a release of TensorRT-LLM takes, and what is said of those that it does not take."""

from __future__ import annotations

import pytest

from dflash_trt.document import read_document
from dflash_trt.errors import UserError
from dflash_trt.trtllm.releases import judge, read_release, releases

DFLASH = {"decoding_type": "DFlash", "max_draft_len": 7, "speculative_model": "/models/drafter"}


def said(config, version="1.4.0rc1") -> list[str]:
    return [str(problem) for problem in judge(read_release(version), config)]


def speculating(**keys):
    return {"speculative_config": DFLASH | keys}


@pytest.mark.parametrize("version", releases())
def test_every_release_takes_dflash_and_tells_what_was_read(version):
    release = read_release(version)
    assert release.read and release.inferred
    config = speculating(mask_token_id=5, target_layer_ids=[1, 2]) | {
        "tensor_parallel_size": 8,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.8, "enable_block_reuse": False},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 32},
        "moe_config": {"backend": "TRTLLM"},
        "attention_dp_config": {"enable_balance": True, "batching_wait_iters": 0, "timeout_iters": 60},
    }
    assert said(config, version) == []


def test_a_release_without_a_table_is_refused_with_those_that_have_one():
    with pytest.raises(UserError, match=r"1\.2\.1.*tables are there for 1\.3\.0rc14, "):
        read_release("1.2.1")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"max_batch_sise": 8}, "max_batch_sise is not a known key — did you mean max_batch_size?"),
        (speculating(max_draft_length=7), "speculative_config.max_draft_length is not a known key — did you mean max_"),
        ({"max_draft_len": 7}, "max_draft_len is not a known key — its place is speculative_config.max_draft_len"),
        ({"kv_cache_config": {"max_seq_len": 9}}, "kv_cache_config.max_seq_len is not a known key — its place is max"),
        ({"qqqq": 1}, "qqqq is not a known key — TensorRT-LLM refuses keys it does not know"),
        ({7: 1}, "7 is not a known key"),
        ({"max_seq_len": "32k"}, "max_seq_len is '32k' — give a whole number, 1 or more"),
        ({"max_seq_len": True}, "max_seq_len is true — give a whole number, 1 or more"),
        ({"max_seq_len": 1.5}, "max_seq_len is 1.5 — give a whole number"),
        ({"max_seq_len": 0}, "max_seq_len is 0, less than 1"),
        ({"enable_attention_dp": "yes"}, "enable_attention_dp is 'yes' — give true or false"),
        ({"enable_attention_dp": 1}, "enable_attention_dp is 1 — give true or false"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 80}}, "fraction is 80, more than 1 — give a number from 0"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": "80%"}}, "fraction is '80%' — give a number from 0 to 1"),
        ({"kv_cache_config": 0.8}, "kv_cache_config is 0.8, but it is a section"),
        ({"kv_cache_config": None}, "kv_cache_config is null"),
        ({"mla_skip_correction_threshold": 0}, "is 0, not above 0"),
        ({"batch_wait_max_tokens_ratio": float("nan")}, "is nan — give a number from 0 to 1"),
        ({"batch_wait_timeout_ms": float("inf")}, "is inf — give a number"),
        ({"pp_partition": 8}, "pp_partition is 8 — give a list"),
        ({"cuda_graph_config": {"batch_sizes": [1, "2"]}}, "cuda_graph_config.batch_sizes[1] is '2'"),
        ({"nvfp4_gemm_config": {"allowed_backends": ["cutlas"]}}, "allowed_backends[0] is 'cutlas' — one of cutlass, "),
        (speculating(decoding_type="dflash"), "decoding_type is 'dflash' — did you mean DFlash?"),
        (speculating(decoding_type=["DFlash"]), "speculative_config.decoding_type is "),
        ({"speculative_config": {"max_draft_len": 7}}, "speculative_config.decoding_type is missing — one of DFlash, "),
        ({"speculative_config": {"decoding_type": "DFlash"}}, "speculative_config.max_draft_len is missing"),
        (speculating(max_draft_len=0), "speculative_config.max_draft_len is 0, less than 1"),
        (speculating(attention_backend="FA5"), "attention_backend is 'FA5' — one of VANILLA, TRTLLM, FA4"),
    ],
)  # fmt: skip
def test_one_mistake_makes_one_sentence(config, sentence):
    assert [sentence in one for one in said(config)] == [True]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cuda_graph_config": None, "max_seq_len": None, "speculative_config": None},
        {"max_seq_len": 8.0, "kv_cache_config": {"free_gpu_memory_fraction": 1}},
        {
            "scheduler_config": {"anything": 1},
            "sparse_attention_config": {"algorithm": "dsa"},
        },  # not all keys were read
        {"speculative_config": {"decoding_type": "PARD", "anything": 1}},
        {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model_dir": "/m"}},
        {"env_overrides": {"TRTLLM_ENABLE_PDL": "1"}},
    ],
)
def test_what_tensorrt_llm_takes_passes(config):
    assert said(config) == []


def test_what_only_a_later_release_has_is_refused_by_earlier_ones():
    config = speculating(context_recompute_tail=64)
    assert said(config, "1.4.0rc1") == []
    for version in releases()[:-1]:
        [sentence] = said(config, version)
        assert f"TensorRT-LLM {version} has no speculative_config.context_recompute_tail" in sentence
        assert "first seen in 1.4.0rc1 — leave it out, or choose release 1.4.0rc1" in sentence


def test_what_a_later_release_dropped_is_refused_by_it():
    config = {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3, "eagle3_one_model": True}}
    assert said(config, "1.3.0rc20") == []
    assert "1.3.0rc20 was the last that had it" in said(config, "1.3.0rc27")[0]


def test_a_value_may_be_younger_than_its_key():
    assert said({"moe_config": {"backend": "CUTEDSL_FC12"}}) == []
    [sentence] = said({"moe_config": {"backend": "CUTEDSL_FC12"}}, "1.3.0rc27")
    assert "first seen in 1.4.0rc1 — one of AUTO, " in sentence


def test_all_mistakes_of_a_file_are_told_with_their_lines(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("max_seq_len: 32k\nspeculative_config:\n  decoding_type: DFlash\n  max_draft_length: 7\nqqqq: 1\n")
    document = read_document(file)
    problems = judge(read_release("1.4.0rc1"), document.values, document)
    assert sorted((problem.line, problem.what.split()[0]) for problem in problems) == [
        (1, "max_seq_len"),
        (2, "speculative_config.max_draft_len"),
        (4, "speculative_config.max_draft_length"),
        (5, "qqqq"),
    ]
