"""gpt-oss's answers: several messages on named channels, told apart by special tokens that stay in the text.

    <|channel|>analysis<|message|>Thoughts.<|end|><|start|>assistant<|channel|>final<|message|>The answer.

`analysis` is thinking. `final` is the answer, and so is `commentary` without a recipient, which the format uses for
words to the user before a tool call. A message to a recipient (`to=functions.f`) is a tool call; nobody has offered the
model tools here, so it counts as thinking. Only the text is looked at: a model that spells a marker out of ordinary
tokens is taken at its word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_trt.runtime.text import CHANNEL

_BODY = "<|message|>"
_OPENS = ("<|start|>", CHANNEL)  # the next header, if the model has left out <|end|>
_ENDS = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_MARKERS = (_BODY, "<|end|>", "<|return|>", "<|call|>", "<|start|>", CHANNEL, "<|constrain|>")
_HEADER = 256  # characters; a header of the format has fewer than a hundred


@dataclass(frozen=True)
class Split:
    """What some text of an answer adds to its thinking and to what the user is told."""

    reasoning: str
    content: str


class Splitter:
    """Takes one answer apart as it comes. The pieces add up to the same, however the text is cut.

    An answer without any structure is all content, so a prompt that was not laid out by the chat template gets its
    text as it is.
    """

    def __init__(self) -> None:
        self._text = ""  # not yet decided
        self._channel: str | None = None  # "reasoning" or "content"; None in a header
        self._said = {"reasoning": False, "content": False}  # whether a message of the kind has had text
        self._separate = False  # whether the message's first text follows another message of its kind

    def push(self, text: str, *, last: bool = False) -> Split:
        """What `text` makes certain; all that is left if it is the last."""
        self._text += text
        got: dict[str, list[str]] = {"reasoning": [], "content": []}
        while self._text and (self._body(got, last) if self._channel else self._header(got, last)):
            pass
        return Split("".join(got["reasoning"]), "".join(got["content"]))

    def _header(self, got: dict[str, list[str]], last: bool) -> bool:
        """Read up to where a message begins. True if something was settled."""
        head, body, _ = self._text[: _HEADER + len(_BODY)].partition(_BODY)
        if body:
            self._begin(_kind(head), self._text[len(head) + len(body) :])
            return True
        if not last and len(self._text) < _HEADER + len(_BODY):
            return False
        if any(marker in head for marker in _MARKERS) or not head.strip():
            self._text = self._text[_HEADER:]  # cut short, or nothing the format knows
        else:
            self._begin("content", self._text)  # no structure at all
        return True

    def _body(self, got: dict[str, list[str]], last: bool) -> bool:
        """Read up to where a message ends. True if it did."""
        end = _ENDS.search(self._text)
        if end:
            certain, self._text = self._text[: end.start()], self._text[end.end() :]
        else:
            keep = 0 if last else _beginning_of_marker(self._text)
            certain, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        assert self._channel is not None
        if certain:
            got[self._channel].append("\n" + certain if self._separate else certain)
            self._separate, self._said[self._channel] = False, True
        if end:
            self._channel = None
            if end[0] in _OPENS:
                self._text = end[0] + self._text
        return end is not None

    def _begin(self, kind: str, text: str) -> None:
        self._channel, self._text, self._separate = kind, text, self._said[kind]


def _kind(header: str) -> str:
    """Of a message with the header, e.g. `assistant<|channel|>commentary to=functions.f <|constrain|>json`."""
    thinking = re.search(r"<\|channel\|>\s*analysis\b", header) or re.search(r"\bto=", header)
    return "reasoning" if thinking else "content"


def _beginning_of_marker(text: str) -> int:
    """Characters at the end of `text` with which a marker may begin."""
    at = text.rfind("<", -max(map(len, _MARKERS)))
    return len(text) - at if at >= 0 and any(marker.startswith(text[at:]) for marker in _MARKERS) else 0
