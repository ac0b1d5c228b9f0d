"""Calibration text: the built-in set or a file, as token ids of the target.

    --calib builtin      64 short prompts with answers, of many kinds (prompts.json)
    --calib FILE.jsonl   a line: {"prompt": …}, {"text": …}, {"messages": […]}, or the list of messages itself
    --calib FILE.json    a list of strings (prompts), or of what a .jsonl line holds
    --calib FILE         any other file: plain text, paragraphs between blank lines

Prompts and messages are laid out by the target's chat template if it has one; `text` and paragraphs are left alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash_trt.errors import UserError

BUILTIN = "builtin"
LEAST_TOKENS = 256  # over all texts; fewer say nothing about the range of activations
FORMS = '{"prompt": "…"}, {"text": "…"}, {"messages": […]} or [{"role": "user", "content": "…"}, …]'


@dataclass(frozen=True)
class Sample:
    """A conversation, or plain text."""

    where: str  # for messages: file and line
    messages: tuple[dict[str, str], ...] = ()
    text: str = ""


def read_samples(calib: str) -> list[Sample]:
    """The samples of a file, or of the built-in set. Raises UserError naming file and line, and for an empty file."""
    if calib == BUILTIN:
        entries = json.loads(files(__package__).joinpath("prompts.json").read_text("utf-8"))
        return [_conversation(entry["prompt"], entry["answer"]) for entry in entries]
    file = Path(calib)
    try:
        text = file.read_text("utf-8-sig")
    except OSError as error:
        fix = f"give a .jsonl, .json or text file, or `{BUILTIN}`"
        raise UserError(f"cannot read the calibration text: {error.strerror}", where=file, fix=fix) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        what = f"the calibration text is not UTF-8 (byte {error.object[error.start]:#04x})"
        raise UserError(what, where=f"{file}, line {line}", fix="save it as UTF-8") from None
    reader = {".jsonl": _read_jsonl, ".json": _read_json}.get(file.suffix.lower(), _read_paragraphs)
    samples = list(reader(file, text))
    if not samples:
        raise UserError("the calibration text is empty", where=file, fix=f"give more text, or `--calib {BUILTIN}`")
    for sample in samples:
        _check_characters(sample)
    return samples


def encode_samples(
    samples: Sequence[Sample], tokenizer: Any, *, count: int, length: int, seed: int, where: str = BUILTIN
) -> list[list[int]]:
    """At most `count` texts of at most `length` tokens, the same ones for the same seed, in the order of the file.

    Longer samples are cut into several texts. `tokenizer` is transformers'. Raises UserError if there is too little.
    """
    order = list(range(len(samples)))
    random.Random(seed).shuffle(order)
    texts: list[tuple[int, int, list[int]]] = []
    for number in order:
        ids = _encode(samples[number], tokenizer)
        texts += [(number, begin, ids[begin : begin + length]) for begin in range(0, len(ids), length)]
        if len(texts) >= count:
            break
    chosen = [ids for _, _, ids in sorted(texts[:count])]
    if (tokens := sum(map(len, chosen))) < LEAST_TOKENS:
        raise UserError(
            f"the calibration text has {tokens} tokens, at least {LEAST_TOKENS} are needed",
            where=where,
            fix="give more text, or raise --calib-samples and --calib-length",
        )
    return chosen


def _encode(sample: Sample, tokenizer: Any) -> list[int]:
    if not sample.messages:
        return tokenizer(sample.text, verbose=False)["input_ids"]
    if not tokenizer.chat_template:
        return tokenizer("\n\n".join(turn["content"] for turn in sample.messages), verbose=False)["input_ids"]
    try:
        laid_out = tokenizer.apply_chat_template(
            list(sample.messages),
            tokenize=False,
            add_generation_prompt=sample.messages[-1]["role"] != "assistant",
        )
    except Exception as error:  # whatever a template raises, jinja2's errors and plain ones
        what = f"the target's chat template refuses the messages ({error})"
        raise UserError(what, where=sample.where, fix='change the turns, or give {"text": "…"}') from None
    return tokenizer(laid_out, add_special_tokens=False, verbose=False)["input_ids"]


def _conversation(prompt: str, answer: str | None = None, where: str = BUILTIN) -> Sample:
    turns = [("user", prompt)] + ([("assistant", answer)] if answer else [])
    return Sample(where, tuple({"role": role, "content": content} for role, content in turns))


def _read_jsonl(file: Path, text: str) -> Iterator[Sample]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{file}, line {number}"
            yield _sample(_parse(line, where), where)


def _read_json(file: Path, text: str) -> Iterator[Sample]:
    entries = _parse(text, str(file)) if text.strip() else []
    if not isinstance(entries, list):
        raise UserError("the calibration text is not a JSON list", where=file, fix='give ["a prompt", …]')
    for number, entry in enumerate(entries, 1):
        yield _sample(entry, f"{file}, entry {number}")


def _read_paragraphs(file: Path, text: str) -> Iterator[Sample]:
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.strip():
            yield Sample(str(file), text=paragraph.strip())


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not valid JSON ({error})", where=where, fix=f"each entry is one of {FORMS}") from None


def _sample(entry: Any, where: str) -> Sample:
    match entry:
        case str() if entry.strip():
            return _conversation(entry, where=where)
        case list():
            return _messages(entry, where)
        case {"messages": list(turns)}:
            return _messages(turns, where)
        case {"prompt": str(prompt)} if prompt.strip():
            return _conversation(prompt, where=where)
        case {"text": str(text)} if text.strip():
            return Sample(where, text=text)
    keys = f"the keys {', '.join(map(repr, entry)) or 'none'}" if isinstance(entry, dict) else repr(entry)[:60]
    raise UserError(f"no calibration text here: {keys}", where=where, fix=f"each entry is one of {FORMS}")


def _check_characters(sample: Sample) -> None:
    """JSON can spell halves of a surrogate pair, at which tokenizers stop."""
    for text in (sample.text, *(turn["content"] for turn in sample.messages)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(text[error.start]):04x}"
            fix = "write both halves, or the character itself"
            raise UserError(f"{half} is half a character", where=sample.where, fix=fix) from None


def _messages(turns: list[Any], where: str) -> Sample:
    if not turns or not all(map(_is_turn, turns)):
        fix = 'each is {"role": "user" or "assistant", "content": "TEXT"}'
        raise UserError("the messages cannot be read", where=where, fix=fix)
    return Sample(where, tuple({"role": turn["role"], "content": turn["content"]} for turn in turns))


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content"))
