"""The demo's target is what transformers makes of the same GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.smollm2.prepare import find_gguf, prepare

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("prepared") / "target")


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    directory, gguf = tmp_path_factory.mktemp("reference"), find_gguf()
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=unpacked
    )
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    return directory


def test_every_tensor_is_equal_bit_by_bit(target, reference):
    ours, theirs = load_file(target / "model.safetensors"), load_file(reference / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_the_config_says_the_same(target, reference):
    from transformers import AutoConfig

    ours, theirs = (AutoConfig.from_pretrained(path).to_dict() for path in (target, reference))
    names = {"_name_or_path", "_model_name_or_path"}
    assert {k: v for k, v in ours.items() if k not in names} == {k: v for k, v in theirs.items() if k not in names}


def test_the_tokenizer_is_the_same(target, reference):
    """The post-processor that transformers adds puts nothing around a text."""
    ours, theirs = (json.loads((path / "tokenizer.json").read_text()) for path in (target, reference))
    assert theirs.pop("post_processor")["single"] == [{"Sequence": {"id": "A", "type_id": 0}}]
    assert ours.pop("post_processor") is None
    assert ours == theirs
    ours, theirs = (json.loads((path / "tokenizer_config.json").read_text()) for path in (target, reference))
    special = {name: token for name, token in theirs.items() if name.endswith("_token")}
    assert special == {name: token for name, token in ours.items() if name.endswith("_token")}
    assert (target / "chat_template.jinja").read_text() == (reference / "chat_template.jinja").read_text()


def test_a_second_run_keeps_the_first(target):
    before = (target / "model.safetensors").stat().st_mtime_ns
    assert prepare(target) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == before


def test_a_damaged_file_leaves_nothing_behind(tmp_path):
    damaged = tmp_path / "damaged.gguf"
    with find_gguf().open("rb") as whole:
        damaged.write_bytes(whole.read(2_000_000))
    output = tmp_path / "out" / "target"
    with pytest.raises(Exception):  # noqa: B017 (whatever the gguf package says)
        prepare(output, damaged)
    assert list(output.parent.iterdir()) == []
