"""Seconds of work: hand-reckoned small numbers, and what must hold for any card, model and batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.plan.models import Split
from dflash_trt.plan.ops import AllReduce, Attention, Experts, Gemm, Small
from dflash_trt.plan.roofline import BANDWIDTH, KERNEL, LINK, Roofline, busiest, compute_dtype
from dflash_trt.plan.steps import METHODS, Load, build_step
from dflash_trt.plan.sweep import time_step
from tests.plan.pairs import CODER, GPT_OSS, LLAMA, card, model

CARDS = st.sampled_from(["B300", "B200", "H200", "RTX PRO 6000"])
MODELS = st.sampled_from([GPT_OSS, LLAMA, CODER])


def test_a_gemm_of_few_rows_takes_the_time_to_read_its_weights():
    op = Gemm(rows=1, outputs=4096, inputs=4096)
    read = (4096 * 4096 + 4096 + 4096) * 2 / (BANDWIDTH * 7.75e12)
    assert Roofline(card()).seconds(op) == pytest.approx(KERNEL + read)


def test_a_gemm_of_many_rows_takes_the_time_to_compute():
    op = Gemm(rows=8192, outputs=8192, inputs=8192)
    assert Roofline(card()).seconds(op) == pytest.approx(KERNEL + 2 * 8192**3 / (0.7 * 2250e12))


def test_an_all_reduce_of_one_token_is_latency_and_of_many_goes_in_two_rounds():
    clock, b300 = Roofline(card()), card()
    link = LINK * b300.link
    assert clock.seconds(AllReduce(2880, 8)) == pytest.approx(b300.link_latency + 7 * 2880 * 2 / link)
    large = 1 << 24
    assert clock.seconds(AllReduce(large, 8)) == pytest.approx(2 * b300.link_latency + 2 * 7 / 8 * large * 2 / link)
    assert clock.seconds(AllReduce(large, 1)) == 0


def test_attention_reads_the_cache_of_every_row():
    op = Attention(rows=64, queries=1, context=4096, heads=8, kv_heads=1, head_dim=64)
    cache = 2 * 64 * 4096 * 64 * 2
    assert op.bytes == cache + 2 * 64 * 8 * 64 * 2
    fp8 = replace(op, cache="fp8")
    assert Roofline(card()).seconds(fp8) < Roofline(card()).seconds(op)


def test_one_token_reads_the_experts_it_is_sent_to_and_many_read_all():
    one = Experts(1, 2880, 2880, 128, 4, 1, 1, "mxfp4")
    weights = 3 * 2880 * 2880 * 17 / 32
    moved = 4 * (2 * 2880 + 3 * 2880) * 2
    read = (4 * weights + moved) / (BANDWIDTH * 7.75e12)
    assert Roofline(card()).seconds(one) == pytest.approx(6 * KERNEL + read, rel=1e-6)
    assert busiest(128, 1 - (1 - 4 / 128) ** 4096, 1) == pytest.approx(128)


def test_the_busiest_rank_has_no_more_than_all_and_no_less_than_its_share():
    for ranks in (1, 2, 8):
        for share in (0.0, 0.1, 0.5, 0.9, 1.0):
            assert 16 * share <= busiest(16, share, ranks) <= 16


def test_mxfp4_multiplies_in_fp8_on_blackwell_and_in_bf16_on_hopper():
    assert compute_dtype("mxfp4", card("B300")) == "fp8" and compute_dtype("mxfp4", card("H200")) == "bf16"
    assert compute_dtype("nvfp4", card("B300")) == "fp4" and compute_dtype("nvfp4", card("H200")) == "bf16"


@settings(max_examples=60, deadline=None)
@given(CARDS, MODELS, st.sampled_from(METHODS), st.integers(1, 512), st.integers(1, 9), st.floats(1, 4))
def test_a_faster_card_is_never_slower(name, target, method, batch, draft, factor):
    slow, load, split = card(name), Load(batch, draft, 2048), Split(4)
    before = sum(time_step(model(target), method, load, split, Roofline(slow)).values())
    for faster in (
        replace(slow, bandwidth=slow.bandwidth * factor),
        replace(slow, link=slow.link * factor),
        replace(slow, link_latency=slow.link_latency / factor),
        replace(slow, flops={dtype: factor * flops for dtype, flops in slow.flops.items()}),
    ):
        assert sum(time_step(model(target), method, load, split, Roofline(faster)).values()) <= before * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(CARDS, MODELS, st.sampled_from(METHODS), st.integers(1, 2000), st.integers(1, 500), st.sampled_from([1, 4]))
def test_a_larger_batch_never_yields_less_of_a_gpu(name, target, method, batch, more, ep):
    """With rows on all ranks; under attention DP a rank may have one row more than the others."""
    split = Split(4, ep if model(target).target.experts else 1)
    clock = Roofline(card(name))
    small, large = (
        sum(time_step(model(target), method, Load(rows, 5, 2048), split, clock).values()) / rows
        for rows in (batch, batch + more)
    )
    assert large <= small * (1 + 1e-12)


@given(st.sampled_from(METHODS), st.integers(1, 256), st.integers(1, 8), st.integers(1, 100_000))
@settings(max_examples=30, deadline=None)
def test_more_drafts_and_longer_contexts_never_take_less_time(method, batch, draft, context):
    clock = Roofline(card())
    base = sum(time_step(model(), method, Load(batch, draft, context), Split(8), clock).values())
    assert base <= sum(time_step(model(), method, Load(batch, draft + 1, context), Split(8), clock).values())
    assert base <= sum(time_step(model(), method, Load(batch, draft, context + 1000), Split(8), clock).values())


def test_a_step_of_ar_reads_all_weights_that_a_token_needs():
    calls = build_step(model(LLAMA), "ar", Load(1, 0, 1), Split(1))
    read = sum(call.count * call.op.outputs * call.op.inputs for call in calls if isinstance(call.op, Gemm))
    assert read == pytest.approx(8.03e9 - 128_256 * 4096, rel=0.001)  # of the embedding one row


def test_eagle3_passes_its_layer_k_times_and_dflash_its_layers_once():
    def attentions(method: str, draft: int) -> int:
        calls = build_step(model(), method, Load(1, draft, 1), Split(1))
        return sum(call.count for call in calls if call.part == "drafter" and isinstance(call.op, Attention))

    assert [attentions("eagle3", draft) for draft in (1, 3, 7)] == [1, 3, 7]
    assert [attentions("dflash", draft) for draft in (1, 9)] == [8, 8]


def test_each_captured_layer_costs_a_norm_and_a_copy_beside_the_all_reduce():
    calls = build_step(model(), "dflash", Load(2, 3, 1), Split(8))
    size = 4 * 2 * 4 * 2880 * 2
    small = [call for call in calls if call.part == "target" and call.op == Small(size)]
    assert sum(call.count for call in small) == 2 * 5
    reduces = sum(call.count for call in calls if call.part == "target" and isinstance(call.op, AllReduce))
    assert reduces == 2 * 36 + 1  # and one for the embedding
