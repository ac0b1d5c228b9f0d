"""Requests, as OpenAI's API has them, with a few fields more.

Every field of that API is known: it has its effect, or it has none on the answer, or values that would have one are
refused by name. Other fields are refused, too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from dflash_trt.runtime.request import MAX_TOP_K
from dflash_trt.serve.openai.fields import MAX_ID, Count, Id, Ignored, Known, Only, refused

_MAX_STOPS = 16  # strings; OpenAI takes 4
_TEMPLATE_NAMES = ("messages", "tools", "documents", "add_generation_prompt")  # what a chat template gets from us

_NO_LOGPROBS = "leave it out: the engine's step returns tokens, not probabilities"
_NO_TOOLS = "leave it out, and say in a message what the answer should look like"
_NO_PENALTY = "leave it out, and use temperature, top_p or top_k"
_ONLY_TEXT = "send and expect text alone"


class TextPart(Known):
    """Some text of a message."""

    type: Literal["text"]
    text: str


def _read_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise refused("invalid_value", "it must be a string or a list of strings, none of them empty")
    if len(stops) > _MAX_STOPS:
        raise refused("invalid_value", f"these are {len(stops)} strings; give {_MAX_STOPS} at most")
    return tuple(stops)


def _read_role(value: Any) -> str:
    if value in ("tool", "function"):
        raise refused("unsupported_parameter", "tools are not supported; send roles system, user and assistant")
    if value not in ("developer", "system", "user", "assistant"):
        raise refused("invalid_value", "it must be developer, system, user or assistant")
    return value


def _read_content(value: Any) -> str | None:
    """Text, or parts of type text; these become lines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused("invalid_type", "it must be a string or a list of parts")
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in ("image_url", "input_audio", "file", "refusal"):
            raise refused("unsupported_parameter", f"part {number} is not text but {kind}; {_ONLY_TEXT}")
        if kind != "text" or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise refused("invalid_value", f'part {number} must be {{"type": "text", "text": "…"}}')
    return "\n".join(part["text"] for part in value)


def _read_prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each text or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if value and all(isinstance(prompt, str) for prompt in value):
            return value
        if value and all(isinstance(prompt, list) and _are_ids(prompt) for prompt in value):
            return value
        if _are_ids(value):  # an empty list, too: that one has no tokens
            return [value]
    must = "a string, a list of token ids, a list of strings, or a list of lists of token ids"
    raise refused("invalid_value", f"it must be {must}; ids lie between 0 and {MAX_ID}")


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_ID for value in values)


_Stop = Annotated[str, Field(min_length=1)]
_Stops = _Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS)] | None
_Role = Literal["developer", "system", "user", "assistant"]
_Prompts = str | list[str] | list[Id] | list[list[Id]]


class StreamOptions(Known):
    """How a stream ends."""

    include_usage: bool | None = Field(None, description="End with a chunk that holds the usage.")
    include_obfuscation: Ignored = None


class Asked(Known):
    """What chat and completions have in common."""

    model: str | None = Field(None, description="The served model; may be left out.")
    max_tokens: Count | None = Field(None, description="Tokens of the answer at most.")
    temperature: float | None = Field(None, ge=0, le=2, description="0: greedy. Default: 1.")
    top_p: float | None = Field(
        None, ge=0, le=1, description="Draw from the likeliest tokens of this share. Default: 1."
    )
    n: Count | None = Field(None, description="Answers to a prompt; answer i is drawn with seed + i.")
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="The same seed gives the same answer.")
    stop: Annotated[tuple[str, ...], PlainValidator(_read_stops, json_schema_input_type=_Stops)] = Field(
        (), description="Strings before which the answer ends."
    )
    stream: bool | None = Field(None, description="Send the answer as it comes, as server-sent events.")
    stream_options: StreamOptions | None = None
    # more than OpenAI's API has
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K, description="Draw from so many tokens. 0 and -1: from all.")
    ignore_eos: bool | None = Field(None, description="Go on past the model's own end of an answer.")
    stop_token_ids: list[Id] | None = Field(None, max_length=1024, description="Tokens that end the answer, too.")
    return_token_ids: bool | None = Field(None, description="Add token_ids and, once, prompt_token_ids to a choice.")
    # known, and not supported
    frequency_penalty: Annotated[Any, Only(0, instead=_NO_PENALTY)] = None
    presence_penalty: Annotated[Any, Only(0, instead=_NO_PENALTY)] = None
    logit_bias: Annotated[Any, Only({}, instead="leave it out; stop_token_ids ends an answer at a token")] = None
    user: Ignored = None

    @model_validator(mode="after")
    def _agrees(self) -> Asked:
        if self.stream_options and not self.stream:
            raise refused("invalid_value", "it needs stream: true", field="stream_options")
        return self


class CompletionRequest(Asked):
    """POST /v1/completions"""

    prompt: Annotated[list[str | list[int]], PlainValidator(_read_prompts, json_schema_input_type=_Prompts)] = Field(
        description="Taken as it is, without a chat template."
    )
    # known, and not supported
    best_of: Annotated[Any, Only(1, instead="use n, and choose among the answers")] = None
    echo: Annotated[Any, Only(False, instead="put the prompt before the answer yourself")] = None
    logprobs: Annotated[Any, Only(instead=_NO_LOGPROBS)] = None
    suffix: Annotated[Any, Only("", instead="leave it out: the model continues text, it does not fill gaps")] = None


class Message(Known):
    """One turn of a conversation."""

    role: Annotated[str, PlainValidator(_read_role, json_schema_input_type=_Role)]
    content: Annotated[
        str | None, PlainValidator(_read_content, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    reasoning_content: str | None = Field(None, description="What an assistant thought before.")
    reasoning: str | None = Field(None, description="The same, as other servers call it.")
    # an assistant's message as answers hold it; known, and not supported
    tool_calls: Annotated[Any, Only([], instead=_NO_TOOLS)] = None
    function_call: Annotated[Any, Only(instead=_NO_TOOLS)] = None
    audio: Annotated[Any, Only(instead=_ONLY_TEXT)] = None
    refusal: Ignored = None
    annotations: Ignored = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise refused("invalid_value", f"a message of the role {self.role} needs it", field="content")
        return self


class ChatRequest(Asked):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens.")
    reasoning_effort: Literal["low", "medium", "high"] | None = Field(None, description="For the chat template.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description='Other variables of the chat template, e.g. {"enable_thinking": false}; no lists or objects.'
    )
    # known, and not supported
    audio: Annotated[Any, Only(instead=_ONLY_TEXT)] = None
    function_call: Annotated[Any, Only("none", "auto", instead=_NO_TOOLS)] = None
    functions: Annotated[Any, Only([], instead=_NO_TOOLS)] = None
    logprobs: Annotated[Any, Only(False, instead=_NO_LOGPROBS)] = None
    modalities: Annotated[Any, Only(["text"], instead=_ONLY_TEXT)] = None
    moderation: Annotated[Any, Only(instead="leave it out; nothing is moderated here")] = None
    response_format: Annotated[Any, Only({"type": "text"}, instead=_NO_TOOLS)] = None
    tool_choice: Annotated[Any, Only("none", "auto", instead=_NO_TOOLS)] = None
    tools: Annotated[Any, Only([], instead=_NO_TOOLS)] = None
    top_logprobs: Annotated[Any, Only(0, instead=_NO_LOGPROBS)] = None
    verbosity: Annotated[Any, Only("medium", instead="say in a message how long the answer should be")] = None
    web_search_options: Annotated[Any, Only(instead="leave it out; the model has no access to the web")] = None
    # of no consequence here
    metadata: Ignored = None
    parallel_tool_calls: Ignored = None
    prediction: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None

    @model_validator(mode="after")
    def _is_possible(self) -> ChatRequest:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise refused("invalid_value", "it differs from max_completion_tokens; give one", field="max_tokens")
        for name, value in (self.chat_template_kwargs or {}).items():
            if name in _TEMPLATE_NAMES or name.endswith("_token") or isinstance(value, (list, dict)):
                what = f"{name[:40]} is no variable that a caller may set so; leave it out"
                raise refused("invalid_value", what, field="chat_template_kwargs")
        return self
