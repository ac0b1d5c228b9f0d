"""What a checkpoint says about its quantization, in the two forms that readers look for, from one source.

`hf_quant_config.json` (nested) is what TensorRT-LLM and SGLang read first; `quantization_config` in config.json (flat)
is what transformers and vLLM look at. Both are those of ModelOpt 0.47.

W4A4 is read everywhere. W4A16 is read by vLLM and TensorRT-LLM since mid 2026 only: TensorRT-LLM 1.2 does not know the
name, and SGLang builds its W4A4 layers for any NVFP4 algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dflash_trt import __version__
from dflash_trt.checkpoint.declared import W4A4, W4A16
from dflash_trt.checkpoint.nvfp4 import BLOCK


def quant_configs(
    excluded: Sequence[str], *, activations: bool, calibrated: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(content of hf_quant_config.json, value of quantization_config)"""
    algorithm, producer = W4A4 if activations else W4A16, _producer(calibrated)
    nested = {
        "producer": producer,
        "quantization": {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": list(excluded),
        },
    }
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    group: dict[str, Any] = {"input_activations": dict(numbers)} if activations else {}
    flat = {
        "config_groups": {"group_0": group | {"weights": dict(numbers), "targets": ["Linear"]}},
        "ignore": list(excluded),
        "quant_algo": algorithm,
        "group_size": BLOCK,  # ModelOpt has it in the groups alone, TensorRT-LLM and vLLM look for it here
        "producer": producer,
        "quant_method": "modelopt",
    }
    return nested, flat


def _producer(calibrated: bool) -> dict[str, str]:
    """SGLang and vLLM take hf_quant_config.json only if its producer's name is "modelopt" (their `get_quant_config`).

    It is the name of the format, then. No reader looks at the version: it tells who found the scales.
    """
    if calibrated:
        try:
            return {"name": "modelopt", "version": version("nvidia-modelopt")}
        except PackageNotFoundError:
            pass
    return {"name": "modelopt", "version": f"dflash-trt {__version__}"}
