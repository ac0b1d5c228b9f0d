"""The recipes in build_recipes/: what each says fits the pair, the release and the card."""

from __future__ import annotations

import re

import pytest

from dflash_trt.kv import rank_heads
from dflash_trt.published import published
from dflash_trt.recipes import FOLDER, read_recipe, recipe_files
from dflash_trt.sizes import format_bytes
from dflash_trt.trtllm.preflight import ERROR, deployment_of_recipe, preflight
from dflash_trt.trtllm.releases import releases

NAMES = list(recipe_files())
SERVED = [name for name in NAMES if not read_recipe(name).recipe.unsupported]
# `33 x 40,976 x 20,480 bytes = 26 GiB`
ARENA = re.compile(r"([\d,]+) x ([\d,]+) x ([\d,]+)(?:\s|#)*bytes = ([\d.]+) GiB")


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_pairs_that_were_asked_for_have_recipes():
    names = " ".join(NAMES)
    for wanted in ("gpt-oss-120b-b300x8-latency", "gpt-oss-120b-b300x8-interactive", "gpt-oss-120b-b300x8-throughput"):
        assert wanted in SERVED
    for wanted in (
        "gpt-oss-120b-b200x8", "gpt-oss-20b-b200x1", "qwen3-8b-b200x1", "llama-3.1-8b-b200x1", "qwen3-coder-30b-a3b",
        "qwen3.5-27b", "qwen3.6-27b", "kimi-k2.6", "gemma-4-31b",
    ):  # fmt: skip
        assert wanted in names


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_about_a_pair_that_was_published_so(name):
    recipe = read_recipe(name).recipe
    drafter = published(recipe.drafter.checkpoint)
    assert drafter.role == "drafter" and drafter.target == recipe.target.checkpoint
    assert drafter.drafter_shape().block_size == recipe.block_size > recipe.draft_length
    target = published(recipe.target.checkpoint).shape()
    assert target.max_position and recipe.limits.sequence <= target.max_position
    for checkpoint in (recipe.target, recipe.drafter):
        known = published(checkpoint.checkpoint).revision
        assert checkpoint.revision in (None, known)
    assert name.endswith(f"-{str(recipe.gpus).lower()}-{recipe.goal}")


@pytest.mark.parametrize("name", SERVED)
def test_nothing_speaks_against_a_recipe_that_can_be_served(name):
    loaded = read_recipe(name)
    findings = preflight(deployment_of_recipe(loaded))
    assert [finding for finding in findings if finding.severity == ERROR] == []
    assert loaded.recipe.release in releases() and loaded.recipe.container
    assert loaded.recipe.container.image.endswith(loaded.recipe.release)
    assert loaded.recipe.draft_length + 1 <= loaded.recipe.block_size
    limits = loaded.recipe.limits
    assert limits.tokens >= limits.sequence or loaded.recipe.options.get("enable_chunked_prefill")


@pytest.mark.parametrize("name", SERVED)
def test_the_arena_in_a_recipes_comment_is_the_arena(name):
    """2 x layers x heads of a rank x head size x 2 bytes, for every slot and position."""
    recipe, text = read_recipe(name).recipe, recipe_files()[name].read_text()
    [(slots, positions, token, gib)] = ARENA.findall(text)
    drafter = published(recipe.drafter.checkpoint).drafter_shape()
    heads = rank_heads(drafter.kv_heads, 1 if recipe.parallel.attention_dp else recipe.parallel.tp)
    assert number(slots) == recipe.limits.batch + 1
    assert number(positions) == recipe.limits.sequence + recipe.draft_length + 1
    assert number(token) == 2 * drafter.layers * heads * drafter.head_dim * 2
    size = number(slots) * number(positions) * number(token)
    assert size / 2**30 == pytest.approx(float(gib), rel=0.05), format_bytes(size)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SERVED)))
def test_what_is_not_supported_says_why_and_who_says_so(name):
    recipe = read_recipe(name).recipe
    assert recipe.unsupported and re.search(r"support matrix|never hands", recipe.unsupported)


def test_the_page_lists_every_recipe_with_its_state():
    page = (FOLDER / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[?`?([a-z0-9.-]+)`?\]?(?:\([^)]*\))? \|.*\| (.*?) \|$", page, re.MULTILINE))
    assert rows.pop("recipe") == "state" and set(rows) == set(NAMES)
    for name in NAMES:
        assert ("not supported" in rows[name]) == (name not in SERVED)
