"""What all routes of a server share."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.runtime.text import Tokenizer
from dflash_trt.serve.loop import EngineLoop
from dflash_trt.serve.metrics import Metrics
from dflash_trt.serve.openai.gate import Gate
from dflash_trt.serve.openai.settings import Settings


@dataclass(frozen=True)
class Front:
    """Made once; belongs to the application."""

    loop: EngineLoop
    tokenizer: Tokenizer | None
    settings: Settings
    gate: Gate
    metrics: Metrics
