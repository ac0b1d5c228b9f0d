"""ModelOpt writes TensorRT-LLM checkpoints as well; after what TensorRT-LLM 1.2's loader does to them, they are ours.

ModelOpt's export has other names for scales. `preprocess_perlayer_weights` (`models/modeling_utils.py`, 1.2) renames
them, adds the interleaved form and the product of the global scales. That is done here again, from its description.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from modelopt.torch.export import export_hf_checkpoint, export_tensorrt_llm_checkpoint
from modelopt.torch.quantization import NVFP4_DEFAULT_CFG, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dflash_trt.trtllm.export import export_pair
from tests.trtllm.export.pairs import make
from tests.trtllm.export.reading import tile_offset

DECODERS = {"tiny-llama": "llama", "tiny-qwen3": "qwen"}  # ModelOpt's names
SCALES = {"weights_scaling_factor_2": "weights_global_scaling_factor",
          "activation_scaling_factor": "activation_global_scaling_factor",
          "weights_scaling_factor": "weights_block_scaling_factor"}  # fmt: skip


@pytest.fixture(scope="module", params=DECODERS)
def calibrated(request, tmp_path_factory):
    """(family, drafter, a model that ModelOpt has calibrated)"""
    target, draft = make(tmp_path_factory.mktemp("pair"), request.param, target_config={"vocab_size": 252})
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    text = torch.randint(0, 252, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return request.param, target, draft, quantize(model, NVFP4_DEFAULT_CFG, lambda model: model(text))


def as_loaded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Network parameters of a file that ModelOpt has written."""
    loaded = {}
    for name, value in tensors.items():
        end = next((end for end in SCALES if name.endswith(end)), None)
        name = name.removesuffix(end) + SCALES[end] if end else name
        loaded[name] = value.reshape(1) if value.ndim == 0 else value
        if end == "weights_scaling_factor":
            loaded[f"{name}_interleaved"] = tiled(value)
    for name in [name for name in loaded if name.endswith("weights_global_scaling_factor")]:
        module = name.removesuffix("weights_global_scaling_factor")
        loaded[f"{module}alpha"] = loaded[name] * loaded[f"{module}activation_global_scaling_factor"]
    return loaded


def tiled(scales: torch.Tensor) -> torch.Tensor:
    rows, columns = (-(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4)
    flat = torch.zeros(rows * columns, dtype=torch.uint8)
    grid = torch.meshgrid(*(torch.arange(n) for n in scales.shape), indexing="ij")
    flat[tile_offset(*grid, columns)] = scales.view(torch.uint8)
    return flat.reshape(rows, columns).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_tensorrt_llm_makes_of_modelopts_file_is_ours(calibrated, tp, tmp_path):
    base, _, draft, model = calibrated
    unified, legacy, ours = tmp_path / "unified", tmp_path / "legacy", tmp_path / "ours"
    export_hf_checkpoint(copy.deepcopy(model), export_dir=unified)
    export_tensorrt_llm_checkpoint(
        copy.deepcopy(model), DECODERS[base], torch.bfloat16, export_dir=legacy, inference_tensor_parallel=tp
    )
    export_pair(unified, draft, ours, tp=tp)
    for rank in range(tp):
        made = load_file(ours / f"target/rank{rank}.safetensors")
        want = as_loaded(load_file(legacy / f"rank{rank}.safetensors"))
        assert made.keys() == want.keys()
        for name, value in want.items():
            assert made[name].dtype == value.dtype, name
            assert torch.equal(made[name].view(torch.uint8), value.view(torch.uint8)), name


def test_our_config_says_what_modelopts_says(calibrated, tmp_path):
    base, _, draft, model = calibrated
    export_hf_checkpoint(copy.deepcopy(model), export_dir=tmp_path / "unified")
    export_tensorrt_llm_checkpoint(
        copy.deepcopy(model),
        DECODERS[base],
        torch.bfloat16,
        export_dir=tmp_path / "legacy",
        inference_tensor_parallel=2,
    )
    export_pair(tmp_path / "unified", draft, tmp_path / "ours", tp=2)
    ours, theirs = (json.loads((tmp_path / p / "config.json").read_text()) for p in ("ours/target", "legacy"))
    differ = {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    assert differ == {"logits_dtype", "quantization"}  # ours are float32, TensorRT-LLM's own default
    assert ours["quantization"].items() >= theirs["quantization"].items()
    # Theirs lack what transformers 5 moved into rope_parameters, and what Qwen3 adds to Qwen.
    assert "rotary_base" in ours.keys() - theirs.keys()
