"""Bytes of a rank, beside numbers reckoned by hand."""

from __future__ import annotations

import pytest

from dflash_trt.kv import Arena
from dflash_trt.plan.memory import cache_per_row, measure_memory, weights_per_rank
from dflash_trt.plan.models import Split
from tests.plan.pairs import LLAMA, card, model


def test_weights_of_gpt_oss_120b_on_a_rank_of_eight():
    tables = 2 * 201_088 * 2880 * 2 // 8  # embedding and head, bf16
    attention = (8 + 2 * 1 + 8) * 64 * 2880 * 2  # q, k and v, o of 8 query heads and 1 KV head
    router = 128 * 2880 * 2
    experts = 128 * 3 * 2880 * 2880 * 17 // 32 // 8  # MXFP4: 16 bytes and a scale for 32 numbers
    assert weights_per_rank(model(), Split(8)) == tables + 36 * (attention + router + experts) == 8_169_246_720


def test_all_of_gpt_oss_120b_is_as_large_as_its_files():
    assert weights_per_rank(model(), Split(1)) == pytest.approx(65.25e9, rel=0.005)  # less norms, biases and sinks


def test_all_of_llama_is_as_large_as_its_parameters():
    assert weights_per_rank(model(LLAMA), Split(1)) == pytest.approx(2 * 8.03e9, rel=0.001)


def test_cache_of_a_token_and_of_a_window():
    stack = model().target
    full, token = 2 * 8 * 64 * 2, 36 * 2 * 8 * 64 * 2  # bytes: of a layer, of all
    assert cache_per_row(stack, Split(1), 1, "bf16") == token == 73_728
    assert cache_per_row(stack, Split(1), 1000, "bf16") == 18 * full * 1000 + 18 * full * 128
    assert cache_per_row(stack, Split(8), 1000, "bf16") == cache_per_row(stack, Split(1), 1000, "bf16") / 8
    assert cache_per_row(stack, Split(1), 1000, "fp8") == cache_per_row(stack, Split(1), 1000, "bf16") / 2


def test_one_kv_head_is_the_least_a_rank_has():
    assert cache_per_row(model().target, Split(16), 1000, "bf16") == cache_per_row(
        model().target, Split(8), 1000, "bf16"
    )


@pytest.mark.parametrize("split", [Split(1), Split(8), Split(8, 8, True)])
@pytest.mark.parametrize("batch", [1, 64])
def test_the_arena_has_a_place_for_every_row_of_a_rank_and_one_more(split, batch):
    heads = 8 // split.attention_ranks
    rows = -(-batch // split.tp) if split.attention_dp else batch
    arena = Arena(layers=8, positions=65_536, width=10, kv_heads=heads, head_dim=64)
    assert measure_memory(model(), "dflash", split, card(), batch, 65_536, 9).arena == arena.size(rows)


@pytest.mark.parametrize("method", ["ar", "eagle3", "dflash"])
@pytest.mark.parametrize("split", [Split(1), Split(8, 8), Split(8, 8, True)])
def test_the_largest_batch_fits_and_one_row_a_rank_more_does_not(method, split):
    step = split.tp if split.attention_dp else 1
    largest = measure_memory(model(), method, split, card("B200"), 1, 131_072, 9).largest_batch
    assert largest > 0
    assert measure_memory(model(), method, split, card("B200"), largest, 131_072, 9).fits
    assert not measure_memory(model(), method, split, card("B200"), largest + step, 131_072, 9).fits
