"""Presets decide which tensors are quantized; whatever cannot be is refused by its name."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from dflash_trt.checkpoint import read_draft
from dflash_trt.checkpoint.quantized import FORMATS
from dflash_trt.errors import UserError
from dflash_trt.quantize import PRESETS, make_plan, write_checkpoint
from tests.checkpoint.sparse import write_draft, write_file, write_target
from tests.quantize.readers import READERS
from tests.tiny import DRAFT, TARGETS, draft_shapes, make_draft

QKV = ("q_proj", "k_proj", "v_proj")
ALL = (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = {
    f"model.layers.0.mlp.experts.{e}.{p}_proj.weight": (32, 32) for e in range(2) for p in ("gate", "up", "down")
}
FUSED = {
    "model.layers.0.mlp.experts.gate_up_proj": (2, 64, 128),
    "model.layers.0.mlp.experts.gate_up_proj_bias": (2, 128),
}
MXFP4 = {
    "model.layers.0.mlp.experts.down_proj_blocks": (2, 64, 4, 16),
    "model.layers.0.mlp.experts.down_proj_scales": (2, 64, 4),
    "model.layers.0.mlp.experts.down_proj_bias": (2, 64),
}


@pytest.fixture
def target(tmp_path) -> Path:
    return write_target(tmp_path / "target", TARGETS["tiny-qwen3"])


@pytest.fixture
def draft(tmp_path) -> Path:
    return write_draft(tmp_path / "draft", DRAFT)


def plain(directory: Path, shapes: dict, dtypes: dict | None = None, **config: object) -> Path:
    """A checkpoint of just these tensors."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_file(directory / "model.safetensors", shapes, dtypes=dtypes or {})
    return directory


@pytest.mark.parametrize(
    ("preset", "names"),
    {
        "nvfp4": ALL,
        "nvfp4-weight-only": ALL,
        "nvfp4-mlp": ("o_proj", "gate_proj", "up_proj", "down_proj"),
        "nvfp4-mse": ALL,
        "nvfp4-awq": ALL,
    }.items(),
)
def test_a_preset_takes_these_of_every_layer_and_leaves_the_rest(target, draft, preset, names):
    for source, layers, outside in ((target, 6, ["lm_head", "model.embed_tokens"]), (draft, 2, ["fc"])):
        plan = make_plan(source, PRESETS[preset])
        taken = [linear.module for linear in plan.linears]
        assert len(taken) == layers * len(names) and all(module.endswith(names) for module in taken)
        left = [name for name in plan.excluded if not name.endswith((*ALL, "qkv_proj")) and "*" not in name]
        assert left == outside
        tensors = {ref.name for ref in plan.copied} | {f"{module}.weight" for module in taken}
        assert len(tensors) == len(plan.copied) + len(taken)


def test_a_summary_says_what_its_preset_does(target):
    taken = {
        name: {linear.module.rpartition(".")[2] for linear in make_plan(target, preset).linears}
        for name, preset in PRESETS.items()
        if name != "nvfp4-experts"
    }
    for name, preset in PRESETS.items():
        assert ("weights alone" in preset.summary, "(W4A16)" in preset.summary) == (not preset.activations,) * 2
        assert ("CUDA; untested" in preset.summary) == preset.needs_cuda
        assert ("casts" in preset.summary) == preset.mxfp4
        assert ("q/k/v stay" in preset.summary) == (name in taken and not {*QKV} & taken[name])
        assert ("all linears" in preset.summary or "as nvfp4" in preset.summary) == (taken.get(name) == {*ALL})
        assert ("SGLang" in preset.summary) == (not preset.activations)


@pytest.mark.parametrize("leaves", READERS)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_readers_find_what_was_left_wherever_they_mount_a_drafter(tmp_path, leaves, prefix):
    shapes = {f"{prefix}{name}": shape for name, shape in draft_shapes(DRAFT).items()}
    plan = make_plan(plain(tmp_path / "draft", shapes), PRESETS["nvfp4-mlp"])
    for layer in ("layers.0", "layers.1", "layers.36", "layers.37"):
        attention, mlp = f"model.{layer}.self_attn", f"model.{layer}.mlp"
        assert leaves(f"{attention}.qkv_proj", plan.excluded)
        packed = [f"{attention}.o_proj", f"{mlp}.gate_up_proj", f"{mlp}.down_proj"]
        assert not [name for name in packed if leaves(name, plan.excluded)]
    assert leaves("model.fc", plan.excluded) and leaves("fc", plan.excluded)


@pytest.mark.parametrize("preset", ["nvfp4", "nvfp4-mlp", "nvfp4-weight-only"])
def test_our_own_reader_takes_what_is_excluded(preset, tmp_path):
    source = make_draft(tmp_path / "draft")
    plan = make_plan(source, PRESETS[preset], ["fc"])
    write_checkpoint(plan, tmp_path / "out", None, input_amax=1.0)
    assert {*read_draft(tmp_path / "out").quantization.packed} == {linear.module for linear in plan.linears}


def test_no_glob_takes_what_is_packed(tmp_path):
    """`*proj`, made of `model.proj`, would."""
    names = ("model.layers.0.mlp.gate", "model.layers.0.self_attn.o_proj", "model.proj")
    plan = make_plan(plain(tmp_path, {f"{name}.weight": (32, 32) for name in names}), PRESETS["nvfp4"])
    assert [linear.module for linear in plan.linears] == ["model.layers.0.self_attn.o_proj"]
    assert plan.excluded == ("*.mlp.gate", "model.layers.0.mlp.gate", "model.proj")


def test_names_are_those_of_the_file(tmp_path):
    shapes = {
        "model.layers.0.self_attn.o_proj.weight": (16, 32),
        "model.fc.weight": (16, 32),
        "model.norm.weight": (16,),
    }
    plan = make_plan(plain(tmp_path, shapes), PRESETS["nvfp4"])
    assert [linear.module for linear in plan.linears] == ["model.layers.0.self_attn.o_proj"]
    assert plan.excluded == ("*fc", "model.fc")


def test_groups_are_what_readers_fuse(draft):
    groups: dict[str, list[str]] = {}
    for linear in make_plan(draft, PRESETS["nvfp4"]).linears:
        groups.setdefault(linear.group, []).append(linear.module.removeprefix("layers.0."))
    assert sorted(groups["layers.0.self_attn.qkv_proj"]) == [f"self_attn.{name}" for name in sorted(QKV)]
    assert sorted(groups["layers.0.mlp.gate_up_proj"]) == ["mlp.gate_proj", "mlp.up_proj"]
    assert groups["layers.0.mlp.down_proj"] == ["mlp.down_proj"]


def test_experts_are_linears_tied_expert_by_expert_and_their_router_stays(tmp_path):
    router = {"model.layers.0.mlp.gate.weight": (2, 32), "model.layers.0.self_attn.q_proj.weight": (32, 32)}
    plan = make_plan(plain(tmp_path, EXPERTS | router), PRESETS["nvfp4-experts"])
    assert len(plan.linears) == 6 and {linear.kind for linear in plan.linears} == {"linear"}
    assert len({linear.group for linear in plan.linears}) == 4
    names = ("mlp.gate", "self_attn.q_proj")
    assert {*plan.excluded} == {f"{prefix}{name}" for name in names for prefix in ("*.", "model.layers.0.")}


@pytest.mark.parametrize("preset", ["nvfp4", "nvfp4-mlp", "nvfp4-experts"])
def test_experts_in_one_tensor_are_one_linear(tmp_path, preset):
    (linear,) = make_plan(plain(tmp_path, FUSED, hidden_size=64), PRESETS[preset]).linears
    assert (linear.module, linear.kind, linear.shape) == (next(iter(FUSED)), "experts", (2, 128, 64))


@pytest.mark.parametrize(
    ("name", "shape", "model_type", "taken"),
    [
        ("gate_up_proj", (2, 64, 96), "other", True),
        ("gate_up_proj", (2, 96, 64), "other", False),  # [E, out, in], as Qwen3-MoE has them
        ("gate_up_proj", (2, 96, 64), "gpt_oss", False),
        ("gate_up_proj", (2, 64, 64), "other", False),  # either
        ("gate_up_proj", (2, 64, 64), "gpt_oss", True),
        ("down_proj", (2, 48, 64), "other", True),
        ("down_proj", (2, 64, 48), "other", False),
        ("down_proj", (2, 64, 64), "qwen3_moe", False),
        ("down_proj", (2, 64, 64), "gpt_oss", True),
    ],
)
def test_experts_with_other_axes_are_refused_by_name(tmp_path, name, shape, model_type, taken):
    name = f"model.layers.0.mlp.experts.{name}"
    source = plain(tmp_path, {name: shape}, hidden_size=64, model_type=model_type)
    if taken:
        assert make_plan(source, PRESETS["nvfp4-experts"]).linears[0].module == name
        return
    with pytest.raises(
        UserError, match=rf"{name} has shape .* not the \[experts, in, out\] of gpt-oss.*hidden_size is 64"
    ):
        make_plan(source, PRESETS["nvfp4-experts"])


def test_mxfp4_experts_are_for_the_preset_that_casts_them(tmp_path):
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    source = plain(tmp_path, MXFP4, {name: "U8" for name in MXFP4 if "bias" not in name}, **quantized)
    (linear,) = make_plan(source, PRESETS["nvfp4-experts"]).linears
    assert (linear.module, linear.kind) == ("model.layers.0.mlp.experts.down_proj", "mxfp4")
    assert linear.shape == (2, 64, 128) and linear.scales
    with pytest.raises(UserError, match=r"down_proj_blocks is in MXFP4.*nvfp4-experts"):
        make_plan(source, PRESETS["nvfp4"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"down_proj_scales": (2, 64, 3)}, r"down_proj_scales has shape \[2, 64, 3\]"),
        ({"down_proj_scales": None}, "missing tensor .*down_proj_scales"),
    ],
)
def test_mxfp4_with_other_scales_is_refused(tmp_path, change, words):
    parent = "model.layers.0.mlp.experts."
    shapes = MXFP4 | {parent + name: shape for name, shape in change.items()}
    shapes = {name: shape for name, shape in shapes.items() if shape}
    source = plain(tmp_path, shapes, {name: "U8" for name in shapes if "bias" not in name})
    with pytest.raises(UserError, match=words):
        make_plan(source, PRESETS["nvfp4-experts"])


def test_names_in_include_are_quantized_too(target, draft):
    assert "lm_head" in [linear.module for linear in make_plan(target, PRESETS["nvfp4"], ["lm_head"]).linears]
    plan = make_plan(draft, PRESETS["nvfp4-mlp"], ["fc"])
    assert "fc" in [linear.module for linear in plan.linears] and "fc" not in plan.excluded


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("embed_tokens", "no 4-bit form"),
        ("model.embed_tokens", "no 4-bit form"),
        ("norm", "norm cannot be asked for"),
        ("fc", "there is no fc.weight"),
    ],
)
def test_other_names_in_include_are_refused(target, name, words):
    with pytest.raises(UserError, match=words):
        make_plan(target, PRESETS["nvfp4"], [name])


def test_a_tied_head_is_refused_and_excluded(tmp_path):
    source = write_target(tmp_path / "target", TARGETS["tiny-qwen3"] | {"tie_word_embeddings": True})
    with pytest.raises(UserError, match="lm_head is tied"):
        make_plan(source, PRESETS["nvfp4"], ["lm_head"])
    excluded = make_plan(source, PRESETS["nvfp4"]).excluded
    assert excluded == ("*embed_tokens", "*lm_head", "lm_head", "model.embed_tokens")


def test_inputs_not_divisible_by_16_are_refused(tmp_path):
    source = write_target(tmp_path / "target", TARGETS["tiny-qwen3"] | {"intermediate_size": 100})
    with pytest.raises(UserError, match=r"down_proj.weight has shape \[64, 100\].*16"):
        make_plan(source, PRESETS["nvfp4"])


@pytest.mark.parametrize("dtype", ["I8", "F64", "U8"])
def test_weights_of_other_types_are_refused(tmp_path, dtype):
    name = "layers.0.mlp.up_proj.weight"
    source = plain(tmp_path, {name: (16, 16)}, {name: dtype})
    with pytest.raises(UserError, match=f"{name} has dtype {dtype}"):
        make_plan(source, PRESETS["nvfp4"])


@pytest.mark.parametrize("shape", [(16,), (2, 16, 16), (0, 16)])
def test_weights_of_other_ranks_are_refused(tmp_path, shape):
    with pytest.raises(UserError, match="wanted are 2 axes"):
        make_plan(plain(tmp_path, {"layers.0.mlp.up_proj.weight": shape}), PRESETS["nvfp4"])


def test_a_preset_that_finds_nothing_is_refused(target):
    with pytest.raises(UserError, match=r"nvfp4-experts finds nothing.*nvfp4-mlp.*--draft-preset.*--target-only"):
        make_plan(target, PRESETS["nvfp4-experts"])


MODULE = "layers.0.mlp.up_proj"
PACKED = {
    "NVFP4": {f"{MODULE}.weight": "U8", f"{MODULE}.weight_scale": "F8_E4M3", f"{MODULE}.weight_scale_2": "F32"},
    "NVFP4 ": {"layers.0.mlp.experts.down_proj_weight_scale_2": "F32"},
    "FP8": {f"{MODULE}.weight": "F8_E4M3", f"{MODULE}.weight_scale": "F32"},
    "FP8 ": {f"{MODULE}.weight": "F8_E4M3"},
    "FP8 in blocks": {f"{MODULE}.weight": "F8_E4M3", f"{MODULE}.weight_scale_inv": "F32"},
    "compressed-tensors": {f"{MODULE}.weight_packed": "U8", f"{MODULE}.weight_scale": "F8_E4M3"},
    "GPTQ": {f"{MODULE}.qweight": "I32", f"{MODULE}.qzeros": "I32", f"{MODULE}.scales": "F16"},
    "bitsandbytes": {f"{MODULE}.weight": "U8", f"{MODULE}.weight.absmax": "F32"},
}


@pytest.mark.parametrize("form", PACKED)
def test_packed_weights_are_refused_by_format_and_name(tmp_path, form):
    source = plain(tmp_path, dict.fromkeys(PACKED[form], (16, 16)), PACKED[form])
    with pytest.raises(UserError, match=form.strip()) as caught:
        make_plan(source, PRESETS["nvfp4"])
    assert any(name in str(caught.value) for name in PACKED[form])


@pytest.mark.parametrize("pattern", [pattern for pattern, form in FORMATS.items() if form != "MXFP4"])
def test_what_the_reader_refuses_is_refused_by_the_same_name(tmp_path, pattern):
    name = pattern.replace("*", "layers.0")
    with pytest.raises(UserError, match=f"{name} tells of {FORMATS[pattern]}"):
        make_plan(plain(tmp_path, {name: (16,), f"{MODULE}.weight": (16, 16)}), PRESETS["nvfp4"])


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_configs_of_packed_weights_are_refused(tmp_path, key):
    source = plain(tmp_path, {f"{MODULE}.weight": (16, 16)}, **{key: {"quant_method": "awq"}})
    with pytest.raises(UserError, match=f"{key} names 'awq'"):
        make_plan(source, PRESETS["nvfp4"])


def test_a_config_of_mxfp4_over_plain_weights_is_refused(tmp_path):
    source = plain(tmp_path, {f"{MODULE}.weight": (16, 16)}, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UserError, match="no tensor is packed"):
        make_plan(source, PRESETS["nvfp4"])


def test_modelopts_own_file_is_refused(draft):
    (draft / "hf_quant_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"hf_quant_config.json is there.*quantized already"):
        make_plan(draft, PRESETS["nvfp4"])


def test_no_pattern_takes_a_router_or_a_norm():
    names = ("mlp.gate", "mlp.router", "mlp.shared_expert_gate", "input_layernorm", "self_attn.q_norm")
    for preset in PRESETS.values():
        assert not [n for n in names if any(fnmatchcase(n, pattern) for pattern in preset.linears)]
