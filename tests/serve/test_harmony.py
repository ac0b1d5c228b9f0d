"""gpt-oss's messages become thoughts and answer, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.serve.harmony import Splitter

THOUGHT = "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four."
MARKERS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
WORDS = [
    *MARKERS,
    "assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    "x",
    "<",
    "<|",
    "|>",
    "\n",
    " " * 100,
]


def split(*pieces: str) -> tuple[str, str]:
    """Thoughts and answer."""
    splitter = Splitter()
    parts = [splitter.push(piece) for piece in pieces] + [splitter.push("", last=True)]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (THOUGHT + FINAL, "I think.", "Four."),
        (THOUGHT + FINAL + "<|return|>", "I think.", "Four."),
        (FINAL, "", "Four."),
        (THOUGHT + THOUGHT + FINAL, "I think.\nI think.", "Four."),
        (
            THOUGHT + "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant" + FINAL,
            "I think.",
            "Wait.\nFour.",
        ),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", "{}", ""),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", "{}", ""),
        ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
        ("<|message|>Four.", "", "Four."),
        ("<|channel|>analysis<|message|>I think.<|channel|>final<|message|>Four.", "I think.", "Four."),
        (
            "<|channel|>analysis<|message|>I think.<|start|>assistant<|channel|>final<|message|>Four.",
            "I think.",
            "Four.",
        ),
        ("<|channel|>analysis<|message|>1 < 2 <| 3", "1 < 2 <| 3", ""),
        (THOUGHT, "I think.", ""),
        (THOUGHT + "<|channel|>fin", "I think.", ""),
        ("Four.", "", "Four."),
        ("F" * 1000, "", "F" * 1000),
        ("<|channel|>" + "x" * 1000 + "<|message|>Four.", "", "x" * 755 + "<|message|>Four."),
        ("", "", ""),
        ("\n", "", ""),
    ],
)
def test_messages_are_told_apart(text, reasoning, content):
    assert split(text) == split(*text) == (reasoning, content)


@given(st.lists(st.sampled_from(WORDS), max_size=30).map("".join), st.data())
def test_the_split_does_not_depend_on_how_the_text_is_cut(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    assert split(*(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))) == split(text)
    whole = Splitter().push(text, last=True)
    assert (whole.reasoning, whole.content) == split(text)


@given(
    st.text(st.characters(exclude_characters="<"), max_size=50),
    st.text(st.characters(exclude_characters="<"), max_size=50),
)
def test_nothing_that_is_said_gets_lost(thought, answer):
    text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{answer}"
    assert split(text) == (thought, answer)


def test_what_is_certain_is_out_at_once():
    splitter = Splitter()
    assert splitter.push("<|channel|>analysis<|message|>I th").reasoning == "I th"
    assert splitter.push("ink <").reasoning == "ink "
    assert splitter.push("3<|end|>").reasoning == "<3"
    assert splitter.push("<|start|>assistant<|channel|>final<|message|>F").content == "F"
