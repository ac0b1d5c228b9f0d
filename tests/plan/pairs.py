"""Models that tests reckon with."""

from __future__ import annotations

from dflash_trt.gpus import Card, read_cards
from dflash_trt.plan.models import Model
from dflash_trt.plan.source import open_model

GPT_OSS = "openai/gpt-oss-120b"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CODER = "Qwen/Qwen3-Coder-30B-A3B-Instruct"


def model(name: str = GPT_OSS) -> Model:
    return open_model(name, None)


def card(name: str = "B300") -> Card:
    return read_cards()[name]
