"""gpt-oss targets: experts in three storages, sinks, windows and defaults, with transformers as the oracle."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from dflash_trt.checkpoint import Experts, Rope, describe_checkpoint, load_tensor, pair, read_draft, read_target, scan
from dflash_trt.cli import app
from dflash_trt.errors import UserError
from dflash_trt.measure.oracles import TargetOracle
from dflash_trt.measure.rounded import rounded
from tests.checkpoint.sparse import GPT_OSS_120B, write_gpt_oss
from tests.tiny import MXFP4, TARGETS, dequantized, edit_config, edit_tensors, load_tensors, make_pair, make_target

TINY = TARGETS["tiny-gptoss"]
EXPERTS = "model.layers.{}.mlp.experts."
GATE_UP = EXPERTS.format(1) + "gate_up_proj"
TEXT = list(b"longer than the window of sixteen")
REVISIONS = "are of different revisions"


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        read_target(path)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, error.value


def quantize(target: Path, output: Path, *options: str) -> Path:
    words = ["quantize", "--target", target, "--output", output, "--json", *options]
    CliRunner().invoke(app, list(map(str, words)), standalone_mode=False, catch_exceptions=False)
    return output / "target"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """One model in its storages; not to be changed."""
    root = tmp_path_factory.mktemp("gpt-oss")
    found = {storage: make_target(root / storage, "tiny-gptoss", experts=storage) for storage in ("float", "mxfp4")}
    fixed = ("--input-amax", "448")
    found["nvfp4"] = quantize(found["float"], root / "q", "--preset", "nvfp4-experts", *fixed)
    found["cast"] = quantize(found["mxfp4"], root / "c", "--preset", "nvfp4-experts", *fixed)
    found["w4a16"] = quantize(found["float"], root / "w", "--preset", "nvfp4-weight-only")
    return found


@pytest.mark.parametrize("storage", ["float", "mxfp4", "nvfp4", "cast", "w4a16"])
def test_the_config_is_read_whatever_stores_the_experts(made, storage):
    config = read_target(made[storage]).config
    kind = storage if storage in ("float", "mxfp4") else "nvfp4"
    assert config.experts == Experts(8, 2, kind, alpha=1.702, limit=1.5)
    assert config.sinks and config.attention_bias and config.o_bias and not (config.mlp_bias or config.qk_norm)
    assert config.windows == (16, None, 16, None)
    assert config.rope == Rope(150000.0, "yarn", 4.0, 64, truncate=False)
    assert (config.ffn, config.rms_eps, config.eos_ids) == (96, 1e-5, (2,))


def test_the_drafter_is_one_for_it(tmp_path):
    target, draft = make_pair(tmp_path, "tiny-gptoss", experts="mxfp4")
    found = pair(read_target(target), read_draft(draft)).draft.config
    assert (found.attention_bias, found.heads, found.num_target_layers) == (True, 8, 4)
    assert (found.target_layer_ids, found.rope) == ((0, 1, 2), Rope(150000.0, "yarn", 4.0, 64, truncate=False))


def test_mxfp4_has_the_values_that_transformers_unpacks(made):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    unpacked = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        made["mxfp4"], quantization_config=unpacked, dtype=torch.float32
    ).state_dict()
    ours = load_tensors(dequantized(made["mxfp4"]))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name].numpy()) for name in ours)


def test_its_cast_to_nvfp4_has_the_same(made):
    ours, cast = load_tensors(dequantized(made["mxfp4"])), load_tensors(dequantized(made["cast"]))
    assert ours.keys() == cast.keys()
    assert all(np.array_equal(ours[name], cast[name]) for name in ours)


@pytest.mark.parametrize("storage", ["float", "mxfp4", "cast", "w4a16"])
def test_verify_compares_with_the_values_of_the_file(made, storage):
    from transformers import AutoModelForCausalLM

    floats = AutoModelForCausalLM.from_pretrained(dequantized(made[storage])).eval()
    target = read_target(made[storage])
    if storage == "cast":  # its weights alone
        target = replace(
            target, quantization=replace(target.quantization, packed=dict.fromkeys(target.quantization.packed, False))
        )
    with torch.inference_mode():
        expected = floats(torch.tensor([TEXT])).logits[0].numpy()
    assert np.array_equal(TargetOracle(target).read(TEXT)[0], expected)


def test_verify_rounds_what_goes_into_the_experts(made):
    """Their inputs and what is between their products, seen from the experts' own code one token at a time."""
    target = read_target(made["nvfp4"])
    oracle = TargetOracle(target)
    experts, stem = oracle.model.model.layers[1].mlp.experts, EXPERTS.format(1)
    scales = [load_tensor(target.tensors[f"{stem}{name}_proj_input_scale"]) for name in ("gate_up", "down")]
    torch.manual_seed(0)
    x, chosen, shares = torch.randn(5, 64), torch.tensor([[i, i + 2] for i in range(5)]), torch.rand(5, 2)

    def part(token: int, expert: int) -> torch.Tensor:
        given = torch.from_numpy(rounded(x[token].numpy(), np.float32(scales[0])))
        both = given @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
        gate, up = both[::2].clamp(max=1.5), both[1::2].clamp(-1.5, 1.5)
        between = rounded(((up + 1) * gate * torch.sigmoid(1.702 * gate)).numpy(), np.float32(scales[1]))
        return torch.from_numpy(between) @ experts.down_proj[expert] + experts.down_proj_bias[expert]

    with torch.inference_mode():
        expected = [sum(shares[t, i] * part(t, int(chosen[t, i])) for i in range(2)) for t in range(5)]
        torch.testing.assert_close(experts(x, chosen, shares), torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("storage", "algo"), [("nvfp4", "NVFP4"), ("cast", "NVFP4"), ("w4a16", "W4A16_NVFP4")])
def test_nvfp4_experts_count_among_the_packed_weights(made, storage, algo):
    target = read_target(made[storage])
    modules = {EXPERTS.format(i) + name for i in range(4) for name in ("gate_up_proj", "down_proj")}
    if storage == "w4a16":
        modules |= {f"model.layers.{i}.self_attn.{letter}_proj" for i in range(4) for letter in "qkvo"}
    found = target.quantization
    assert set(found.packed) == modules
    assert found.algo == algo and not found.notes
    floats = read_target(made["float"]).tensors
    sizes = [np.prod((floats.get(module) or floats[f"{module}.weight"]).shape) for module in modules]
    assert found.values == sum(sizes)
    scalars = 1 if algo == "W4A16_NVFP4" else 2
    assert found.nbytes == sum(size // 2 + size // 16 + 4 * scalars for size in sizes)


@pytest.mark.parametrize("storage", ["float", "mxfp4", "nvfp4", "w4a16"])
def test_the_card_counts_parameters_and_experts(made, storage):
    card, whole = describe_checkpoint(made[storage]), describe_checkpoint(made["float"])
    assert card["problems"] == [] and card["parameters"] == whole["parameters"]
    weights, biases = 4 * 8 * 3 * 64 * 96, 4 * 8 * (192 + 64)
    bits = {"float": 16, "mxfp4": 4 + 8 / 32, "nvfp4": 4 + 8 / 16, "w4a16": 4 + 8 / 16}[storage]
    scalars = {"nvfp4": 2 * 8, "w4a16": 8}.get(storage, 0)
    size = weights * bits / 8 + 2 * biases + 4 * scalars
    kind = "nvfp4" if storage == "w4a16" else storage
    assert card["experts"] == {"count": 8, "top_k": 2, "storage": kind, "bytes": size}
    assert card["sinks"]
    out = CliRunner().invoke(app, ["inspect", str(made[storage])], env={"COLUMNS": "200"}).stdout
    spelled = "as floats" if storage == "float" else f"in {kind.upper()}"
    assert f"8 in each layer, 2 a token, {spelled}" in out and "16 wide, with sinks" in out


@pytest.mark.parametrize("absent", ["layer_types", "rope_parameters", "rms_norm_eps", "swiglu_limit", "swiglu_alpha"])
def test_what_a_config_leaves_out_is_as_in_transformers(tmp_path, absent):
    from transformers import GptOssConfig

    config = {key: value for key, value in TINY.items() if key != absent}
    theirs = GptOssConfig(**{key: value for key, value in config.items() if key != "model_type"})
    ours = read_target(write_gpt_oss(tmp_path, config)).config
    assert ours.windows == tuple(16 if kind == "sliding_attention" else None for kind in theirs.layer_types)
    rope = theirs.rope_parameters
    assert (ours.rope.theta, ours.rope.kind, ours.rope.factor) == (rope["rope_theta"], "yarn", rope["factor"])
    assert (ours.rope.original_max_position, ours.rope.truncate) == (rope["original_max_position_embeddings"], False)
    assert (ours.rope.beta_fast, ours.rope.beta_slow) == (rope["beta_fast"], rope["beta_slow"])
    assert (ours.rms_eps, ours.experts.limit) == (theirs.rms_norm_eps, theirs.swiglu_limit)
    assert ours.experts.alpha == theirs.swiglu_alpha


def test_a_tied_head_is_read(tmp_path):
    target = read_target(write_gpt_oss(tmp_path, TINY | {"tie_word_embeddings": True}))
    assert target.config.tie_embeddings and "lm_head.weight" not in target.tensors


@pytest.mark.parametrize(("ids", "expected"), [(None, (2,)), ([200002, 199999, 200012], (200002, 199999, 200012))])
def test_stop_tokens_are_those_of_its_files_and_no_others(tmp_path, ids, expected):
    write_gpt_oss(tmp_path, TINY)
    if ids:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert read_target(tmp_path).config.eos_ids == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_local_experts": None}, ["num_local_experts is missing"]),
        ({"num_experts_per_tok": None}, ["num_experts_per_tok is missing"]),
        ({"experts_per_token": 3}, ["num_experts_per_tok is 2, but experts_per_token is 3", "keep one"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok is 9, but num_local_experts is 8"]),
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok is 0"]),
        ({"num_local_experts": 4}, ["mlp.router.weight has shape [8, 64]", "[4, 64]"]),
        ({"swiglu_limit": 0}, ["swiglu_limit is 0"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu' is not supported"]),
        ({"attention_bias": False}, ["attention_bias is false, but", REVISIONS]),
        ({"sliding_window": None}, ["sliding_window is missing", "sliding_attention"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["layer_types names 3 layers, num_hidden_layers is 4"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config.quant_method FP8 is not supported"]),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            ["quant_algo is NVFP4", "experts.down_proj_blocks is MXFP4"],
        ),
    ],
)
def test_configs_that_contradict_themselves_or_the_tensors_are_refused(tmp_path, keys, words):
    write_gpt_oss(tmp_path, TINY)
    (tmp_path / "config.json").write_text(json.dumps(TINY | keys))
    refused(tmp_path, *words, str(tmp_path))


@pytest.mark.parametrize("width", ["hidden_size", "intermediate_size"])
def test_mxfp4_of_widths_without_whole_blocks_is_refused(tmp_path, width):
    name = "down_proj_blocks" if width == "intermediate_size" else "gate_up_proj_blocks"
    path = write_gpt_oss(tmp_path, TINY | {width: 80})
    refused(
        path, name, f"[8, {64 if width == 'intermediate_size' else 192}, 2, 16]", "80 inputs", width, "BF16 experts"
    )


GONE, U8 = GATE_UP + "_blocks", {"shape": [8, 192, 2, 16], "dtype": "U8"}


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"remove": [GATE_UP + "_scales"]}, [f"{GONE} [8, 192, 2, 16]", "gate_up_proj_scales is missing"]),
        ({"remove": [GONE]}, [f"{GATE_UP}_scales [8, 192, 2]", "gate_up_proj_blocks is missing"]),
        ({"add": {GONE: U8 | {"dtype": "BF16"}}}, [GONE, "[8, 192, 2, 16]", "has dtype BF16, MXFP4 has U8"]),
        ({"add": {GATE_UP + "_scales": U8 | {"shape": [8, 192, 4]}}}, ["_scales has shape [8, 192, 4]", "[8, 192, 2]"]),
        ({"add": {GONE: U8 | {"shape": [8, 192, 32]}}}, [GONE, "has shape [8, 192, 32]", "[8, 192, 2, 16]"]),
        (
            {"remove": [GATE_UP + "_*"], "add": {GATE_UP: {"shape": [8, 64, 192], "dtype": "BF16"}}},
            [f"{GATE_UP} is BF16, but model.layers.0.mlp.experts.down_proj_blocks is MXFP4 (U8)", "in one way"],
        ),
        ({"add": {GATE_UP + "_weight_scale": U8}}, [f"{GATE_UP}_weight_scale is there, but there is no weight"]),
        ({"remove": ["*.self_attn.sinks"]}, ["missing tensor model.layers.0.self_attn.sinks"]),
        ({"remove": ["*.router.bias"]}, ["missing tensor model.layers.0.mlp.router.bias"]),
        ({"add": {"model.layers.0.mlp.up_proj.weight": U8}}, ["tensor model.layers.0.mlp.up_proj.weight is not"]),
    ],
)
def test_mxfp4_tensors_that_are_damaged_are_named(tmp_path, edits, words):
    write_gpt_oss(tmp_path, TINY | {"quantization_config": MXFP4})
    assert read_target(tmp_path).config.experts.storage == "mxfp4"
    edit_tensors(tmp_path, **edits)
    refused(tmp_path, *words)


def test_all_experts_gone_is_a_missing_tensor(tmp_path):
    write_gpt_oss(tmp_path, TINY)
    edit_tensors(tmp_path, remove=["*.experts.*"])
    refused(tmp_path, "missing tensor model.layers.0.mlp.experts.down_proj,")


@pytest.mark.parametrize(("storage", "says"), [("float", "BF16"), ("nvfp4", "NVFP4 (U8)")])
def test_a_config_of_mxfp4_over_other_experts_is_refused(made, tmp_path, storage, says):
    path = copy(made[storage], tmp_path)
    edit_config(path, set={"quantization_config": MXFP4})
    refused(path, "quantization_config.quant_method is mxfp4, but model.layers.0.mlp.experts.down_proj is " + says)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"remove": [GATE_UP + "_weight_scale"]}, ["has dtype U8, but", "gate_up_proj_weight_scale is missing"]),
        ({"remove": [GATE_UP + "_weight_scale_2"]}, ["has dtype U8, but", "gate_up_proj_weight_scale_2 is missing"]),
        (
            {"remove": [GATE_UP + "_input_scale"]},
            ["quant_algo is NVFP4 (W4A4), but", f"the input_scale of {GATE_UP} is missing"],
        ),
        (
            {"add": {GATE_UP + "_weight_scale": {"shape": [8, 4, 192], "dtype": "U8"}}},
            ["gate_up_proj_weight_scale has dtype U8, not F8_E4M3"],
        ),
        (
            {"add": {GATE_UP + "_weight_scale": {"shape": [8, 2, 192], "dtype": "F8_E4M3"}}},
            ["gate_up_proj_weight_scale has shape [8, 2, 192], its weight's shape implies [8, 4, 192]"],
        ),
        (
            {"add": {GATE_UP + "_input_scale": {"shape": [8], "dtype": "F32"}}},
            ["gate_up_proj_input_scale has shape [8], not that of a single number"],
        ),
        ({"add": {GATE_UP: {"shape": [8, 192, 32], "dtype": "U8"}}}, ["has shape [8, 192, 32]", "[8, 32, 192]"]),
        (
            {"add": {GATE_UP: {"shape": [8, 64, 192], "dtype": "BF16"}}},
            [f"{GATE_UP} is BF16, but", "down_proj is NVFP4 (U8)", "in one way"],
        ),
        (
            {"add": {"model.layers.0.mlp.router.weight": {"shape": [8, 32], "dtype": "U8"}}},
            ["router.weight has shape [8, 32]"],
        ),
    ],
)
def test_nvfp4_experts_are_checked_as_linears_are(made, tmp_path, edits, words):
    path = copy(made["nvfp4"], tmp_path)
    edit_tensors(path, **edits)
    refused(path, *words)


@pytest.mark.parametrize("missing", ["gate_up", "down"])
def test_inputs_of_one_product_alone_are_not_rounded(made, tmp_path, missing):
    path = copy(made["nvfp4"], tmp_path)
    edit_tensors(path, remove=[f"*{missing}_proj_input_scale"])
    (path / "hf_quant_config.json").unlink()
    edit_config(path, remove=["quantization_config"])
    there = "down" if missing == "gate_up" else "gate_up"
    refused(path, f"{there}_proj_input_scale", f"{missing}_proj_input_scale is missing", "of both products")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_global_scale_that_is_no_positive_number_is_refused(made, tmp_path, value):
    path = copy(made["nvfp4"], tmp_path)
    ref = read_target(path).tensors[GATE_UP + "_weight_scale_2"]
    with ref.file.open("r+b") as stream:
        stream.seek(ref.offset)
        stream.write(np.float32(value).tobytes())
    refused(path, f"{GATE_UP}_weight_scale_2 is {value:g}, not a positive number")


def test_scanning_finds_a_scale_of_mxfp4_that_is_nan(made, tmp_path):
    path = copy(made["mxfp4"], tmp_path)
    ref = read_target(path).tensors[GATE_UP + "_scales"]
    assert scan(ref) is None
    with ref.file.open("r+b") as stream:
        stream.seek(ref.offset + (3 * 192 + 7) * 2 + 1)
        stream.write(b"\xff")
    assert str(scan(ref)) == f"{GATE_UP}_scales holds 1 NaN and 0 Inf, the first at [3, 7, 1]"


@pytest.mark.parametrize("said", ["excluded", "not named"])
def test_a_config_that_tells_otherwise_of_the_experts_is_refused(made, tmp_path, said):
    path = copy(made["nvfp4"], tmp_path)
    file = path / "hf_quant_config.json"
    config = json.loads(file.read_text())
    modules = config["quantization"]["exclude_modules"]
    config["quantization"]["exclude_modules"] = [*modules, "*.mlp.experts*"] if said == "excluded" else modules
    if said == "not named":
        floats = copy(made["float"], tmp_path / "more")
        path, file = floats, floats / "hf_quant_config.json"
    file.write_text(json.dumps(config))
    refused(path, "exclude_modules", "mlp.experts.gate_up_proj", "packed")


def test_other_families_refuse_the_blocks_by_their_name(tmp_path):
    path = make_target(tmp_path / "target", "tiny-qwen3")
    edit_tensors(path, add={GONE: U8})
    refused(path, f"tensor {GONE} (MXFP4) is not supported")


def test_the_published_120b_is_read_in_its_size(tmp_path):
    path = write_gpt_oss(tmp_path, GPT_OSS_120B, files=15)
    target = read_target(path)
    assert target.config.experts == Experts(128, 4, "mxfp4")
    assert target.config.windows == (128, None) * 18
    assert target.config.rope == Rope(150000.0, "yarn", 32.0, 4096, truncate=False)
    assert target.quantization is None
    card = describe_checkpoint(path)
    assert card["problems"] == [] and len(card["files"]) == 15
    assert card["parameters"] == 116_829_156_672
    assert card["experts"]["bytes"] / 1e9 == pytest.approx(61.0, abs=0.1)
    assert sum(card["stored_bytes"].values()) == 65_248_815_744  # the published index's total_size


def test_bfloat16_experts_of_that_size_are_read_too(tmp_path):
    config = {key: value for key, value in GPT_OSS_120B.items() if key != "quantization_config"}
    card = describe_checkpoint(write_gpt_oss(tmp_path, config, storage="float", files=4))
    assert (card["problems"], card["parameters"]) == ([], 116_829_156_672)
    assert card["experts"]["storage"] == "float"


def copy(source: Path, root: Path) -> Path:
    return Path(shutil.copytree(source, root / "copy"))
