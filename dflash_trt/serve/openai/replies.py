"""Answers, as OpenAI's API has them, with a few fields more. Plain dictionaries, typed for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from typing_extensions import NotRequired, TypedDict

from dflash_trt.runtime.statistics import Statistics

FinishReason = Literal["stop", "length"]


class CompletionDetails(TypedDict):
    """In OpenAI's words: predictions are the drafter's."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Of all answers to a request. `acceptance_length`: tokens a decode step yields; null if there was none."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails
    accepted_draft_tokens: int
    acceptance_length: float | None


class Extra(TypedDict):
    """With return_token_ids."""

    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class ChatMessage(TypedDict):
    """`reasoning` and `reasoning_content` are the same thoughts of a model that tells them apart."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]


class ChatChoice(Extra):
    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: FinishReason


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str


class ChatChunkChoice(Extra):
    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReason | None


class CompletionChoice(Extra):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason | None


class _Reply(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_Reply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(_Reply):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class Completion(_Reply):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    status: Literal["ready"]


def make_usage(prompt_tokens: int, completion_tokens: int, statistics: Sequence[Statistics]) -> Usage:
    """Of answers that have the `statistics`."""
    total = Statistics(statistics[0].block_size)
    for each in statistics:
        total.verified += each.verified
    drafts = sum(held for held, _ in total.drafts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": total.accepted,
            "rejected_prediction_tokens": drafts - total.accepted,
        },
        "accepted_draft_tokens": total.accepted,
        "acceptance_length": total.tau if total.decode_steps else None,
    }
