"""Runs an engine: requests in, a stream of tokens and text out."""

from dflash_trt.engine import Limits
from dflash_trt.runtime.generator import Generator
from dflash_trt.runtime.request import Output, Request, Sampling
from dflash_trt.runtime.session import Session, StepInputs, StepOutputs
from dflash_trt.runtime.statistics import Statistics, Timing
from dflash_trt.runtime.text import Tokenizer

__all__ = [
    "Generator",
    "Limits",
    "Output",
    "Request",
    "Sampling",
    "Session",
    "Statistics",
    "StepInputs",
    "StepOutputs",
    "Timing",
    "Tokenizer",
]
