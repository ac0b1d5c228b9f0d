"""The arena's arithmetic: the published cases to the byte, and batches that fit and no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.kv import PAGE, Arena, rank_heads
from dflash_trt.trtllm.arena import GIB, OVERHEAD, RESERVE, SAFETY, Memory


def test_the_case_of_batch_64_and_131072_tokens_to_the_byte():
    """6 layers, 8 KV heads of 128, one rank, K 7."""
    arena = Arena(layers=6, positions=131072, width=8, kv_heads=8, head_dim=128)
    assert arena.position == 24 * 1024
    assert arena.size(64) == 2 * 6 * 65 * (131072 + 8) * 8 * 128 * 2 == 209_392_435_200
    assert arena.size(64) / GIB == pytest.approx(195.0, abs=0.02)


def test_the_80_gigabytes_of_issue_16005():
    """MiniMax-M2.5 on two ranks: 5 layers, 8 KV heads of 128; its 64 slots are our 65 without the spare one."""
    arena = Arena(layers=5, positions=131083, width=8, kv_heads=rank_heads(8, 2), head_dim=128)
    assert arena.position == 10 * 1024
    assert arena.size(63) / GIB == pytest.approx(80.0, abs=0.1)
    assert arena.size(64) / GIB == pytest.approx(81.3, abs=0.1)


def test_the_trtllm_backend_allocates_whole_pages():
    arena = Arena(layers=2, positions=100, width=8, kv_heads=1, head_dim=16, page=PAGE)
    assert arena.size(1) == 2 * 2 * 2 * 128 * 1 * 16 * 2


def test_heads_are_split_as_far_as_they_go():
    assert [rank_heads(8, ranks) for ranks in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]


ARENAS = st.builds(
    Arena,
    layers=st.integers(1, 12),
    positions=st.integers(1, 1 << 20),
    width=st.integers(2, 32),
    kv_heads=st.integers(1, 64),
    head_dim=st.sampled_from([64, 80, 128, 256]),
    page=st.sampled_from([1, PAGE]),
)
ROOMS = st.integers(0, 300 * GIB)


@given(ARENAS, ROOMS)
def test_the_largest_batch_fits_and_one_more_does_not(arena, room):
    batch = arena.largest_batch(room)
    assert batch == 0 or arena.size(batch) <= room
    assert arena.size(batch + 1) > room


@given(ARENAS, ROOMS, st.integers(1, 512))
def test_the_longest_context_fits_and_one_page_more_does_not(arena, room, batch):
    positions = arena.longest(room, batch)
    if positions > 0:
        assert Arena(**{**vars(arena), "positions": positions}).size(batch) <= room
    more = max(positions, 0) + arena.page
    assert Arena(**{**vars(arena), "positions": more}).size(batch) > room


MEMORIES = st.builds(
    Memory,
    card=st.integers(8 * GIB, 300 * GIB),
    weights=st.integers(0, 320 * GIB),
    fraction=st.floats(0.01, 1.0),
    cache_first=st.booleans(),
)


@given(MEMORIES)
def test_weights_arena_and_cache_never_take_more_than_the_card(memory):
    taken = memory.room + memory.cache(memory.room)
    assert memory.room >= 0
    assert taken <= max(0, memory.card - memory.weights - OVERHEAD)


@given(MEMORIES)
def test_an_arena_that_comes_first_leaves_half(memory):
    if not memory.cache_first:
        assert memory.room <= memory.free // 2
        assert memory.room == 0 or memory.room <= memory.free - RESERVE


def test_a_cache_that_comes_first_leaves_the_rest():
    memory = Memory(card=100 * GIB, weights=50 * GIB, fraction=0.8, cache_first=True)
    assert memory.room == pytest.approx((100 - 50 - 4) * 0.2 * SAFETY * GIB, rel=1e-9)
    assert memory.cache(10 * GIB) == memory.cache(0)


def test_configurations_that_tensorrt_llm_tests_fit():
    """Laguna-XS with batch 128 of 4,096 tokens, on a B200 (62 GiB of weights) and on an H100 (33 GiB): PR 19466."""
    arena = Arena(layers=5, positions=4096, width=5, kv_heads=8, head_dim=128)
    for card, weights in ((178, 62), (79, 33)):
        assert arena.size(128) <= Memory(card * GIB, weights * GIB, 0.9).room
