"""Calibration text: what is read, how it is laid out, and what is refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.errors import UserError
from dflash_trt.quantize.text import LEAST_TOKENS, Sample, encode_samples, read_samples

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}


class Letters:
    """A tokenizer of transformers' shape: a token is a character, with a start token around plain text."""

    chat_template: str | None = "…"

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": ([1] if add_special_tokens else []) + [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        if messages[0]["role"] == "system":
            raise ValueError("no system turns here")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt


class Plain(Letters):
    chat_template = None


def encode(samples: list[Sample], tokenizer: Letters, **options: int) -> list[str]:
    texts = encode_samples(samples, tokenizer, **{"count": 64, "length": 512, "seed": 0} | options)
    return ["".join(map(chr, ids)) for ids in texts]


def write(tmp_path: Path, name: str, content: str | bytes) -> str:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


LONG = "x" * LEAST_TOKENS


def test_the_built_in_set_has_64_conversations_of_many_tokens():
    samples = read_samples("builtin")
    assert len(samples) == 64
    assert all([turn["role"] for turn in sample.messages] == ["user", "assistant"] for sample in samples)
    assert len({sample.messages[0]["content"] for sample in samples}) == 64
    assert sum(map(len, encode(samples, Letters()))) > 10_000


@pytest.mark.parametrize(
    "entry, laid_out",
    [
        ({"prompt": "Hello"}, "<user>Hello<assistant>"),
        ("Hello", "<user>Hello<assistant>"),
        ({"messages": [USER, ANSWER]}, "<user>Hello<assistant>Hi"),
        ([USER], "<user>Hello<assistant>"),
        ({"text": "Hello", "id": 7}, "\x01Hello"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_every_form_of_entry_is_laid_out(entry, laid_out, suffix, tmp_path):
    entries = [entry, {"text": LONG}]
    lines = json.dumps(entries) if suffix == "json" else "\n\n".join(map(json.dumps, entries)) + "\r\n"
    samples = read_samples(write(tmp_path, f"text.{suffix}", lines))
    assert encode(samples, Letters()) == [laid_out, f"\x01{LONG}"]


def test_paragraphs_of_plain_text_are_texts(tmp_path):
    samples = read_samples(write(tmp_path, "text.md", f"\ufeffone\nmore\n \n\n{LONG}\n"))
    assert encode(samples, Letters()) == ["\x01one\nmore", f"\x01{LONG}"]


def test_without_a_template_the_turns_are_joined(tmp_path):
    samples = read_samples(write(tmp_path, "text.json", json.dumps([[USER, ANSWER], {"text": LONG}])))
    assert encode(samples, Plain())[0] == "\x01Hello\n\nHi"


def test_long_texts_are_cut_and_nothing_is_lost():
    texts = encode([Sample("here", text="abc" * 200)], Letters(), length=100)
    assert [len(text) for text in texts] == [100] * 6 + [1]
    assert "".join(texts) == "\x01" + "abc" * 200


def test_the_seed_chooses_and_the_order_stays():
    samples = [Sample("here", text=chr(100 + n) * 300) for n in range(20)]
    first, again, other = (encode(samples, Letters(), count=5, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first == sorted(first) and len(first) == 5


@pytest.mark.parametrize(
    "name, content, where, what",
    [
        ("empty.txt", " \n\n ", "empty.txt", "empty"),
        ("empty.jsonl", "\n", "empty.jsonl", "empty"),
        ("empty.json", "", "empty.json", "empty"),
        ("none.json", "[]", "none.json", "empty"),
        ("latin.txt", b"one\ntwo \xe9t\xe9", "latin.txt, line 2", "UTF-8 (byte 0xe9)"),
        ("broken.jsonl", '{"text": "a"}\n{"text": ', "broken.jsonl, line 2", "not valid JSON"),
        ("broken.json", '["a",', "broken.json", "not valid JSON"),
        ("object.json", '{"text": "a"}', "object.json", "not a JSON list"),
        ("keys.jsonl", '{"text": "a"}\n\n{"question": "a", "n": 1}', "keys.jsonl, line 3", "'question', 'n'"),
        ("blank.jsonl", '{"prompt": "  "}', "blank.jsonl, line 1", "no calibration text"),
        ("number.json", '["a", 3]', "number.json, entry 2", "no calibration text here: 3"),
        ("turns.jsonl", '{"messages": []}', "turns.jsonl, line 1", "messages cannot be read"),
        ("turns.jsonl", '[{"role": "user", "text": "a"}]', "turns.jsonl, line 1", "messages cannot be read"),
        ("half.jsonl", '{"text": "a"}\n{"text": "a \\ud83d b"}', "half.jsonl, line 2", "\\ud83d is half a character"),
        ("half.json", '["a", "\\udfff"]', "half.json, entry 2", "\\udfff is half a character"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(name, content, where, what, tmp_path):
    with pytest.raises(UserError) as error:
        read_samples(write(tmp_path, name, content))
    assert where in str(error.value) and what in str(error.value)
    assert str(error.value).count(" — ") >= 2  # what, where, what to do


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_samples(str(tmp_path / "absent.jsonl"))


def test_too_little_text_is_refused_with_the_count():
    with pytest.raises(UserError, match=r"has 3 tokens, at least 256 are needed — notes.txt"):
        encode_samples([Sample("x", text="ab")], Letters(), count=64, length=512, seed=0, where="notes.txt")


def test_turns_that_the_template_refuses_are_named(tmp_path):
    line = json.dumps([{"role": "system", "content": "Be brief."}, USER])
    samples = read_samples(write(tmp_path, "text.jsonl", line))
    with pytest.raises(UserError, match=r"no system turns here.*line 1"):
        encode(samples, Letters())
