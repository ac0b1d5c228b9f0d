"""gpt-oss's MXFP4 experts become NVFP4 without another rounding, under the names that ModelOpt gives them."""

from __future__ import annotations

import functools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import load_tensor, mxfp4, nvfp4, read_tensors
from dflash_trt.errors import UserError
from dflash_trt.quantize import PRESETS, Amax, make_plan, write_checkpoint

EXPERTS = PRESETS["nvfp4-experts"]
LAYERS, E, HIDDEN, FFN = 2, 4, 64, 96
PARENT = "model.layers.{}.mlp.experts."


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """A tiny random GptOssForCausalLM as transformers saves it."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=E,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128,
        sliding_window=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    return {name: value.contiguous() for name, value in model.state_dict().items()}


def save(directory: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": LAYERS,
              "hidden_size": HIDDEN} | config  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_mxfp4(directory: Path, spread: int, seed: int = 0) -> Path:
    """The same model with its experts in MXFP4, whose exponents reach `spread` down from the largest of each tensor."""
    rng = np.random.default_rng(seed)
    tensors = dict(weights())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = (120 - rng.integers(0, spread + 1, blocks.shape[:3])).astype(np.uint8)
        scales[0, 0, 0], scales[-1, -1, -1] = 120, 120 - spread
        blocks[0, 1, 0], scales[0, 1, 0] = 0, 0  # as encoders write a block of zeros
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    return save(
        directory, tensors, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )


def tensors(directory: Path) -> dict[str, np.ndarray]:
    return {name: load_tensor(ref) for name, ref in read_tensors(directory).items()}


def decoded(found: dict[str, np.ndarray], module: str) -> np.ndarray:
    """[E, in, out]"""
    codes, scales = found[module].swapaxes(1, 2), found[f"{module}_weight_scale"].swapaxes(1, 2)
    return nvfp4.decode(codes, scales, found[f"{module}_weight_scale_2"]).swapaxes(1, 2)


def modules() -> list[str]:
    return [PARENT.format(layer) + name for layer in range(LAYERS) for name in ("down_proj", "gate_up_proj")]


def transformers_values(source: Path, module: str) -> np.ndarray:
    """[E, in, out], by the code that serves the original"""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found = load_file(source / "model.safetensors")
    values = convert_moe_packed_tensors(
        found[f"{module}_blocks"], found[f"{module}_scales"], dtype=torch.float32, rows_per_chunk=1 << 20
    )
    return values.numpy()


@pytest.mark.parametrize("spread", [0, 9, 16, 17])
def test_values_are_equal_bit_for_bit_up_to_a_spread_of_17(tmp_path, spread):
    source = make_mxfp4(tmp_path / "source", spread)
    done = write_checkpoint(make_plan(source, EXPERTS), tmp_path / "out", None, input_amax=448.0)
    found = tensors(tmp_path / "out")
    for module in modules():
        assert np.array_equal(decoded(found, module), transformers_values(source, module))
    assert {(layer.spread, layer.changed, layer.outside, layer.error) for layer in done.layers} == {(spread, 0, 0, 0.0)}
    assert {layer.blocks for layer in done.layers} == {E * HIDDEN * FFN // 32, E * HIDDEN * FFN // 16}


@pytest.mark.parametrize("spread", [18, 20, 29])
def test_beyond_it_the_report_tells_how_many_blocks_changed(tmp_path, spread):
    source = make_mxfp4(tmp_path / "source", spread)
    done = write_checkpoint(make_plan(source, EXPERTS), tmp_path / "out", None, input_amax=448.0)
    found = tensors(tmp_path / "out")
    for layer in done.layers:
        before, after = transformers_values(source, layer.module), decoded(found, layer.module)
        blocks = (before != after).swapaxes(1, 2).reshape(E, -1, before.shape[1] // 32, 32).any(-1)
        assert layer.changed == blocks.sum() > 0
        assert layer.spread == spread and layer.changed <= layer.outside < layer.blocks
        assert 0 < layer.error < 1e-4 and np.abs(before - after).max() < 2.0**-16 * np.abs(before).max()


def test_the_error_is_relative_to_the_weights_of_all_experts(tmp_path):
    """One expert so small that most of it is lost, beside others that are exact."""
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (E, 160, 2, 16), np.uint8), np.full((E, 160, 2), 120, np.uint8)
    scales[1], scales[1, 0, 0] = 100, 101
    name = PARENT.format(0) + "down_proj"
    tensors = {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    source = save(tmp_path / "source", tensors, quantization_config={"quant_method": "mxfp4"})
    (layer,) = write_checkpoint(make_plan(source, EXPERTS), tmp_path / "out", None, input_amax=448.0).layers
    exact = mxfp4.decode(blocks, scales).astype(np.float64)
    found = load_file(tmp_path / "out" / "model.safetensors")
    codes, block_scales = (found[n].view(torch.uint8).numpy().swapaxes(1, 2) for n in (name, f"{name}_weight_scale"))
    lost = exact - nvfp4.decode(codes, block_scales.view(nvfp4.FLOAT8), found[f"{name}_weight_scale_2"].numpy())
    assert layer.error == pytest.approx(np.sqrt(np.square(lost).sum() / np.square(exact).sum()), rel=1e-9)
    assert 0 < layer.error < 1e-6 and not lost[[0, 2, 3]].any()


def test_memory_is_a_few_times_an_experts_bytes_though_all_its_blocks_change(tmp_path):
    """Its values as float64 would be 16 times as large."""
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 2048, 60, 16), np.uint8), np.full((2, 2048, 60), 100, np.uint8)
    scales[1, 0, 0] = 120
    name = PARENT.format(0) + "down_proj"
    tensors = {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
    source = save(tmp_path / "source", tensors, quantization_config={"quant_method": "mxfp4"})
    plan = make_plan(source, EXPERTS)
    tracemalloc.start()
    (layer,) = write_checkpoint(plan, tmp_path / "out", None, input_amax=448.0).layers
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert layer.changed > 0.9 * layer.blocks and peak < 6 * blocks[0].nbytes


@pytest.mark.parametrize("spread", [9, 17, 29])
def test_bytes_are_modelopts_up_to_minus_zero(tmp_path, spread):
    from modelopt.torch.export import mxfp4_kmax, quantize_mxfp4_to_nvfp4_lossless

    source = make_mxfp4(tmp_path / "source", spread)
    write_checkpoint(make_plan(source, EXPERTS), tmp_path / "out", None, input_amax=448.0)
    before, after = load_file(source / "model.safetensors"), tensors(tmp_path / "out")
    for module in modules():
        blocks, scales = before[f"{module}_blocks"], before[f"{module}_scales"]
        packed, block_scales, scale, *_ = quantize_mxfp4_to_nvfp4_lossless(
            blocks.flatten(-2), scales, mxfp4_kmax(scales), "cpu"
        )
        ours = without_minus_zero(after[module].swapaxes(1, 2))
        theirs = without_minus_zero(packed.numpy())
        used = np.repeat(scales.numpy() > 0, 16, -1)  # theirs has other scales for blocks of zeros
        assert np.array_equal(ours[used], theirs[used])
        found = after[f"{module}_weight_scale"].swapaxes(1, 2).view(np.uint8)
        theirs = block_scales.view(torch.uint8).numpy()
        # Blocks that come to zero decode to zero with any scale.
        zero = (ours.reshape(*found.shape, 8) == 0).all(-1)
        assert np.array_equal(found[~zero], theirs[~zero])
        assert after[f"{module}_weight_scale_2"] == scale.numpy()


def without_minus_zero(codes: np.ndarray) -> np.ndarray:
    low, high = codes & 15, codes >> 4
    return np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4


def test_names_shapes_and_configs_are_modelopts(tmp_path):
    source = make_mxfp4(tmp_path / "source", 9)
    plan = make_plan(source, EXPERTS)
    amax = {linear.module: Amax(input=1.0 + i) for i, linear in enumerate(plan.linears)}
    write_checkpoint(plan, tmp_path / "out", amax)
    before, after = tensors(source), tensors(tmp_path / "out")
    for layer in range(LAYERS):
        for name, inputs, outputs in (("gate_up_proj", HIDDEN, 2 * FFN), ("down_proj", FFN, HIDDEN)):
            module = PARENT.format(layer) + name
            assert (after[module].dtype, after[module].shape) == (np.uint8, (E, inputs // 2, outputs))
            scales = after[f"{module}_weight_scale"]
            assert (scales.dtype, scales.shape) == (nvfp4.FLOAT8, (E, inputs // 16, outputs))
            assert after[f"{module}_weight_scale_2"].shape == after[f"{module}_input_scale"].shape == ()
            assert after[f"{module}_input_scale"] == nvfp4.global_scale(amax[module].input)
            assert np.array_equal(after[f"{module}_bias"], before[f"{module}_bias"])
    gone = {name for name in before if name.endswith(("_blocks", "_scales"))}
    assert not gone & after.keys() and before.keys() - gone <= after.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt" and "modules_to_not_convert" not in config
    layer = {
        f"model.layers.0.{name}"
        for name in ("mlp.router", *(f"self_attn.{p}_proj" for p in ("q", "k", "v", "qkv", "o")))
    }
    left = {name for name in plan.excluded if ".layers.1." not in name}
    globs = {name.replace("model.layers.0.", "*.") for name in layer} | {"*lm_head", "*embed_tokens"}
    assert left == layer | {"lm_head", "model.embed_tokens"} | globs


def test_the_inputs_range_is_needed(tmp_path):
    plan = make_plan(make_mxfp4(tmp_path / "source", 9), EXPERTS)
    with pytest.raises(UserError, match=r"experts\.down_proj's input is not known"):
        write_checkpoint(plan, tmp_path / "out", None)


def test_nan_scales_are_refused_by_name(tmp_path):
    source = make_mxfp4(tmp_path / "source", 9)
    found = load_file(source / "model.safetensors")
    name = PARENT.format(1) + "gate_up_proj_scales"
    found[name][1, 2, 1] = 255
    save_file(found, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} holds 1 NaN, the first at \[1, 2, 1\]"):
        write_checkpoint(make_plan(source, EXPERTS), tmp_path / "out", None, input_amax=448.0)


@pytest.mark.parametrize("preset", ["nvfp4-experts", "nvfp4-weight-only"])
def test_experts_in_bfloat16_are_quantized_into_the_same_layout(tmp_path, preset):
    source = save(tmp_path / "source", weights())
    plan = make_plan(source, PRESETS[preset])
    write_checkpoint(plan, tmp_path / "out", None, input_amax=448.0)
    found = tensors(tmp_path / "out")
    for module in modules():
        exact = weights()[module].float().numpy()
        scale = nvfp4.global_scale(float(np.abs(exact).max()))
        codes, scales = nvfp4.encode(exact.swapaxes(1, 2), scale)
        assert found[f"{module}_weight_scale_2"] == scale
        assert np.array_equal(decoded(found, module), nvfp4.decode(codes, scales, scale).swapaxes(1, 2))
        assert (f"{module}_input_scale" in found) == PRESETS[preset].activations


def test_quantizing_the_decoded_values_would_round_them_again(tmp_path):
    """Why there is a cast."""
    values = mxfp4.decode(*mxfp4.encode(np.random.default_rng(0).standard_normal((64, 64), np.float32)))
    scale = nvfp4.global_scale(float(np.abs(values).max()))
    assert not np.array_equal(nvfp4.decode(*nvfp4.encode(values, scale), scale), values)
