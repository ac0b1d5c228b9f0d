"""Pairs for these tests: eight heads, so that eight ranks have one each, in floats and in NVFP4."""

from __future__ import annotations

import shutil
from pathlib import Path

from dflash_trt.quantize import PRESETS, make_plan, write_checkpoint
from tests.tiny import make_pair

EIGHT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 384,
    "vocab_size": 251,
}
EIGHT_DRAFT = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 256}


def make(root: Path, base: str, **options: object) -> tuple[Path, Path]:
    """A target with two key/value heads and a drafter with four, 251 tokens; the last mask id is 250."""
    target = EIGHT | dict(options.pop("target_config", {}))
    draft = EIGHT_DRAFT | dict(options.pop("draft_config", {}))
    return make_pair(root, base, target_config=target, draft_config=draft, **options)


def quantized(source: Path, output: Path, preset: str = "nvfp4", include: tuple[str, ...] = ()) -> Path:
    """A copy in NVFP4, scales tied as `dflash-trt quantize` ties them; every input up to 8."""
    if output.exists():
        shutil.rmtree(output)
    write_checkpoint(make_plan(source, PRESETS[preset], list(include)), output, None, input_amax=8.0)
    return output
