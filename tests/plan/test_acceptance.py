"""Tokens a step: within 1 and K + 1, more with more drafts, and as published where something is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.errors import UserError
from dflash_trt.plan.acceptance import TASKS, check_constant_rate, find_acceptance, fit_rates, read_tables
from dflash_trt.published import repositories


@given(st.integers(1, 32), st.floats(0, 1), st.integers(1, 40))
def test_tokens_lie_between_one_and_all_and_grow_with_the_drafts(known, share, draft):
    acceptance = fit_rates({known: 1 + share * known})
    assert acceptance.tokens(known) == pytest.approx(1 + share * known, abs=1e-6)
    assert 1 <= acceptance.tokens(draft) <= draft + 1 + 1e-9
    assert acceptance.tokens(draft) <= acceptance.tokens(draft + 1) + 1e-12


@given(st.integers(1, 20), st.floats(0.05, 0.999))
def test_one_rate_is_found_again_from_its_tokens(draft, rate):
    tokens = (1 - rate ** (draft + 1)) / (1 - rate)
    [(last, found)] = fit_rates({draft: tokens}).rates
    assert last == draft and found == pytest.approx(rate, abs=1e-6)


def test_every_published_length_is_met():
    for table in read_tables():
        assert table.target in repositories() or table.target in ("ablation", "Qwen/Qwen3.5-9B")
        assert set(table.tau) <= set(TASKS)
        for task, tau in table.tau.items():
            acceptance = fit_rates(tau, table.source, task)
            assert [acceptance.tokens(draft) for draft in tau] == pytest.approx(list(tau.values()))


def test_one_rate_predicts_shorter_blocks_of_the_gpt_oss_card_within_six_percent():
    checks = [check for check in check_constant_rate() if check.method == "dflash"]
    assert len(checks) == 11
    assert all(abs(check.error) < 0.06 for check in checks)


def test_a_category_is_the_mean_of_its_tasks_and_a_task_stands_in_for_its_group():
    coding = find_acceptance("openai/gpt-oss-120b", "dflash", "coding")
    assert coding is not None and coding.task == "mean of humaneval, mbpp"
    assert coding.tokens(9) == pytest.approx((4.4 + 4.6) / 2)
    eagle = find_acceptance("openai/gpt-oss-120b", "eagle3", "mbpp")
    assert eagle is not None and eagle.task == "humaneval"
    chat = find_acceptance("openai/gpt-oss-120b", "eagle3", "chat")
    assert chat is not None and "humaneval" in chat.task  # nothing else is published
    assert find_acceptance("google/gemma-4-31B-it", "dflash", "coding") is None


@pytest.mark.parametrize("tau", [{9: 11.0}, {3: 0.5}, {3: 3.0, 5: 5.5}, {3: 3.0, 5: 2.0}])
def test_lengths_that_no_drafts_yield_are_refused(tau):
    with pytest.raises(UserError, match="tokens a step cannot come from"):
        fit_rates(tau)
