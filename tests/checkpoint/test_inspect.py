"""`inspect` through the command line: a card, a JSON object, and exit code 2 whenever something is wrong."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dflash_trt.checkpoint import describe_checkpoint, read_draft, read_tensors
from dflash_trt.cli import app
from dflash_trt.engine import convert
from tests.checkpoint.sparse import write_draft, write_gpt_oss, write_target
from tests.tiny import DRAFT, TARGETS

MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "use_sliding_window": True,
}


def inspect(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout


def test_the_card_of_a_drafter_tells_what_a_reader_needs(tmp_path):
    code, card = inspect(write_draft(tmp_path / "draft", DRAFT | MIXED))
    assert code == 0
    for fact in (
        "drafter",
        "layers 0-1: window 8, causal",
        "layer 2: full, bidirectional",
        "8: the anchor and 7 drafts, mask token 250",
        "outputs 1, 3, 4 (from 0) of 6",
        "4 query, 2 key/value, 16 wide",
        "default, theta 1,000,000",
        "384 B a token",  # 3 layers x 2 (K, V) x 2 heads x 16 wide x 2 bytes
    ):
        assert fact in card


def test_the_json_card_counts_parameters_bytes_and_cache(tmp_path):
    path = write_target(tmp_path / "target", TARGETS["tiny-llama"])
    code, out = inspect(path, "--json")
    card, refs = json.loads(out), read_tensors(path).values()
    assert (code, card["kind"], card["family"], card["problems"]) == (0, "target", "llama", [])
    assert card["parameters"] == sum(int(np.prod(ref.shape)) for ref in refs)
    assert card["stored_bytes"] == {"BF16": sum(ref.nbytes for ref in refs)}
    assert card["cache_bytes_per_token"] == {"bfloat16": 6 * 2 * 2 * 16 * 2, "float32": 6 * 2 * 2 * 16 * 4}


def test_scan_reads_the_weights_an_engine_directory_refers_to(tmp_path):
    target, draft = write_target(tmp_path / "t", TARGETS["tiny-qwen3"]), write_draft(tmp_path / "d", DRAFT)
    ref = read_draft(draft).tensors["norm.weight"]
    with ref.file.open("r+b") as stream:
        stream.seek(ref.offset)
        stream.write(np.array(np.inf, ml_dtypes.bfloat16).tobytes())
    engine = convert(target, draft, tmp_path / "engine").path
    assert inspect(engine)[0] == 0
    code, card = inspect(engine, "--scan")
    assert code == 2 and "norm.weight holds 0 NaN and 1 Inf, the first at [0]" in card


def test_scan_names_the_tensor_that_holds_a_nan(tmp_path):
    path = write_draft(tmp_path / "draft", DRAFT)
    ref = read_draft(path).tensors["fc.weight"]
    with ref.file.open("r+b") as stream:
        stream.seek(ref.offset + 2 * (5 * 192 + 7))
        stream.write(np.array(np.nan, ml_dtypes.bfloat16).tobytes())
    assert inspect(path)[0] == 0
    code, out = inspect(path, "--scan", "--json")
    found = f"fc.weight holds 1 NaN and 0 Inf, the first at [5, 7] — {ref.file}"
    assert (code, json.loads(out)["problems"]) == (2, [found])


def test_a_block_size_that_the_config_does_not_tell_can_be_given(tmp_path):
    path = write_draft(tmp_path / "draft", {key: value for key, value in DRAFT.items() if key != "block_size"})
    code, card = inspect(path)
    assert code == 2 and "--block-size" in card
    assert inspect(path, "--block-size", 8)[0] == 0


@pytest.mark.parametrize("kind", ["drafter", "target"])
def test_a_checkpoint_that_cannot_be_used_is_still_named_by_its_kind(tmp_path, kind):
    target = TARGETS["tiny-qwen3"]
    path = write_draft(tmp_path / "c", DRAFT) if kind == "drafter" else write_target(tmp_path / "c", target)
    (path / "model.safetensors").unlink()
    code, out = inspect(path, "--json", "--scan")
    card = json.loads(out)
    assert (code, card["kind"]) == (2, kind)
    assert "no .safetensors file" in card["problems"][0]


@pytest.mark.parametrize("make", ["nothing", "file", "empty"])
def test_a_path_that_is_no_checkpoint_is_a_problem_not_a_traceback(tmp_path, make):
    path = tmp_path / "path"
    if make == "file":
        path.touch()
    if make == "empty":
        path.mkdir()
    code, out = inspect(path, "--json")
    assert code == 2 and "cannot read config.json" in json.loads(out)["problems"][0]


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([10**400, 1e308])
)
trees = st.recursive(values, lambda tree: st.lists(tree, max_size=3) | st.dictionaries(st.text(max_size=4), tree))
MORE_KEYS = ("rope_parameters", "rope_scaling", "layer_types", "causal", "use_swa", "mlp_bias", "quantization_config")


@pytest.mark.parametrize(
    ("write", "config"),
    [(write_draft, DRAFT), (write_target, TARGETS["tiny-qwen3"]), (write_gpt_oss, TARGETS["tiny-gptoss"])],
)
@settings(max_examples=200)
@given(data=st.data())
def test_any_value_of_any_key_gives_a_card(tmp_path_factory, write, config, data):
    path = tmp_path_factory.getbasetemp() / write.__name__
    if not path.exists():
        write(path, config)
    key = data.draw(st.sampled_from([*config, *MORE_KEYS]))
    (path / "config.json").write_text(json.dumps(config | {key: data.draw(trees)}))
    assert len(json.loads(json.dumps(describe_checkpoint(path)))["problems"]) <= 1
