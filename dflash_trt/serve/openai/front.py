"""What all routes of a server share: the engine, and what whoever starts the server decides."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field

from dflash_trt.runtime.text import Tokenizer
from dflash_trt.serve.loop import EngineLoop
from dflash_trt.serve.openai.gate import Gate


@dataclass(frozen=True)
class Settings:
    """The served name, and the limits of a request."""

    model: str
    max_body_bytes: int = 1 << 20
    max_prompt_tokens: int | None = None  # None: what the engine holds
    max_n: int = 8  # answers to one prompt
    max_concurrent_per_key: int | None = None  # answers that one API key may wait for at once; None: any number
    log_requests: bool = False  # prompts and answers, too


@dataclass(frozen=True)
class Front:
    """Made once; belongs to the application."""

    loop: EngineLoop
    tokenizer: Tokenizer | None
    settings: Settings
    gate: Gate
    large: Executor  # reads large bodies, one at a time: they must not crowd out small ones
    exchanges: set[object] = field(default_factory=set)  # requests that were accepted and are not yet answered in full
