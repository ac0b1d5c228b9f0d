"""Read back what was written: the tensors, the ties and the two configs must say the same."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint.config import read_json
from dflash_trt.checkpoint.declared import FLAT_KEY, NESTED_FILE, W4A4
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.checkpoint.scan import scan
from dflash_trt.checkpoint.weights import load_tensor, read_tensors
from dflash_trt.errors import Failure
from dflash_trt.quantize.pack import slots
from dflash_trt.quantize.plan import Plan
from dflash_trt.quantize.ties import groups


def check_written(plan: Plan, directory: Path) -> None:
    """Raises Failure for anything a reader would stumble over or, worse, would not."""
    tensors = read_tensors(directory)
    expected = {ref.name: (ref.dtype, ref.shape) for ref in plan.copied}
    for linear in plan.linears:
        expected |= {slot.name: (slot.dtype, slot.shape) for slot in slots(linear, plan.preset.activations)}
    found = {name: (ref.dtype, ref.shape) for name, ref in tensors.items()}
    if differing := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        name = differing[0]
        raise _failure(f"{name} is {found.get(name)}, wanted was {expected.get(name)}", directory)
    _check_scales(plan, tensors, directory)
    _check_configs(plan, directory)


def _check_scales(plan: Plan, tensors: Mapping[str, TensorRef], directory: Path) -> None:
    for group, members in groups(plan).items():
        named = [slots(linear, plan.preset.activations)[1:] for linear in members]
        for blocks, *_ in named:
            if bad := scan(tensors[blocks.name]):
                raise _failure(str(bad), directory)
        for same in list(zip(*named, strict=True))[1:]:  # weight_scale_2, input_scale
            values = [load_tensor(tensors[slot.name])[()] for slot in same]
            if not all(np.isfinite(value) and value > 0 for value in values):
                raise _failure(f"{same[0].name} is {values[0]}", directory)
            if len({*values}) > 1:
                names = ", ".join(slot.name for slot in same)
                raise _failure(f"{names} differ in {group}: {values}", directory)


def _check_configs(plan: Plan, directory: Path) -> None:
    nested, flat = read_json(directory / NESTED_FILE)["quantization"], read_json(directory / "config.json")[FLAT_KEY]
    said = nested["quant_algo"], nested["exclude_modules"], nested["group_size"]
    if said != (flat["quant_algo"], flat["ignore"], flat["group_size"]):
        raise _failure(f"{NESTED_FILE} and config.json differ", directory)
    if (nested["quant_algo"] == W4A4) != plan.preset.activations:
        raise _failure(f"quant_algo is {nested['quant_algo']}", directory)
    for linear in plan.linears:
        if by := next((glob for glob in nested["exclude_modules"] if fnmatchcase(linear.module, glob)), None):
            raise _failure(f"{linear.module} is packed and in exclude_modules (by {by})", directory)


def _failure(what: str, directory: Path) -> Failure:
    return Failure(f"{what} — {directory} — this is a bug in the writer; nothing was put in place")
