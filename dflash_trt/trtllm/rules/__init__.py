"""The rules of preflight, by topic; each enters itself in the table."""

from __future__ import annotations

from dflash_trt.trtllm.rules import attention, block, features, memory, pair, parallel, precision, setup
from dflash_trt.trtllm.rules.table import RULES, Rule

__all__ = ["RULES", "Rule", "attention", "block", "features", "memory", "pair", "parallel", "precision", "setup"]
