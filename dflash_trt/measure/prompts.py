"""Prompts for a measurement, as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dflash_trt.errors import UserError
from dflash_trt.runtime import Tokenizer


def read_prompts(file: Path) -> list[str]:
    """A JSON list of strings, or one prompt a line. Raises UserError if there is none."""
    try:
        text = file.read_text(encoding="utf-8")
        prompts = json.loads(text) if file.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    except OSError as error:
        fix = "give a .json list, or a file of one prompt a line"
        raise UserError(f"cannot read the prompts: {error.strerror}", where=file, fix=fix) from None
    except ValueError as error:
        raise UserError(f"the prompts are not valid JSON ({error})", where=file) from None
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) and p for p in prompts):
        fix = 'give a .json list of strings, ["...", "..."], or one prompt a line'
        raise UserError("the file holds no prompts", where=file, fix=fix)
    return prompts


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str], *, raw: bool = False) -> list[list[int]]:
    """Each as a user's turn in the model's chat template, or `raw` as plain text."""
    if raw:
        return [tokenizer.encode(prompt) for prompt in prompts]
    return [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
