"""NVFP4 checkpoints are read as the tensors are; whatever contradicts or damages them is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dflash_trt.checkpoint import describe_checkpoint, load_tensor, read_draft, read_target, read_tensors
from dflash_trt.errors import UserError
from tests.packed import declare, pack, redeclare
from tests.tiny import edit_config, edit_tensors, make_draft, make_pair

UP = "layers.0.mlp.up_proj"


@pytest.fixture
def draft(tmp_path) -> Path:
    return make_draft(tmp_path / "draft")


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        read_draft(directory)
    missing = [word for word in words if word.lower() not in str(error.value).lower()]
    assert not missing, error.value


@pytest.mark.parametrize(
    ("patterns", "activations", "algo"),
    [(["*_proj"], True, "NVFP4"), (["*_proj"], False, "W4A16_NVFP4"), (["*mlp*", "*o_proj"], True, "NVFP4")],
)
def test_a_drafter_is_read_as_its_tensors_are_packed(draft, patterns, activations, algo):
    modules = pack(draft, *patterns, activations=activations)
    quantization = read_draft(draft).quantization
    assert quantization.packed == dict.fromkeys(modules, activations)
    assert quantization.algo == algo and not quantization.notes


def test_a_target_with_a_packed_head_is_read(tmp_path):
    target, _ = make_pair(tmp_path)
    modules = pack(target, "*_proj", "lm_head", activations=False)
    assert "lm_head" in modules
    assert set(read_target(target).quantization.packed) == set(modules)


def test_the_prefix_model_changes_nothing(draft):
    pack(draft, "*_proj")
    edit_tensors(draft, rename={"layers.*": "model.layers.*"})
    assert read_draft(draft).quantization.algo == "NVFP4"


@pytest.mark.parametrize("kept", ["config.json", "hf_quant_config.json", None])
def test_either_config_or_none_is_enough(draft, kept):
    pack(draft, "*_proj")
    if kept != "hf_quant_config.json":
        (draft / "hf_quant_config.json").unlink()
    if kept != "config.json":
        edit_config(draft, remove=["quantization_config"])
    assert read_draft(draft).quantization.algo == "NVFP4"


def test_the_nested_form_inside_config_json_is_read(draft):
    """So ModelOpt's export of a drafter writes it."""
    pack(draft, "*_proj")
    nested = json.loads((draft / "hf_quant_config.json").read_text())
    (draft / "hf_quant_config.json").unlink()
    edit_config(draft, set={"quantization_config": nested})
    assert read_draft(draft).quantization.algo == "NVFP4"
    nested["quantization"]["exclude_modules"] = []
    edit_config(draft, set={"quantization_config": nested})
    refused(draft, "exclude_modules does not name fc")


@pytest.mark.parametrize(
    "excluded",
    [
        ["fc", "layers.0.self_attn", "layers.1.self_attn"],  # a module around them
        ["*fc", "*.self_attn*"],
        ["fc", "model.layers.0.self_attn.*", "model.layers.1.self_attn.*"],
        ["re:fc|.*self_attn\\..*"],
        ["*fc", "*q_proj", "*k_proj", "*v_proj", "*o_proj", "*qkv_proj"],
    ],
)
def test_excluded_modules_are_named_in_the_ways_that_readers_know(draft, excluded):
    edit_tensors(draft, rename={"layers.*": "model.layers.*"})
    pack(draft, "*mlp*")
    redeclare(draft, {"exclude_modules": excluded})
    assert len(read_draft(draft).quantization.packed) == 6


@pytest.mark.parametrize("wrong", ["ignore", "exclude_modules"])
def test_of_two_lists_in_one_config_each_must_agree(wrong, draft):
    """NVIDIA's quantize_drafter.py writes both."""
    pack(draft, "*_proj")
    flat = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "ignore": ["*fc"], "exclude_modules": ["*fc"]}
    edit_config(draft, set={"quantization_config": flat})
    assert read_draft(draft).quantization.algo == "NVFP4"
    edit_config(draft, set={f"quantization_config.{wrong}": []})
    refused(draft, f"{wrong} does not name fc")


@pytest.mark.parametrize(
    ("part", "key", "value"), [("weights", "num_bits", 8), ("input_activations", "group_size", 32)]
)
def test_config_groups_of_another_format_are_refused(part, key, value, draft):
    pack(draft, "*_proj")
    edit_config(draft, set={"quantization_config.config_groups": {"group_0": {part: {key: value}}}})
    refused(draft, f"config_groups.group_0.{part}.{key}", f"is {value}")


def test_a_packed_embedding_is_refused(tmp_path):
    target, _ = make_pair(tmp_path)
    edit_tensors(
        target,
        remove=["model.embed_tokens.weight"],
        add={
            "model.embed_tokens.weight": {"shape": [256, 32], "dtype": "U8"},
            "model.embed_tokens.weight_scale": {"shape": [256, 4], "dtype": "F8_E4M3"},
        },
    )
    with pytest.raises(UserError, match=r"embed_tokens.weight is packed, which is read of linears alone"):
        read_target(target)


def test_a_pattern_that_is_no_regular_expression_is_refused(draft):
    pack(draft, "*_proj")
    redeclare(draft, {"exclude_modules": ["re:("]})
    refused(draft, "exclude_modules", "'re:('")


def test_mixed_precision_follows_the_list_of_layers(draft):
    packed = pack(draft, "*.0.*_proj")
    edit_config(draft, remove=["quantization_config"])
    layers = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in packed}
    declare(draft, [], "MIXED_PRECISION", quantized_layers=layers)
    edit_config(draft, set={"quantization_config.quantized_layers": layers})
    assert read_draft(draft).quantization.packed == dict.fromkeys(packed, True)
    redeclare(draft, {"quantized_layers": {**layers, UP: {"quant_algo": "FP8"}}})
    refused(draft, "FP8", "not supported")
    redeclare(draft, {"quantized_layers": {}})
    refused(draft, "layers.0", "packed NVFP4")


def test_a_card_counts_weights_and_bytes_of_the_packed_form(draft):
    before = describe_checkpoint(draft)
    pack(draft, "*_proj")
    card = describe_checkpoint(draft)
    assert card["problems"] == [] and card["parameters"] == before["parameters"]
    assert card["nvfp4"]["of_bf16"] <= 0.30
    assert card["nvfp4"] | {"nbytes": 0} == {
        "algo": "NVFP4", "weights": 14, "activations": 14, "nbytes": 0, "of_bf16": 0.282, "notes": [],
    }  # fmt: skip


def test_scales_of_a_quantized_kv_cache_are_noted_not_used(draft):
    pack(draft, "*_proj")
    edit_tensors(draft, add={f"layers.*.self_attn.{n}_proj.{n}_scale": {"shape": [], "dtype": "F32"} for n in "kv"})
    redeclare(draft, {"kv_cache_quant_algo": "FP8"})
    checked = read_draft(draft)
    assert not [name for name in checked.tensors if name.endswith(("k_scale", "v_scale"))]
    assert any("4 scales" in note for note in checked.quantization.notes)
    assert any("KV cache" in note for note in checked.quantization.notes)


def test_a_config_that_quantizes_the_kv_cache_alone_is_noted(draft):
    declare(draft, [], "NVFP4", quant_algo=None, kv_cache_quant_algo="FP8")
    edit_config(draft, remove=["quantization_config"])
    quantization = read_draft(draft).quantization
    assert quantization.algo is None and "KV cache" in quantization.notes[0]
    pack(draft, "*_proj")
    declare(draft, [], "NVFP4", quant_algo=None, kv_cache_quant_algo="FP8")
    refused(draft, "exclude_modules excludes", "packed NVFP4")


# -- contradictions ---------------------------------------------------------------------------------------------------


def test_a_packed_weight_that_a_config_excludes_is_refused(draft):
    pack(draft, "*_proj")
    redeclare(draft, {"exclude_modules": ["fc", "layers.0.self_attn*"]})
    refused(draft, "exclude_modules", "layers.0.self_attn.q_proj", "hf_quant_config.json")


def test_an_unpacked_weight_that_a_config_does_not_exclude_is_refused(draft):
    pack(draft, "*mlp*")
    edit_config(draft, set={"quantization_config.ignore": ["fc"]})
    refused(draft, "ignore", "self_attn", "not packed", "config.json")


def test_w4a4_without_input_scales_is_refused(draft):
    pack(draft, "*_proj")
    edit_tensors(draft, remove=["*up_proj.input_scale"])
    refused(draft, f"the input_scale of {UP} is missing", "calibrate")


def test_w4a16_with_input_scales_is_refused(draft):
    pack(draft, "*_proj")
    redeclare(draft, {"quant_algo": "W4A16_NVFP4"})
    refused(draft, "W4A16_NVFP4", "the input_scale of", "is there")


@pytest.mark.parametrize("algo", ["FP8", "NVFP4_AWQ", "W4A8_NVFP4_FP8", "W4A8_AWQ", "MXFP4"])
def test_other_algorithms_are_refused_by_name(draft, algo):
    pack(draft, "*_proj")
    redeclare(draft, {"quant_algo": algo})
    refused(draft, algo, "not supported")


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "compressed-tensors", "bitsandbytes", "mxfp4"])
def test_other_methods_are_refused_by_name(draft, method):
    edit_config(draft, set={"quantization_config": {"quant_method": method}})
    refused(draft, method, "not supported")


def test_other_group_sizes_are_refused(draft):
    pack(draft, "*_proj")
    redeclare(draft, {"group_size": 32})
    refused(draft, "group_size", "32", "16")


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"remove": [f"{UP}.weight_scale"]}, [f"{UP}.weight_scale is missing"]),
        ({"remove": [f"{UP}.weight_scale_2"]}, [f"{UP}.weight_scale_2 is missing"]),
        (
            {"remove": [f"{UP}.weight_scale"], "add": {f"{UP}.weight_scale": {"shape": [128, 2], "dtype": "F8_E4M3"}}},
            ["weight_scale", "shape [128, 2]", "[128, 4]"],
        ),
        (
            {"remove": [f"{UP}.weight_scale"], "add": {f"{UP}.weight_scale": {"shape": [128, 4], "dtype": "U8"}}},
            ["weight_scale", "U8", "F8_E4M3"],
        ),
        (
            {"remove": [f"{UP}.weight_scale_2"], "add": {f"{UP}.weight_scale_2": {"shape": [], "dtype": "BF16"}}},
            ["weight_scale_2", "BF16", "F32"],
        ),
        (
            {"remove": [f"{UP}.weight_scale_2"], "add": {f"{UP}.weight_scale_2": {"shape": [128], "dtype": "F32"}}},
            ["weight_scale_2", "shape [128]", "single number"],
        ),
        (
            {"remove": [f"{UP}.weight"], "add": {f"{UP}.weight": {"shape": [128, 64], "dtype": "BF16"}}},
            [f"{UP}.weight is BF16", "not packed NVFP4"],
        ),
        (
            {"remove": [f"{UP}.weight"], "add": {f"{UP}.weight": {"shape": [128, 16], "dtype": "U8"}}},
            [f"{UP}.weight has shape [128, 16]", "[128, 32]"],
        ),
        ({"add": {f"{UP}.weight_packed": {"shape": [2], "dtype": "U8"}}}, ["weight_packed", "compressed-tensors"]),
        ({"add": {f"{UP}.qweight": {"shape": [2], "dtype": "I32"}}}, ["qweight", "GPTQ or AWQ"]),
        ({"add": {f"{UP}.weight_scale_inv": {"shape": [2], "dtype": "F32"}}}, ["weight_scale_inv", "FP8 in blocks"]),
        ({"add": {f"{UP}.pre_quant_scale": {"shape": [64], "dtype": "BF16"}}}, ["pre_quant_scale", "AWQ"]),
        ({"add": {"norm.weight_scale": {"shape": [], "dtype": "F32"}}}, ["norm.weight_scale", "not packed"]),
        (
            {"add": {"other.input_scale": {"shape": [], "dtype": "F32"}}},
            ["other.input_scale", "no weight of that name"],
        ),
    ],
)
def test_damaged_scales_and_other_formats_are_refused_by_the_tensors_name(draft, edit, words):
    pack(draft, "*_proj")
    edit_tensors(draft, **edit)
    refused(draft, *words)


def test_an_fp8_drafter_is_refused_as_fp8(draft):
    fp8 = {
        f"{UP}.weight": {"shape": [128, 64], "dtype": "F8_E4M3"},
        f"{UP}.weight_scale": {"shape": [], "dtype": "F32"},
    }
    edit_tensors(draft, remove=list(fp8), add=fp8)
    refused(draft, f"{UP}.weight is FP8", "not supported")


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("part", ["weight_scale_2", "input_scale"])
def test_a_global_scale_that_is_no_positive_number_is_refused(draft, part, value):
    """Zero is what ModelOpt 0.47 writes for a weight of zeros, beside block scales that are NaN."""
    pack(draft, "*_proj")
    ref = read_tensors(draft)[f"{UP}.{part}"]
    assert load_tensor(ref).shape == ()
    with ref.file.open("r+b") as file:
        file.seek(ref.offset)
        file.write(np.float32(value).tobytes())
    refused(draft, f"{UP}.{part} is", "not a positive number")
