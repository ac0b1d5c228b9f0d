"""Checkpoints that are packed already: MXFP4 experts, which can be cast, and the formats that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from dflash_trt.checkpoint.config import Config
from dflash_trt.checkpoint.declared import FLAT_KEY, NESTED_FILE
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.checkpoint.quantized import FORMATS
from dflash_trt.errors import UserError

BLOCKS = "*_blocks"  # MXFP4's, which can be cast
# The first pattern that fits tells the format.
TENSORS = {
    "*weight_scale_2": "NVFP4",
    **{pattern: form for pattern, form in FORMATS.items() if pattern != BLOCKS},
    "*.weight_scale": "FP8, INT8 or MXFP4",
}
FP8 = ("F8_E4M3", "F8_E5M2")
MXFP4 = "mxfp4"


def find_packed(source: Path, config: Config, tensors: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Blocks of MXFP4 experts by name → their scales; empty for plain weights. Raises UserError for other formats."""
    for pattern, form in TENSORS.items():
        if names := sorted(name for name in tensors if fnmatchcase(name, pattern)):
            raise _refusal(f"tensor {names[0]} tells of {form}", tensors[names[0]].file)
    for name, ref in sorted(tensors.items()):
        if ref.dtype in FP8:
            raise _refusal(f"{name} has dtype {ref.dtype}: the weights are FP8", ref.file)
    for key in (FLAT_KEY, "compression_config"):
        method = config.section(key).values.get("quant_method", "unknown") if key in config else MXFP4
        if method != MXFP4:
            raise _refusal(f"{key} names {method!r}", config.file)
    if (source / NESTED_FILE).exists():
        raise _refusal(f"{NESTED_FILE} is there", source)
    blocks = {name: ref for name, ref in sorted(tensors.items()) if name.endswith("_proj_blocks")}
    if not blocks and FLAT_KEY in config:
        fix = "remove the key if the weights were unpacked, or download again"
        raise UserError(f"{FLAT_KEY} names {MXFP4!r}, but no tensor is packed", where=config.file, fix=fix)
    return {name: _scales(ref, tensors) for name, ref in blocks.items()}


def _scales(blocks: TensorRef, tensors: Mapping[str, TensorRef]) -> TensorRef:
    name = blocks.name.removesuffix("_blocks") + "_scales"
    if name not in tensors:
        raise UserError(
            f"missing tensor {name}", where=blocks.file, fix="the blocks have no values without; download again"
        )
    scales = tensors[name]
    for ref in (blocks, scales):
        if ref.dtype != "U8":
            raise UserError(f"{ref.name} has dtype {ref.dtype}, MXFP4 has U8", where=ref.file, fix="download again")
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        what = f"{name} has shape {list(scales.shape)}, the blocks {list(blocks.shape)}"
        raise UserError(what, where=scales.file, fix="MXFP4 has one scale for a block of 16 bytes; download again")
    return scales


def _refusal(what: str, where: Path) -> UserError:
    return UserError(what, where=where, fix="it is quantized already; start from the BF16, F16 or F32 checkpoint")
