"""Torch models that compute with an NVFP4 checkpoint's values: references for quantized engines.

Weights are unpacked to float32; where the checkpoint has input scales, every input of that layer is rounded first, by
ml_dtypes' float8 and float4 types, which know nothing of how the engine's graph does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.checkpoint import Draft, Target, load_tensor, nvfp4
from dflash_trt.checkpoint.experts import is_fused
from dflash_trt.checkpoint.quantized import PARTS, part_name

E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn


def weights(checkpoint: Target | Draft) -> Iterator[tuple[str, np.ndarray]]:
    """Every weight in float32, by its key."""
    packed = checkpoint.quantization.packed if checkpoint.quantization else {}
    parts = {part_name(module, part) for module in packed for part in PARTS}
    for name, ref in checkpoint.tensors.items():
        if name not in parts:
            yield name, load_tensor(ref).astype(np.float32)
    for module in packed:
        codes, scales, scalar = (
            load_tensor(checkpoint.tensors[part_name(module, part)]) for part in PARTS if part != "input_scale"
        )
        scale = np.float32(scalar.reshape(()))
        if is_fused(module):  # [E, in/2, out]
            values = nvfp4.decode(codes.swapaxes(1, 2), scales.swapaxes(1, 2), scale).swapaxes(1, 2)
        else:
            values = nvfp4.decode(codes, scales, scale)
        yield part_name(module, "weight"), values


def round_inputs(model: Any, checkpoint: Target | Draft) -> None:
    """Make the W4A4 layers of a torch model, whose modules are named as the keys, round what they are given."""
    packed = checkpoint.quantization.packed if checkpoint.quantization else {}
    for module in (module for module, activations in packed.items() if activations):
        scale = np.float32(load_tensor(checkpoint.tensors[part_name(module, "input_scale")]).reshape(()))
        parent, _, name = module.rpartition(".")
        if not is_fused(module):
            model.get_submodule(module).register_forward_pre_hook(_rounding(scale))
        elif name == "gate_up_proj":
            model.get_submodule(parent).register_forward_pre_hook(_rounding(scale))
        else:  # between the two products there is no module to hook
            _round_result(model.get_submodule(parent), "_apply_gate", scale)


def _round_result(module: Any, method: str, scale: np.float32) -> None:
    exact = getattr(module, method)

    def rounding(*inputs: Any) -> Any:
        x = exact(*inputs)
        return x.new_tensor(rounded(x.numpy(), scale))

    setattr(module, method, rounding)


def _rounding(scale: np.float32) -> Any:
    def hook(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        return (x.new_tensor(rounded(x.numpy(), scale)), *inputs[1:])

    return hook


def rounded(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """x float32 [..., in] → the NVFP4 values nearest to it under the global scale; a block that underflows is zero."""
    blocks = x.reshape(*x.shape[:-1], -1, nvfp4.BLOCK)
    wanted = np.abs(blocks).max(-1, keepdims=True) / (np.float32(nvfp4.E2M1_MAX) * scale)
    block_scales = np.minimum(wanted, np.float32(nvfp4.E4M3_MAX)).astype(E4M3).astype(np.float32) * scale
    ratios = np.divide(blocks, block_scales, out=np.zeros_like(blocks), where=block_scales > 0)
    ratios = ratios.clip(-nvfp4.E2M1_MAX, nvfp4.E2M1_MAX)
    return (ratios.astype(E2M1).astype(np.float32) * block_scales).reshape(x.shape)
