"""Detokenization and chat templates, with real tokenizers and transformers as the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from dflash_trt.errors import UserError
from dflash_trt.runtime import Tokenizer
from dflash_trt.runtime.text import TextStream

SENTENCE = "Ein naïver Café-Besuch — 東京 🗼👩‍👩‍👧 costs ½ €. "


def byte_level() -> tokenizers.Tokenizer:
    """A BPE over bytes whose merges cross the borders of characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCE * 3, "ééüü" * 9], trainer)
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    """Llama-2's layout: a mark for spaces, bytes for what has no piece, no space at the start of a text."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abceinorstuv", "▁a", "er"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges=[("▁", "a"), ("e", "r")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, sentence_piece], ids=lambda make: make.__name__)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    request.param().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    text, ends = TextStream(tokenizer), [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [
        text.push(ids[start:end], last=index == len(ends) - 1)
        for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


texts = st.text(st.sampled_from(SENTENCE + "abceinorstuv ")) | st.text()
cuts = st.lists(st.integers(0, 10_000), max_size=40)


@given(text=texts, cuts=cuts)
def test_streamed_pieces_add_up_and_split_no_character(tokenizer, text, cuts):
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [byte_level], indirect=True)
@given(ids=st.lists(st.integers(0, 399), max_size=40), cuts=cuts)
def test_bytes_that_are_no_text_still_add_up(tokenizer, ids, cuts):
    ids = [token % tokenizer.vocab for token in ids]
    assert "".join(stream(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("special", ["<|channel|>", "<|other|>"])
def test_special_tokens_stay_only_where_they_tell_thoughts_from_the_answer(special, tmp_path):
    made = byte_level()
    made.add_special_tokens([special])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode(f"{special}final")
    assert len(ids) > 1
    shown = f"{special}final" if special == "<|channel|>" else "final"
    assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids, [1])) == shown


def test_a_missing_or_broken_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer — .*tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(UserError, match=r"cannot be read.*tokenizer\.json"):
        Tokenizer(tmp_path)


TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "special tokens": "{{ bos_token }}{% for m in messages %}\n    {{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}",
    "date": "{{ strftime_now('%Y') }} {{ messages[0].content }}",
    "macros": "{%- macro part(m) -%}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{%- endmacro -%}\n"
    "{%- set seen = namespace(first=true) %}{% if effort is not defined %}{% set effort = 'medium' %}{% endif %}\n"
    "{%- for m in messages %}{% if m.role in ['developer', 'system'] and seen.first %}{% set seen.first = false %}"
    "# {{ effort }}\n{% endif %}\n    {{- part(m) }}\n{% endfor %}",
    "training marks": "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}
MESSAGES = [{"role": "system", "content": "Be <brief> & 'kind'."}, {"role": "user", "content": " Grüß Gott! "}]


def write_model(directory: Path, template: str, *, config_only: bool = False) -> None:
    byte_level().save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    if config_only:
        config["chat_template"] = template
    else:
        (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("config_only", [False, True], ids=["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_laid_out_as_transformers_does(tmp_path, name, config_only):
    from transformers import AutoTokenizer

    write_model(tmp_path, TEMPLATES[name], config_only=config_only)
    tools = [{"type": "function", "function": {"name": "sum", "description": "a < b"}}]
    reference = AutoTokenizer.from_pretrained(tmp_path)
    want = reference.apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert Tokenizer(tmp_path).encode_chat(MESSAGES, tools=tools) == want


def test_a_template_that_refuses_or_is_broken_says_so(tmp_path):
    write_model(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        Tokenizer(tmp_path).encode_chat(MESSAGES)
    write_model(tmp_path, "{{ ''.__class__.__mro__ }}{{ messages.clear() }}")
    with pytest.raises(UserError, match="refuses"):
        Tokenizer(tmp_path).encode_chat(MESSAGES)
    write_model(tmp_path, "{% for %}")
    with pytest.raises(UserError, match=r"cannot be compiled.*chat_template\.jinja"):
        Tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        Tokenizer(tmp_path).encode_chat(MESSAGES)
