"""The way back to one caller of Triton."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from .question import Question
from .unix_http import Part

FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL; Triton completes its module only after this one is imported


class Reply:
    """Sends the parts of an answer: a response each, or for those who want no stream one for all.

    Triton forgets a request with its final response, and crashes when it is asked about one after that: hence the lock.
    """

    def __init__(self, request: Any):
        self._sender = request.get_response_sender()
        self._outputs = frozenset(request.requested_output_names())
        self._lock = threading.Lock()
        self._closed = False
        self._text = ""
        self._ids: list[int] = []

    def gone(self) -> bool:
        """Has the caller left? Costs a message to the server and back."""
        with self._lock:
            return not self._closed and self._sender.is_cancelled()

    def add(self, part: Part, question: Question) -> None:
        """Send `part`, or keep it until the last one."""
        last = part.finish_reason is not None
        self._text += part.text
        self._ids += part.token_ids
        if not (question.stream or last):
            return
        tensors = {"text_output": _text(self._text), "output_ids": np.array(self._ids, np.int32)}
        if last:
            tensors |= {"finish_reason": _text(part.finish_reason), "statistics": _text(_statistics(part))}
        if question.count_input:
            tensors["num_input_tokens"] = np.array([part.prompt_tokens], np.uint32)
        if question.count_output:
            tensors["num_output_tokens"] = np.array([len(self._ids)], np.uint32)
        self._text, self._ids = "", []
        wanted = [pb.Tensor(name, value) for name, value in tensors.items() if name in self._outputs]
        self._send(pb.InferenceResponse(wanted), final=last)

    def repeat(self, prompt: str) -> None:
        """Put `prompt` before the answer."""
        self._text = prompt

    def fail(self, message: str, code: str = "INTERNAL") -> None:
        """End with an error; `code` is one of TritonError's."""
        error = pb.TritonError(plain(message), getattr(pb.TritonError, code))
        self._send(pb.InferenceResponse(error=error), final=True)

    def close(self) -> None:
        """End without another word: there is nobody left to hear it."""
        self._send(None, final=True)

    def _send(self, response: Any, *, final: bool) -> None:
        flags = FINAL if final else 0
        with self._lock:
            if self._closed:
                return
            self._closed = final
            self._sender.send(response, flags) if response else self._sender.send(flags=flags)


def plain(message: str) -> str:
    """Triton takes what is UTF-8; half a character, which JSON and paths may hold, becomes an escape."""
    return message.encode(errors="backslashreplace").decode()


def _statistics(part: Part) -> str:
    usage = part.usage or {}
    names = {"prompt_tokens": "prompt_tokens", "new_tokens": "completion_tokens"}
    names |= {name: name for name in ("accepted_draft_tokens", "acceptance_length")}
    return json.dumps({name: usage.get(theirs) for name, theirs in names.items()})


def _text(value: str | None) -> np.ndarray:
    return np.array([(value or "").encode()], dtype=object)
