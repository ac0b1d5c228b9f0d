"""Weights and caches reckoned from a config come to what the published files take."""

from __future__ import annotations

import pytest

from dflash_trt.gpus import read_cards
from dflash_trt.plan.memory import measure_memory
from dflash_trt.plan.models import Split, read_model
from dflash_trt.published import published
from dflash_trt.trtllm import footprint
from dflash_trt.trtllm.deployment import find_drafter, find_target
from dflash_trt.trtllm.settings import read_settings
from tests.trtllm.rules.build import VANILLA_BACKEND, deployment

ONE = read_settings({})


@pytest.mark.parametrize(
    ("target", "gigabytes"),
    [
        ("openai/gpt-oss-120b", 65.25),  # sums of the published safetensors files
        ("openai/gpt-oss-20b", 13.76),
        ("Qwen/Qwen3-8B", 16.38),
        ("Qwen/Qwen3-4B", 8.04),
        ("meta-llama/Llama-3.1-8B-Instruct", 16.06),
    ],
)
def test_targets_weigh_what_their_files_do(target, gigabytes):
    assert footprint.weights(find_target(target), ONE) / 1e9 == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(
    ("drafter", "gibibytes"),
    [
        ("z-lab/gpt-oss-120b-DFlash", 1.462),
        ("z-lab/Qwen3-8B-DFlash-b16", 1.953),
        ("z-lab/Qwen3.6-27B-DFlash", 3.223),
        ("z-lab/gemma-4-31B-it-DFlash", 2.861),
    ],
)
def test_drafters_weigh_what_their_files_do(drafter, gibibytes):
    shape = find_drafter(drafter).shape
    assert footprint.drafter_weights(shape, ONE) / 2**30 == pytest.approx(gibibytes, rel=0.005)


def test_ranks_share_the_weights_but_not_fc():
    shape = find_drafter("z-lab/gpt-oss-120b-DFlash").shape
    eight = read_settings({"tensor_parallel_size": 8})
    fc = 5 * 2880 * 2880 * 2
    assert footprint.drafter_weights(shape, eight) == pytest.approx(
        (footprint.drafter_weights(shape, ONE) - fc) / 8 + fc
    )


@pytest.mark.parametrize("attention_dp", [False, True])
def test_the_planner_weighs_ranks_alike(attention_dp):
    target, drafter = (published(name) for name in ("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash"))
    settings = read_settings({"tensor_parallel_size": 8, "enable_attention_dp": attention_dp})
    model = read_model("gpt-oss-120b", target.shape(), drafter.drafter_shape())
    split = Split(tp=8, attention_dp=attention_dp)
    planned = measure_memory(model, "dflash", split, read_cards()["B300"], batch=8, sequence=4096, draft=9)
    assert footprint.weights(find_target(target.repository), settings) == pytest.approx(planned.weights, rel=0.02)
    assert footprint.drafter_weights(drafter.drafter_shape(), settings) == pytest.approx(planned.drafter, rel=0.01)


def test_a_token_of_qwen3_8b_takes_144_kib_of_cache():
    judged = deployment({"tensor_parallel_size": 1}, target="Qwen/Qwen3-8B", gpus="B300")
    assert footprint.cache_per_sequence(judged, 1000) == 1000 * 36 * 2 * 8 * 128 * 2


def test_sliding_layers_keep_their_window():
    judged = deployment({"tensor_parallel_size": 1}, gpus="B300")
    assert footprint.cache_per_sequence(judged, 1000) == (18 * 1000 + 18 * 128) * 2 * 8 * 64 * 2


def test_the_context_is_bounded_by_what_the_drafter_counts_to():
    judged = deployment({"max_seq_len": 131072}, draft_is={"max_position": 40960})
    assert footprint.arena(judged).positions == 40960


def test_the_context_lies_in_the_cache_only_with_the_trtllm_backend_and_bfloat16():
    assert footprint.pooled(deployment().settings)
    assert not footprint.pooled(deployment(VANILLA_BACKEND).settings)
    assert not footprint.pooled(deployment({"kv_cache_config.dtype": "fp8"}).settings)
