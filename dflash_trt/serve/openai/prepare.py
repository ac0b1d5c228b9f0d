"""From the body of a request to what the engine is asked. Runs in threads: a long prompt takes a while to tokenize."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_trt.runtime.request import PromptTooLong, Request, Sampling
from dflash_trt.runtime.text import Tokenizer
from dflash_trt.serve.openai.body import read
from dflash_trt.serve.openai.errors import Problem, concerning
from dflash_trt.serve.openai.forms import ChatForm, CompletionForm, Form
from dflash_trt.serve.openai.front import Front
from dflash_trt.serve.openai.schema import Asked, ChatRequest, CompletionRequest, Message

MAX_ANSWERS = 128  # to one request: prompts times n
_COMPLETION = 16  # tokens of a completion, as OpenAI has it
_TINY = 1e-6  # temperature and top_p below it leave the likeliest token alone, and float32 little room


@dataclass(frozen=True)
class Prepared:
    """A request that has been read, and can be submitted."""

    id: str
    form: Form
    param: str  # the field that holds the prompts
    prompts: list[list[int]]
    requests: list[Request]  # n for each prompt
    stream: bool
    include_usage: bool
    return_token_ids: bool


Prepare = Callable[[Front, bytes], Prepared]


def prepare_chat(front: Front, body: bytes) -> Prepared:
    """Raises Problem or DflashError."""
    asked = read(body, ChatRequest)
    _check(front, asked, "messages", 1)
    tokenizer = _need_tokenizer(front, "messages")
    variables = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort:
        variables["reasoning_effort"] = asked.reasoning_effort
    messages = [_turn(message, tokenizer.harmony) for message in asked.messages]
    try:
        with concerning("messages"):
            prompt = tokenizer.encode_chat(messages, **variables)
    except Problem:
        raise
    except Exception as error:
        if not variables:
            raise
        what, names = f"the chat template fails with them: {type(error).__name__}", ", ".join(sorted(variables))
        message = f"{what} — {names} — leave them out, or give what the model's template expects"
        raise Problem(400, "invalid_value", message, param="chat_template_kwargs") from None
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    return _prepare(front, asked, "messages", [prompt], ChatForm(harmony=tokenizer.harmony), max_tokens, None)


def prepare_completion(front: Front, body: bytes) -> Prepared:
    """Raises Problem or DflashError."""
    asked = read(body, CompletionRequest)
    _check(front, asked, "prompt", len(asked.prompt))
    with concerning("prompt"):
        prompts = [
            _need_tokenizer(front, "prompt").encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in asked.prompt
        ]
    return _prepare(front, asked, "prompt", prompts, CompletionForm(), asked.max_tokens, _COMPLETION)


def _check(front: Front, asked: Asked, param: str, prompts: int) -> None:
    """What can be known before anything is tokenized."""
    settings, count = front.settings, asked.n or 1
    if asked.model not in (None, settings.model):
        message = f"there is no model {asked.model[:100]!r} — model — this server has {settings.model}, or leave it out"
        raise Problem(404, "model_not_found", message, param="model")
    if count > settings.max_n:
        message = f"n is {count} — request — ask for {settings.max_n} at most, or start the server with --max-n"
        raise Problem(400, "invalid_value", message, param="n")
    if asked.stop and front.tokenizer is None:
        message = "the engine has no tokenizer to find strings with — stop — give stop_token_ids"
        raise Problem(400, "invalid_value", message, param="stop")
    most = min(MAX_ANSWERS, front.loop.capacity)
    if prompts * count > most:
        message = f"{prompts} prompts with {count} answers each are too many — request — {most} answers at most"
        raise Problem(400, "invalid_value", message, param=param)


def _need_tokenizer(front: Front, param: str) -> Tokenizer:
    if front.tokenizer is None:
        message = f"the engine has no tokenizer — {param} — send token ids to /v1/completions"
        raise Problem(400, "invalid_value", message, param=param)
    return front.tokenizer


def _turn(message: Message, harmony: bool) -> dict[str, Any]:
    """For the chat template. Only harmony's knows developers; to other models they are the system."""
    role = "system" if message.role == "developer" and not harmony else message.role
    turn = {"role": role, "content": message.content or ""}
    thoughts = message.reasoning_content or message.reasoning
    return (
        turn | ({"name": message.name} if message.name else {}) | ({"reasoning_content": thoughts} if thoughts else {})
    )


def _prepare(
    front: Front,
    asked: Asked,
    param: str,
    prompts: list[list[int]],
    form: Form,
    max_tokens: int | None,
    default: int | None,
) -> Prepared:
    """`default` tokens at most, where the request leaves it open and they fit; None: as many as fit."""
    name, count = f"{form.prefix}-{secrets.token_hex(12)}", asked.n or 1
    requests: list[Request] = []
    for prompt in prompts:
        with concerning(param):
            left = _room(front, prompt, param)
        ids = np.array(prompt, np.int64)  # here and once: the rest happens between the steps of other requests
        if max_tokens and max_tokens > left:
            what = f"{len(prompt)} prompt tokens and max_tokens {max_tokens} exceed the engine's max_seq_len"
            message = f"{what} {left + len(prompt)} — max_tokens — ask for fewer, or shorten the prompt"
            raise Problem(400, "context_length_exceeded", message, param="max_tokens")
        length = max_tokens or (min(default, left) if default else left)
        requests += [
            Request(
                ids,
                length,
                _sampling(asked, number),
                stop_token_ids=tuple(asked.stop_token_ids or ()),
                ignore_eos=bool(asked.ignore_eos),
                stop=asked.stop,
                id=f"{name}-{len(requests) + number}",
            )
            for number in range(count)
        ]
    stream, options = bool(asked.stream), asked.stream_options
    usage = not stream or bool(options and options.include_usage)
    return Prepared(name, form, param, prompts, requests, stream, usage, bool(asked.return_token_ids))


def _room(front: Front, prompt: list[int], param: str) -> int:
    """Tokens that fit behind the prompt. Raises PromptTooLong."""
    most, engine = front.settings.max_prompt_tokens, front.loop.limits.max_seq_len
    if most is not None and len(prompt) > most:
        what = f"the prompt has {len(prompt)} tokens, and this server takes {most}"
        raise PromptTooLong(what, where=param, fix="shorten it, or start the server with --max-prompt-tokens")
    if len(prompt) >= engine:
        what = f"the prompt has {len(prompt)} tokens, and prompt and answer together may have {engine}"
        raise PromptTooLong(what, where=param, fix="shorten it, or convert again with a larger --max-seq-len")
    return engine - len(prompt)


def _sampling(asked: Asked, number: int) -> Sampling:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    if temperature < _TINY or top_p < _TINY:
        return Sampling()
    seed = secrets.randbits(64) if asked.seed is None else asked.seed
    return Sampling(temperature, top_p, max(asked.top_k or 0, 0), (seed + number) % 2**64)
