"""How the answers of a route are laid out: whole, and chunk by chunk."""

from __future__ import annotations

from typing import Any, Protocol

from dflash_trt.serve.harmony import Splitter
from dflash_trt.serve.openai.answers import Piece
from dflash_trt.serve.openai.replies import ChatChoice, ChatChunkChoice, ChatDelta, ChatMessage, CompletionChoice


class Form(Protocol):
    """Lays out the answers to one request."""

    prefix: str  # of the reply's id
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Any | None:
        """The choice of an answer's first chunk, before there is text; None if there is no such chunk."""
        ...

    def chunk(self, piece: Piece) -> Any:
        """The choice of a chunk."""
        ...

    def whole(self, piece: Piece) -> Any:
        """The choice of a whole answer."""
        ...


class CompletionForm:
    """Text as it is, also where a model tells thoughts from its answer."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> None:
        return None

    def chunk(self, piece: Piece) -> CompletionChoice:
        return self.whole(piece)

    def whole(self, piece: Piece) -> CompletionChoice:
        reason: Any = piece.finish_reason
        return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": reason}


class ChatForm:
    """An assistant's turn; thoughts apart, if the model speaks harmony.

    Clients read thoughts under either of two names: `reasoning_content` is DeepSeek's (SGLang, LiteLLM, LangChain),
    `reasoning` OpenRouter's and, since 2026, vLLM's only one. They get both.
    """

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *, harmony: bool):
        self._harmony = harmony
        self._splitters: dict[int, Splitter] = {}

    def opening(self, index: int) -> ChatChunkChoice:
        delta: ChatDelta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: Piece) -> ChatChunkChoice:
        reasoning, content = self._split(piece)
        delta: ChatDelta = {}
        if reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if content:
            delta |= {"content": content}
        reason: Any = piece.finish_reason
        return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def whole(self, piece: Piece) -> ChatChoice:
        reasoning, content = self._split(piece)
        message: ChatMessage = {"role": "assistant", "content": content, "refusal": None}
        if self._harmony:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        reason: Any = piece.finish_reason
        return {"index": piece.index, "message": message, "logprobs": None, "finish_reason": reason}

    def _split(self, piece: Piece) -> tuple[str, str]:
        """Thoughts and words to the user."""
        if not self._harmony:
            return "", piece.text
        splitter = self._splitters.setdefault(piece.index, Splitter())
        part = splitter.push(piece.text, last=piece.finish_reason is not None)
        return part.reasoning, part.content
