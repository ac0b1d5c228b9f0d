"""Checkpoints with NVFP4 weights, packed here tensor by tensor, so that readers are tested without the writer.

pack(draft, "*.mlp.*")                       # W4A4, with both configs
pack(target, "*_proj", activations=False)    # W4A16
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from dflash_trt.checkpoint import nvfp4

INPUT_AMAX = 8.0


def pack(directory: Path, *patterns: str, activations: bool = True, input_amax: float = INPUT_AMAX) -> list[str]:
    """Pack the weights of the modules that match; each by its own global scale. Returns the modules."""
    file = directory / "model.safetensors"
    tensors: dict[str, np.ndarray] = dict(load_file(file))
    linears = [n.removesuffix(".weight") for n, t in tensors.items() if t.ndim == 2 and "embed_tokens" not in n]
    modules = [module for module in linears if any(fnmatch.fnmatch(module, pattern) for pattern in patterns)]
    for module in modules:
        tensors |= packed(module, tensors[f"{module}.weight"], input_amax if activations else None)
    save_file(tensors, file, metadata={"format": "pt"})
    declare(directory, [m for m in linears if m not in modules], algo="NVFP4" if activations else "W4A16_NVFP4")
    return modules


def packed(module: str, weight: np.ndarray, input_amax: float | None) -> dict[str, np.ndarray]:
    scale = nvfp4.global_scale(float(np.abs(weight.astype(np.float32)).max()))
    codes, scales = nvfp4.encode(weight, scale)
    parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": np.array(scale)}
    if input_amax is not None:
        parts["input_scale"] = np.array(nvfp4.global_scale(input_amax))
    return {f"{module}.{part}": array for part, array in parts.items()}


def declare(directory: Path, excluded: list[str], algo: str, **nested: object) -> None:
    """Both configs, as ModelOpt writes them; `nested` changes hf_quant_config.json alone."""
    quantization = {"quant_algo": algo, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": excluded}
    _write(
        directory / "hf_quant_config.json",
        {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization | nested},
    )
    file = directory / "config.json"
    flat = {"quant_method": "modelopt", "quant_algo": algo, "ignore": excluded}
    _write(file, json.loads(file.read_text()) | {"quantization_config": flat})


def redeclare(directory: Path, changes: Mapping[str, object]) -> None:
    """Change keys of hf_quant_config.json, with no regard for what the tensors are."""
    file = directory / "hf_quant_config.json"
    value = json.loads(file.read_text())
    value["quantization"] |= changes
    _write(file, value)


def zero(directory: Path, name: str, row: int | None, begin: int, end: int) -> None:
    """Zero columns begin … end-1 of one row of a weight, or of all rows."""
    file = directory / "model.safetensors"
    tensors = dict(load_file(file))
    tensors[name] = tensors[name].copy()
    tensors[name][slice(None) if row is None else row, begin:end] = 0
    save_file(tensors, file, metadata={"format": "pt"})


def _write(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
