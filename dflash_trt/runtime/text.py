"""Between text and token ids, for any model that ships a tokenizer.json.

Needs `tokenizers` and `jinja2` alone; transformers' tokenizers add nothing that serving uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dflash_trt.errors import UserError
from dflash_trt.runtime.chat import ChatTemplate

CHANNEL = "<|channel|>"  # a special token of harmony, gpt-oss's format
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what decoders put for bytes that are no character (yet)


class Tokenizer:
    """The tokenizer of an engine directory or checkpoint. Raises UserError if its files are missing or broken."""

    def __init__(self, directory: Path):
        self._path = path = directory / "tokenizer.json"
        if not path.is_file():
            raise UserError("there is no tokenizer", where=path, fix="copy the target's tokenizer.json there")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"the tokenizer cannot be read: {error}", where=path) from None
        self.vocab: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._chat = ChatTemplate.read(directory)
        # In harmony only special tokens tell thoughts from the answer, so there they stay in the text.
        self.harmony: bool = self._tokenizer.token_to_id(CHANNEL) is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of plain text, with the `special` tokens the tokenizer puts around a text, e.g. bos.

        Raises UserError if the text has no UTF-8 form (half of a surrogate pair).
        """
        try:
            # Unlike `encode`, this lets other threads run meanwhile: a long text takes the better part of a second.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        except (TypeError, UnicodeEncodeError):
            fix = "send valid Unicode: no halves of surrogate pairs"
            raise UserError("the text cannot be encoded", where="prompt", fix=fix) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens have none, except harmony's, which structure an answer."""
        return self._tokenizer.decode(ids, skip_special_tokens=not self.harmony)

    def encode_chat(self, messages: Iterable[dict[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template, up to where the assistant answers.

        `messages` are of the form {"role": "user", "content": "…"}; `variables` are the template's own, e.g. `tools`.
        Raises UserError if the model has no template or the template refuses the messages.
        """
        if self._chat is None:
            raise UserError("the model has no chat template", where=self._path.parent, fix="give plain text (--raw)")
        return self.encode(self._chat.render(messages, **variables), special=False)


class TextStream:
    """Turns the tokens of one answer into text as they come.

    The pieces add up to the decoded whole. None ends inside a character: byte-level tokens may split one, so trailing
    bytes that are no character yet wait for the next token. Each piece is decoded behind the tokens of the one before,
    for decoders treat the start of a text differently (SentencePiece drops its space).
    """

    def __init__(self, tokenizer: Tokenizer):
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._settled = 0  # tokens of the window whose text was out before the last push
        self._sent = 0  # characters of the window's text that are out

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that `tokens` complete; all that is left if they are the last."""
        self._window += tokens
        text = self._decode(self._window)
        ready = text if last else text.rstrip(_INCOMPLETE)
        piece = ready[self._sent :]
        self._sent += len(piece)
        if piece and ready == text:
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._sent = len(self._decode(self._window))
        return piece
