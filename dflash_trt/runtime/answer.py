"""The text of one answer as its tokens come, up to where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_trt.runtime.text import TextStream, Tokenizer


class Answer:
    """Turns the tokens of one request into what its caller gets.

    Text that may be the beginning of a stop string waits until it is known not to be one. Tokens are taken one by one
    then, so the token that completes a stop string is the last, however many of them a step brought.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()):
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._stop = stop
        self._held = ""  # decoded, but perhaps the beginning of a stop string
        self.ended = False  # by a stop string

    def push(self, tokens: Sequence[int], *, last: bool = False) -> tuple[tuple[int, ...], str] | None:
        """Those of `tokens` that count, and the text that is certain with them; None once a stop string was found."""
        if self.ended:
            return None
        if self._stream is None:
            return tuple(tokens), ""
        if not self._stop:
            return tuple(tokens), self._stream.push(tokens, last=last)
        for count, token in enumerate(tokens, 1):
            if self._find_stop(self._stream.push([token])):
                return tuple(tokens[:count]), self._release(len(self._held))
        if last and self._find_stop(self._stream.push([], last=True)):
            return tuple(tokens), self._release(len(self._held))
        return tuple(tokens), self._release(len(self._held) - (0 if last else self._pending()))

    def _find_stop(self, text: str) -> bool:
        """Take in `text`; if a stop string is complete, drop it and what follows."""
        self._held += text
        begins = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if begins:
            self._held = self._held[: min(begins)]
            self.ended = True
        return self.ended

    def _pending(self) -> int:
        """Characters at the end of the held text with which a stop string begins."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text
