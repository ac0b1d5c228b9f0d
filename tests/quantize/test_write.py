"""The written checkpoint: its bytes, its ties, its two configs, and the files beside them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import load_tensor, nvfp4, read_draft, read_tensors
from dflash_trt.errors import Failure, UserError
from dflash_trt.quantize import PRESETS, Amax, make_plan, write_checkpoint
from dflash_trt.quantize.check import check_written
from tests.quantize.readers import READERS
from tests.tiny import edit_tensors, make_draft, make_target

SHARD = 12_000  # bytes: a tiny drafter becomes several files
WEIGHT_ONLY = PRESETS["nvfp4-weight-only"]


@pytest.fixture
def draft(tmp_path) -> Path:
    return make_draft(tmp_path / "draft")


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return {name: load_tensor(ref) for name, ref in read_tensors(directory).items()}


def change(directory: Path, name: str, edit) -> None:
    """Edit a tensor in place."""
    file = directory / "model.safetensors"
    values = load_file(file)
    edit(values[name])
    save_file(values, file, metadata={"format": "pt"})


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_packed_with_the_largest_amax_of_their_group_and_the_rest_is_copied(tmp_path, dtype):
    draft = make_draft(tmp_path / "draft", dtype=dtype)
    plan = make_plan(draft, WEIGHT_ONLY)
    done = write_checkpoint(plan, tmp_path / "out", None)
    before, after = tensors(draft), tensors(tmp_path / "out")
    for linear in plan.linears:
        weight, module = before[f"{linear.module}.weight"], linear.module
        members = [before[f"{other.module}.weight"] for other in plan.linears if other.group == linear.group]
        scale = nvfp4.global_scale(max(float(np.abs(w.astype(np.float32)).max()) for w in members))
        codes, scales = nvfp4.encode(weight, scale)
        assert after[f"{module}.weight"].tobytes() == codes.tobytes()
        assert after[f"{module}.weight_scale"].tobytes() == scales.tobytes()
        assert after[f"{module}.weight_scale_2"] == scale and after[f"{module}.weight_scale_2"].shape == ()
        assert f"{module}.input_scale" not in after
    for ref in plan.copied:
        assert after[ref.name].tobytes() == before[ref.name].tobytes()
    assert done.bytes_before == sum(value.nbytes for value in before.values())
    assert done.bytes_after == sum(value.nbytes for value in after.values())


def test_the_report_tells_error_and_outliers(draft, tmp_path):
    change(draft, "layers.0.mlp.up_proj.weight", lambda w: w.view(-1)[5].fill_(30))
    layers = write_checkpoint(make_plan(draft, WEIGHT_ONLY), tmp_path / "out", None).layers
    before, after = tensors(draft), tensors(tmp_path / "out")
    for layer in layers:
        exact = before[f"{layer.module}.weight"].astype(np.float64)
        packed = (after[f"{layer.module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
        rms = np.sqrt(np.square(exact).mean())
        assert layer.error == pytest.approx(np.sqrt(np.square(exact - nvfp4.decode(*packed)).mean()) / rms, rel=1e-4)
        assert layer.outlier == pytest.approx(np.abs(exact).max() / rms, rel=1e-4)
    assert layers[[layer.module for layer in layers].index("layers.0.mlp.up_proj")].outlier > 50


@pytest.mark.parametrize("factor", [1e-30, 1e38])
def test_the_error_is_right_beyond_the_squares_of_float32(factor, draft, tmp_path):
    name = "layers.0.mlp.down_proj"
    change(draft, f"{name}.weight", lambda w: w.mul_(factor))
    layers = write_checkpoint(make_plan(draft, WEIGHT_ONLY), tmp_path / "out", None).layers
    layer = next(layer for layer in layers if layer.module == name)
    assert 0.08 < layer.error < 0.11 and 3 < layer.outlier < 8


def test_groups_share_both_scales_whatever_calibration_found_for_the_members(draft, tmp_path):
    plan = make_plan(draft, PRESETS["nvfp4"])
    amax = {linear.module: Amax(1.0 + i, 10.0 * (1 + i)) for i, linear in enumerate(plan.linears)}
    write_checkpoint(plan, tmp_path / "out", amax)
    after = tensors(tmp_path / "out")
    for linear in plan.linears:
        members = [amax[other.module] for other in plan.linears if other.group == linear.group]
        assert after[f"{linear.module}.weight_scale_2"] == nvfp4.global_scale(max(one.weight for one in members))
        assert after[f"{linear.module}.input_scale"] == nvfp4.global_scale(max(one.input for one in members))


def test_block_maxima_of_a_search_are_used(draft, tmp_path):
    plan = make_plan(draft, PRESETS["nvfp4-mse"])
    chosen = plan.linears[0].module
    weight = tensors(draft)[f"{chosen}.weight"]
    block = 0.8 * np.abs(weight.astype(np.float32)).reshape(len(weight), -1, 16).max(-1)
    amax = {linear.module: Amax(None, 1.0, block if linear.module == chosen else None) for linear in plan.linears}
    write_checkpoint(plan, tmp_path / "out", amax)
    after = tensors(tmp_path / "out")
    codes, scales = nvfp4.encode(weight, after[f"{chosen}.weight_scale_2"], block)
    assert after[f"{chosen}.weight"].tobytes() == codes.tobytes()
    assert after[f"{chosen}.weight_scale"].tobytes() == scales.tobytes()


def test_one_input_amax_stands_for_all_inputs(draft, tmp_path):
    write_checkpoint(make_plan(draft, PRESETS["nvfp4-mlp"]), tmp_path / "out", None, input_amax=448.0)
    found = {float(value) for name, value in tensors(tmp_path / "out").items() if name.endswith("input_scale")}
    assert found == {float(np.float32(448) / np.float32(2688))}


def test_an_input_that_was_always_zero_gets_a_usable_scale(draft, tmp_path):
    write_checkpoint(make_plan(draft, PRESETS["nvfp4"]), tmp_path / "out", None, input_amax=0.0)
    assert tensors(tmp_path / "out")["layers.0.mlp.up_proj.input_scale"] == np.float32(6 / 2688)


def test_w4a4_without_the_inputs_range_is_refused_before_anything_is_written(draft, tmp_path):
    with pytest.raises(UserError, match=r"range of layers.0.*calibrate"):
        write_checkpoint(make_plan(draft, PRESETS["nvfp4"]), tmp_path / "out", {})
    assert names(tmp_path) == ["draft"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_calibration_that_overflowed_is_told(draft, tmp_path, value):
    plan = make_plan(draft, PRESETS["nvfp4"])
    amax = {linear.module: Amax(1.0, value) for linear in plan.linears}
    with pytest.raises(Failure, match=r"largest input of layers.0"):
        write_checkpoint(plan, tmp_path / "out", amax)


def test_both_configs_say_what_the_tensors_are_in_names_that_readers_understand(draft, tmp_path):
    for preset, algorithm in (("nvfp4-mlp", "NVFP4"), ("nvfp4-weight-only", "W4A16_NVFP4")):
        plan = make_plan(draft, PRESETS[preset])
        write_checkpoint(plan, tmp_path / preset, None, input_amax=1.0)
        nested = json.loads((tmp_path / preset / "hf_quant_config.json").read_text())
        config = json.loads((tmp_path / preset / "config.json").read_text())
        flat = config.pop("quantization_config")
        assert nested["quantization"] == {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": flat["ignore"],
        }
        packed = {linear.module for linear in plan.linears}
        linears = [name.removesuffix(".weight") for name, value in tensors(draft).items() if value.ndim == 2]
        for leaves in READERS:
            assert [leaves(f"model.{name}", flat["ignore"]) for name in linears] == [n not in packed for n in linears]
        read = read_draft(tmp_path / preset).quantization
        assert (read.algo, {*read.packed}) == (algorithm, packed)
        assert nested["producer"] == flat["producer"] and flat["producer"]["name"] == "modelopt"
        assert flat["producer"]["version"].startswith("dflash-trt ")
        assert (flat["quant_method"], flat["quant_algo"]) == ("modelopt", algorithm)
        group = flat["config_groups"]["group_0"]
        assert group["weights"] == {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        assert group.get("input_activations") == (group["weights"] if algorithm == "NVFP4" else None)
        assert config == json.loads((draft / "config.json").read_text())


def test_calibrated_scales_name_modelopts_version(draft, tmp_path):
    from importlib.metadata import version

    plan = make_plan(draft, PRESETS["nvfp4"])
    write_checkpoint(plan, tmp_path / "out", {linear.module: Amax(1.0, 1.0) for linear in plan.linears})
    producer = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["producer"]
    assert producer == {"name": "modelopt", "version": version("nvidia-modelopt")}


def test_the_checkers_catch_what_a_reader_would_stumble_over(draft, tmp_path):
    plan, out = make_plan(draft, WEIGHT_ONLY), tmp_path / "out"
    write_checkpoint(plan, out, None)
    check_written(plan, out)
    good = contents(out)
    q = "layers.0.self_attn.q_proj."
    change(out, q + "weight_scale_2", lambda w: w.mul_(2))
    with pytest.raises(Failure, match=r"q_proj.weight_scale_2.*differ"):
        check_written(plan, out)
    (out / "model.safetensors").write_bytes(good["model.safetensors"])
    change(out, q + "weight_scale", lambda w: w.view(torch.uint8).fill_(0x7F))
    with pytest.raises(Failure, match="NaN"):
        check_written(plan, out)
    edit_tensors(out, remove=[q + "weight_scale"])
    with pytest.raises(Failure, match=f"{q}weight_scale is None"):
        check_written(plan, out)
    (out / "model.safetensors").write_bytes(good["model.safetensors"])
    config = json.loads(good["config.json"])
    config["quantization_config"]["ignore"] = []
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(Failure, match="differ"):
        check_written(plan, out)
    nested = json.loads(good["hf_quant_config.json"])
    config["quantization_config"]["ignore"] = nested["quantization"]["exclude_modules"] = ["*.self_attn.*"]
    (out / "config.json").write_text(json.dumps(config))
    (out / "hf_quant_config.json").write_text(json.dumps(nested))
    with pytest.raises(Failure, match=r"self_attn\.\w+ is packed and in exclude_modules \(by \*\.self_attn\.\*\)"):
        check_written(plan, out)


def test_blocks_rows_and_whole_tensors_of_zeros_decode_to_zeros(draft, tmp_path):
    change(draft, "layers.0.mlp.up_proj.weight", lambda w: w[3].zero_() + w[7, 16:32].zero_().sum())
    change(draft, "layers.1.mlp.down_proj.weight", lambda w: w.zero_())
    write_checkpoint(make_plan(draft, WEIGHT_ONLY), tmp_path / "out", None)
    after = tensors(tmp_path / "out")

    def decoded(module: str) -> np.ndarray:
        return nvfp4.decode(*(after[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")))

    up = decoded("layers.0.mlp.up_proj")
    assert np.isfinite(up).all() and not up[3].any() and not up[7, 16:32].any() and up[7].any()
    assert (decoded("layers.1.mlp.down_proj") == 0).all()


@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj.weight", "norm.weight", "fc.weight"])
@pytest.mark.parametrize("given", [None, 1.0])
def test_nan_is_refused_with_name_and_place_and_nothing_is_left(draft, tmp_path, name, given):
    change(draft, name, lambda w: w.view(-1)[-1].fill_(float("nan")))
    plan = make_plan(draft, WEIGHT_ONLY)
    amax = given and {linear.module: Amax(given) for linear in plan.linears}
    with pytest.raises(UserError, match=rf"{name} holds 1 NaN and 0 Inf, the first at \[\d+"):
        write_checkpoint(plan, tmp_path / "out", amax, shard_bytes=SHARD)
    assert names(tmp_path) == ["draft"]


def test_shards_are_no_larger_than_asked_and_hold_the_same(draft, tmp_path):
    plan = make_plan(draft, WEIGHT_ONLY)
    write_checkpoint(plan, tmp_path / "one", None)
    write_checkpoint(plan, tmp_path / "many", None, shard_bytes=SHARD)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    largest = max(ref.nbytes for ref in plan.copied)
    assert all(file.stat().st_size <= max(SHARD, largest) + 8192 for file in files)
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert one.keys() == many.keys() and all(one[name].tobytes() == many[name].tobytes() for name in one)


def test_files_that_are_not_weights_come_along(draft, tmp_path):
    for name in (
        "LICENSE",
        "dflash.py",
        "original/dtypes.json",
        "model.safetensors.index.json",
        "old.bin",
        ".git/HEAD",
    ):
        (draft / name).parent.mkdir(exist_ok=True)
        (draft / name).write_text("{}")
    (draft / "model.safetensors.index.json").unlink()
    write_checkpoint(make_plan(draft, WEIGHT_ONLY), tmp_path / "out", None)
    expected = {"LICENSE", "config.json", "dflash.py", "hf_quant_config.json", "model.safetensors", "original"}
    assert {*names(tmp_path / "out")} == expected and (tmp_path / "out/original/dtypes.json").exists()


def test_a_targets_tokenizer_and_bare_names_survive(tmp_path):
    target = make_target(tmp_path / "target")
    write_checkpoint(make_plan(target, PRESETS["nvfp4-mlp"]), tmp_path / "out", None, input_amax=1.0)
    assert {*names(target)} | {"hf_quant_config.json"} == {*names(tmp_path / "out")}
