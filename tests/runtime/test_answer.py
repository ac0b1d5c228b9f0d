"""Stop strings, however the tokens come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.answer import Answer


class Bytes:
    """Token n is the byte n: a character may take several."""

    vocab = 256

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


texts = st.text("abé", max_size=30)
stops = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


def cut(text: str, stop: list[str]) -> tuple[str, int | None]:
    """What `stop` leaves of the text, and up to which character it was read; by definition, character by character."""
    for end in range(1, len(text) + 1):
        begins = [text[:end].find(word) for word in stop if word in text[:end]]
        if begins:
            return text[: min(begins)], end
    return text, None


@given(texts, stops, st.lists(st.integers(1, 7)))
def test_the_text_ends_before_the_first_stop_string_whatever_the_steps_bring(text, stop, sizes):
    tokens, answer = list(text.encode()), Answer(Bytes(), stop)  # type: ignore[arg-type]
    got_text, got_tokens = "", []
    pending = list(tokens)
    while pending:
        size = sizes.pop() if sizes else 1
        step, pending = pending[:size], pending[size:]
        brought = answer.push(step, last=not pending)
        if brought is None:
            break
        got_tokens += brought[0]
        got_text += brought[1]
        assert text.startswith(got_text)
    expected, end = cut(text, stop)
    assert got_text == expected and answer.ended == (end is not None)
    assert got_tokens == list(text[:end].encode())


def test_text_that_begins_like_a_stop_string_waits_and_then_comes():
    answer = Answer(Bytes(), ["abc"])  # type: ignore[arg-type]
    assert answer.push(list(b"xab")) == (tuple(b"xab"), "x")
    assert answer.push(list(b"ab")) == (tuple(b"ab"), "ab")
    assert answer.push([], last=True) == ((), "ab")
    assert not answer.ended


def test_nothing_comes_after_a_stop_string():
    answer = Answer(Bytes(), ["b"])  # type: ignore[arg-type]
    assert answer.push(list(b"abc")) == (tuple(b"ab"), "a")
    assert answer.push(list(b"d"), last=True) is None
