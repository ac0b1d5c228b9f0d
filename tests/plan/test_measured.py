"""Measured latencies: exact at rows, between rows between them, and nothing beyond."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.errors import UserError
from dflash_trt.gpus import read_cards
from dflash_trt.plan.measured import SYSTEMS, Grid, Measured, data_folder, interpolate, is_available
from dflash_trt.plan.models import Split
from dflash_trt.plan.ops import AllReduce, Attention, Experts, Gemm
from dflash_trt.plan.roofline import Roofline
from tests.plan.pairs import card, model

wheel = pytest.mark.skipif(not is_available(card()), reason="aiconfigurator-core is not installed")
TABLE = Grid({(a, b): float(a * b) for a in (1, 2, 8) for b in (10, 100)})


@given(st.integers(1, 8), st.integers(10, 100))
def test_products_are_met_everywhere_between_rows(a, b):
    assert interpolate(TABLE, (a, b)) == pytest.approx(a * b)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 100))
def test_a_latency_lies_between_those_of_the_rows_around_it(low, high, at):
    found = interpolate(Grid({(1,): low, (100,): high}), (at,))
    assert found is not None and min(low, high) * (1 - 1e-9) <= found <= max(low, high) * (1 + 1e-9)


def test_beyond_the_rows_there_is_nothing():
    assert interpolate(TABLE, (9, 10)) is None
    assert interpolate(TABLE, (1, 9)) is None
    assert interpolate(Grid({(1, 1): 1.0, (2, 2): 1.0}), (1, 2)) is None  # a corner without a row


def test_without_the_wheel_measured_data_is_refused_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("dflash_trt.plan.measured.PACKAGE", "no_such_package")
    assert not is_available(card())
    with pytest.raises(UserError, match=r"dflash-trt\[plan\].*--data roofline"):
        data_folder(card())


@wheel
def test_without_pyarrow_measured_data_is_refused_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert not is_available(card())
    with pytest.raises(UserError, match=r"pyarrow.*not installed.*--data roofline"):
        data_folder(card())


@wheel
def test_every_card_has_tables():
    assert set(SYSTEMS) == set(read_cards())
    assert all(is_available(one) for one in read_cards().values())


@wheel
def test_rows_of_the_wheel_are_read_in_seconds():
    clock = Measured(card())
    assert clock.seconds(AllReduce(2048, 8)) == pytest.approx(5.7e-6, abs=0.1e-6)
    assert clock.seconds(Gemm(16, 1024, 3072)) == pytest.approx(5e-6, abs=1e-6)
    assert clock.seconds(Experts(1, 2880, 2880, 128, 4, 1, 8, "mxfp4")) == pytest.approx(17.6e-6, abs=0.1e-6)
    assert clock.seconds(Attention(1, 1, 2048, 8, 1, 64)) == pytest.approx(11.1e-6, abs=0.1e-6)
    assert not clock.fallbacks


@wheel
def test_what_the_tables_lack_is_reckoned_and_told():
    clock = Measured(card())
    whole = Gemm(4, 201_088, 2880)
    split = Experts(4, 2880, 2880, 128, 4, 8, 1, "mxfp4")
    assert [clock.seconds(op) for op in (whole, split)] == [Roofline(card()).seconds(op) for op in (whole, split)]
    assert clock.fallbacks == {
        "bf16 GEMM 2880 → 201088": (4, 4),
        "mxfp4 experts 128 x 2880 x 2880, tp 8, ep 1": (4, 4),
    }


@wheel
def test_more_queries_a_row_cost_once_they_are_more_than_the_cache_takes_to_read():
    clock = Measured(card())
    one, ten = Attention(32, 1, 8192, 8, 1, 64), Attention(32, 10, 8192, 8, 1, 64)
    many = Attention(32, 1000, 8192, 8, 1, 64)
    assert clock.seconds(one) == clock.seconds(ten) < clock.seconds(many)


@wheel
def test_a_search_keeps_to_splits_whose_experts_were_measured():
    splits = (Split(8), Split(8, 8), Split(8, 8, True), Split(1))
    assert Measured(card()).covered(model(), splits) == (Split(8, 8), Split(8, 8, True), Split(1))
