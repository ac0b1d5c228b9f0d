"""What one call may hold, and what it may not leak between rows."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.errors import Failure
from tests.graph.drive import Row, inputs, load
from tests.tiny import make_pair


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), dtype="float32")


@pytest.fixture
def session(paths, tmp_path):
    return load(*paths, tmp_path / "engine", max_batch=4)


PROMPTS = [[int(t) for t in np.random.default_rng(seed).integers(0, 250, 11 + seed)] for seed in range(4)]


def alone(paths, directory, prompt):
    """The first block and its successor of a prompt in a session of its own."""
    session = load(*paths, directory)
    K = session.limits.block_size
    first = session.step(inputs(K, [Row(prompt, len(prompt))]))
    block = first.next_block[0].tolist()
    second = session.step(inputs(K, [Row(block, 1, len(prompt))]))
    return block, int(second.n_accepted[0]), second.next_block[0].tolist()


def test_prefill_chunks_decode_rows_and_idle_rows_mix_in_one_call(paths, session, tmp_path):
    K = session.limits.block_size
    expected = [alone(paths, tmp_path / f"alone{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    for slot in (0, 2):
        out = session.step(inputs(K, [Row(PROMPTS[slot], len(PROMPTS[slot]))], first=slot))
        assert out.next_block[0].tolist() == expected[slot][0]
    mixed = session.step(
        inputs(
            K,
            [
                Row(expected[0][0], 1, len(PROMPTS[0])),  # decodes
                Row(PROMPTS[1], len(PROMPTS[1])),  # reads its whole prompt
                Row((), 0, len(PROMPTS[2])),  # sits idle
                Row(PROMPTS[3][:5], 5),  # reads a first chunk
            ],
        )
    )
    assert mixed.next_block[0].tolist() == expected[0][2] and mixed.n_accepted[0] == expected[0][1]
    assert mixed.next_block[1].tolist() == expected[1][0]
    later = session.step(
        inputs(
            K,
            [
                Row(expected[1][0], 1, len(PROMPTS[1])),
                Row(expected[2][0], 1, len(PROMPTS[2])),  # the idle call left no trace
                Row(PROMPTS[3][5:], len(PROMPTS[3]) - 5, 5),
            ],
            first=1,
        )
    )
    assert later.next_block[0].tolist() == expected[1][2]
    assert later.next_block[1].tolist() == expected[2][2]
    assert later.next_block[2].tolist() == expected[3][0]


def test_a_reused_slot_shows_nothing_of_its_former_tenant(paths, session, tmp_path):
    K = session.limits.block_size
    expected = alone(paths, tmp_path / "alone", PROMPTS[0])
    session.step(inputs(K, [Row(PROMPTS[3] * 3, len(PROMPTS[3]) * 3)], first=1))
    session.free_slot(1)
    for cache in session._caches.values():
        cache[:] = 1e9  # whatever an earlier tenant left, even this, must never be seen
    out = session.step(inputs(K, [Row(PROMPTS[0], len(PROMPTS[0]))], first=1))
    assert out.next_block[0].tolist() == expected[0]
    out = session.step(inputs(K, [Row(expected[0], 1, len(PROMPTS[0]))], first=1))
    assert out.next_block[0].tolist() == expected[2]


def test_a_moved_slot_goes_on_where_it_was(paths, session, tmp_path):
    K = session.limits.block_size
    expected = alone(paths, tmp_path / "alone", PROMPTS[1])
    session.step(inputs(K, [Row(PROMPTS[1], len(PROMPTS[1]))], first=3))
    session.move_slot(3, 0, len(PROMPTS[1]))
    out = session.step(inputs(K, [Row(expected[0], 1, len(PROMPTS[1]))], first=0))
    assert out.next_block[0].tolist() == expected[2]


def test_the_caches_are_updated_in_place(session):
    K = session.limits.block_size
    session.step(inputs(K, [Row(PROMPTS[0], len(PROMPTS[0]))]))
    before = {name: (cache.ctypes.data, cache.copy()) for name, cache in session._caches.items()}
    session.step(inputs(K, [Row(PROMPTS[1], len(PROMPTS[1]))], first=1))
    for name, (address, copy) in before.items():
        cache = session._caches[name]
        assert cache.ctypes.data == address
        assert (cache[1] != copy[1]).any() and (cache[[0, 2, 3]] == copy[[0, 2, 3]]).all()


def test_the_autoregressive_graph_makes_the_same_text(paths, session, tmp_path):
    target, _ = paths
    plain = load(target, None, tmp_path / "plain")
    K = session.limits.block_size
    spoken, text = [], []
    out = session.step(inputs(K, [Row(PROMPTS[2], len(PROMPTS[2]))]))
    spoken.append(int(out.next_token[0]))
    past = len(PROMPTS[2])
    while len(spoken) < 40:
        block = out.next_block[0].tolist()
        out = session.step(inputs(K, [Row(block, 1, past)]))
        n = int(out.n_accepted[0])
        spoken += [*block[1 : 1 + n], int(out.next_token[0])]
        past += 1 + n
    out, past = plain.step(inputs(1, [Row(PROMPTS[2], len(PROMPTS[2]))])), len(PROMPTS[2])
    while len(text) < 40:
        text.append(int(out.next_token[0]))
        assert out.n_accepted[0] == 0 and out.next_block.shape == (1, 1)
        out, past = plain.step(inputs(1, [Row([text[-1]], 1, past)])), past + 1
    assert spoken[:40] == text


def test_the_caches_follow_the_longest_sequence_and_shrink_once_it_left(session):
    K = session.limits.block_size
    session.step(inputs(K, [Row(PROMPTS[0], len(PROMPTS[0]))]))
    small = session.cache_bytes
    session.step(inputs(K, [Row(PROMPTS[1] * 5, len(PROMPTS[1]) * 5, 300)], first=1))
    assert session.cache_bytes > 2 * small
    session.free_slot(1)
    session.step(inputs(K, [Row(PROMPTS[0], len(PROMPTS[0]))]))
    assert session.cache_bytes == small


def test_rows_beyond_the_cache_are_a_failure_and_touch_nothing(tmp_path):
    """Plugin graphs count them; the bucket of the session's cache holds 128 positions."""
    target, draft = make_pair(tmp_path)
    session = load(target, draft, tmp_path / "engine", ops="plugin")
    session.step(inputs(session.limits.block_size, [Row([5, 6, 7], 3)]))
    before = {name: cache.copy() for name, cache in session._caches.items()}
    session._fit = lambda needed: None  # a scheduler that goes beyond the limits
    with pytest.raises(Failure, match=r"6 rows fell beyond the KV cache .* past_len up to 128"):
        session.step(inputs(session.limits.block_size, [Row([5, 6, 7], 3, 128)]))
    for name, cache in session._caches.items():
        np.testing.assert_array_equal(cache, before[name])
