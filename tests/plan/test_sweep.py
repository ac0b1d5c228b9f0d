"""The front, the choice and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest

from dflash_trt.errors import UserError
from dflash_trt.gpus import parse_gpus
from dflash_trt.plan.compare import ratios
from dflash_trt.plan.models import Split
from dflash_trt.plan.roofline import Roofline
from dflash_trt.plan.source import (
    check_drafts,
    checked,
    find_accepted,
    make_workload,
    open_model,
    parse_acceptance,
    parse_numbers,
    splits_of,
)
from dflash_trt.plan.sweep import Workload, choose, pareto, sweep, throughput_at
from dflash_trt.published import published
from tests import tiny
from tests.plan.pairs import GPT_OSS, LLAMA, card, model


@pytest.fixture(scope="module")
def points():
    accepted = find_accepted(model(), "coding")
    return sweep(model(), [Split(8)], card(), Roofline(card()), Workload(2048, 8192), accepted, (1, 8, 64, 512, 4096))


def test_no_point_of_the_front_is_beaten_and_every_other_is(points):
    front = pareto(points)
    assert front and all(point.memory.fits for point in front)
    for point in (p for p in points if p.memory.fits):
        beaten = any(f.per_user >= point.per_user and f.per_gpu >= point.per_gpu for f in front)
        assert beaten
    assert [p.per_gpu for p in front] == sorted(p.per_gpu for p in front)
    assert [-p.per_user for p in front] == sorted(-p.per_user for p in front)


def test_goals_choose_as_they_say(points):
    latency, interactive = choose(points, "latency", 0), choose(points, "interactive", 500)
    assert latency is not None and interactive is not None
    assert latency.method == "dflash" and latency.batch == 1
    assert latency.per_user == max(p.per_user for p in points)
    assert interactive.per_user >= 500
    assert interactive.per_gpu == max(p.per_gpu for p in points if p.per_user >= 500 and p.memory.fits)
    assert choose(points, "throughput", 10_000) is None


def test_speed_and_throughput_hang_together(points):
    for point in points:
        assert point.per_gpu == pytest.approx(point.batch * point.tokens / point.seconds / 8)
        assert sum(point.parts.values()) == pytest.approx(point.seconds)
        assert 1 <= point.tokens <= point.draft + 1


def test_between_points_of_a_front_throughput_is_between_theirs(points):
    front = pareto(p for p in points if p.method == "dflash")
    for fast, slow in itertools.pairwise(front):
        middle = throughput_at(front, (fast.per_user * slow.per_user) ** 0.5)
        assert middle is not None and fast.per_gpu <= middle <= slow.per_gpu
    assert throughput_at(front, front[0].per_user * 1.01) is None
    assert throughput_at(front, 1) == front[-1].per_gpu


def test_a_method_that_is_not_that_fast_has_no_ratio(points):
    [ar, eagle] = ratios(points, [700.0])
    assert ar.over == "ar" and ar.other is None and ar.value is None and 500 < ar.fastest < 700
    assert eagle.over == "eagle3" and eagle.value is not None and eagle.value > 1


def test_waiting_slows_every_step(points):
    accepted = find_accepted(model(), "coding")
    workload = Workload(2048, 8192, gap=1e-3)
    slower = sweep(model(), [Split(8)], card(), Roofline(card()), workload, accepted, (1, 8, 64, 512, 4096))
    assert [p.seconds - 1e-3 for p in slower] == pytest.approx([p.seconds for p in points])


def test_splits_are_those_that_divide_the_model():
    assert Split(8, 8, True) in splits_of(model(), parse_gpus("B300x8"))
    assert splits_of(model(LLAMA), parse_gpus("B300x8")) == (Split(1), Split(2), Split(4), Split(8))
    assert splits_of(model(), parse_gpus("B300")) == (Split(1),)


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (Split(16), "more than the 8 GPUs"),
        (Split(3), "does not divide the target's heads"),
        (Split(8, 3), "ep 3 does not divide tp"),
    ],
)
def test_impossible_splits_are_refused(split, says):
    with pytest.raises(UserError, match=says):
        checked(model(), parse_gpus("B300x8"), [split])


@pytest.mark.parametrize(
    ("target", "says"),
    [("moonshotai/Kimi-K2.6", "MLA"), ("Qwen/Qwen3.5-27B", "48 of its 64 layers have linear attention")],
)
def test_targets_that_are_not_modelled_are_refused(target, says):
    with pytest.raises(UserError, match=says):
        open_model(target, None)


def test_drafters_of_other_targets_and_of_other_kinds_are_refused():
    with pytest.raises(UserError, match="for a target of 24 layers, but openai/gpt-oss-120b has 36"):
        open_model(GPT_OSS, "z-lab/gpt-oss-20b-DFlash")
    with pytest.raises(UserError, match="is a target"):
        open_model(GPT_OSS, GPT_OSS)
    with pytest.raises(UserError, match=r"has 2560 hidden values, but Qwen/Qwen3-8B, .* has 4096"):
        open_model("Qwen/Qwen3-8B", "z-lab/Qwen3-4B-DFlash-b16")


def test_mxfp4_without_experts_is_refused():
    with pytest.raises(UserError, match="MXFP4 is for routed experts"):
        open_model(LLAMA, None, "mxfp4")


def test_a_directory_has_the_name_of_a_published_target_only_if_it_is_one(tmp_path):
    target, draft = tiny.make_pair(tmp_path)
    pair = open_model(str(target), str(draft))
    assert pair.name == str(target) and pair.target.hidden == 64 and pair.dflash is not None and pair.dflash.taps == 3
    for config, name in ((None, str(tmp_path / "qwen3-8b")), (published("Qwen/Qwen3-8B").config, "Qwen/Qwen3-8B")):
        copy = tmp_path / name.rpartition("/")[2]
        shutil.copytree(target, copy)
        if config:
            (copy / "config.json").write_text(json.dumps(dict(config)))
        assert open_model(str(copy), None).name == name


def test_the_longest_row_is_four_contexts_or_all_that_the_target_knows():
    assert make_workload(model(), 2048, None, "bf16").sequence == 8192
    assert make_workload(model(), 100_000, None, "bf16").sequence == 131_072
    with pytest.raises(UserError, match=r"131,073 tokens are more than the 131,072 .* --context"):
        make_workload(model(), 131_073, None, "bf16")


def test_more_drafts_than_a_block_holds_are_refused():
    check_drafts(model(), (1, 9))
    with pytest.raises(UserError, match="pass 9 or less"):
        check_drafts(model(), (1, 10))


def test_numbers_and_acceptance_lengths_are_read_as_written():
    assert parse_numbers("1-3,8, 2", "--batch", 10) == (1, 2, 3, 8)
    assert parse_acceptance("3.1@3,4.4@9", "--tau").tokens(9) == pytest.approx(4.4)
    for text in ("0", "3-1", "1-11", "x", "", "1,,2"):
        with pytest.raises(UserError, match="--batch"):
            parse_numbers(text, "--batch", 10)
    for text in ("4.4", "x@9", "4.4@0", "4.4@x", "@", "nan@9", "4.4@99999999", "4.4@9,4.5@9"):
        with pytest.raises(UserError, match="--tau"):
            parse_acceptance(text, "--tau")
