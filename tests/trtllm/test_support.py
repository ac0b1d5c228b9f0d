"""What is known of TensorRT-LLM's support, and how releases compare."""

from __future__ import annotations

import dataclasses

import pytest

from dflash_trt.checkpoint.shape import VARIANTS
from dflash_trt.published import published, repositories
from dflash_trt.trtllm.support import families, find_family, older, trained_on, variants


def test_every_published_target_belongs_to_a_family():
    for repository in repositories():
        if (known := published(repository)).role == "target":
            assert find_family(known.shape()), repository


@pytest.mark.parametrize(
    ("repository", "verdict"),
    [
        ("openai/gpt-oss-120b", "yes"),
        ("Qwen/Qwen3-8B", "tested"),
        ("meta-llama/Llama-3.1-8B-Instruct", "tested"),
        ("Qwen/Qwen3.6-27B", "tested"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "unlisted"),
        ("google/gemma-4-31B-it", "no"),
        ("moonshotai/Kimi-K2.6", "no"),
    ],
)
def test_targets_get_the_verdict_of_the_matrix(repository, verdict):
    assert find_family(published(repository).shape()).verdict == verdict


def test_qwen38_has_the_architecture_of_qwen36():
    shape = dataclasses.replace(published("Qwen/Qwen3.6-27B").shape(), architecture="Qwen3_5ForConditionalGeneration")
    assert "Qwen3.8" in find_family(shape).name


def test_every_verdict_has_a_source():
    assert {family.verdict for family in families()} <= {"yes", "tested", "unlisted", "no"}
    assert all(family.source for family in families()) and all(variant.source for variant in variants().values())


def test_every_variant_that_checkpoints_are_read_as_is_judged():
    assert variants().keys() == VARIANTS


@pytest.mark.parametrize(
    ("release", "other"),
    [
        ("1.2.1", "1.3.0rc14"),
        ("1.3.0rc9", "1.3.0rc14"),
        ("1.3.0rc27", "1.3.0"),
        ("1.3.0", "1.4.0rc1"),
        ("1.3", "1.3.1"),
    ],
)
def test_releases_are_ordered_as_they_came(release, other):
    assert older(release, other) and not older(other, release) and not older(release, release)


def test_a_word_is_no_old_release():
    assert not older("main", "1.3.0rc14")


@pytest.mark.parametrize("name", ["z-lab/Qwen3-8B-DFlash-b16", "/models/z-lab/Qwen3-8B-DFlash-b16/"])
def test_drafters_of_answers_without_thinking_are_known_wherever_they_lie(name):
    assert trained_on(name) == "non-thinking"
    assert trained_on("z-lab/gpt-oss-120b-DFlash") is None and trained_on(None) is None
