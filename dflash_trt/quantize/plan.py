"""Which tensors of a checkpoint become NVFP4, which go over as they are, and why some cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import numpy as np

from dflash_trt.checkpoint.config import Config, read_config
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.checkpoint.nvfp4 import BLOCK
from dflash_trt.checkpoint.stack import FLOATS
from dflash_trt.checkpoint.weights import read_tensors
from dflash_trt.errors import UserError
from dflash_trt.quantize.packed import find_packed
from dflash_trt.quantize.presets import GROUPS, ON_REQUEST, PRESETS, Preset

LAYER = re.compile(r"(?:model\.)?layers\.\d+\.")
# All experts of a layer in one tensor, and its axis that is hidden_size wide in gpt-oss's layout, [E, in, out]. Other
# families (Qwen3-MoE in transformers 5) have [E, out, in] under the same names.
FUSED = {"mlp.experts.gate_up_proj": 1, "mlp.experts.down_proj": 2}
Kind = Literal["linear", "experts", "mxfp4"]


@dataclass(frozen=True)
class Linear:
    """One tensor to quantize. Blocks of 16 run along the input axis in every kind."""

    module: str  # the tensor's name without ".weight", as the file spells it
    ref: TensorRef  # linear: [out, in]; experts: [E, in, out]; mxfp4: the blocks, [E, out, in/32, 16]
    group: str  # shared by those whose global scales are one
    kind: Kind = "linear"
    scales: TensorRef | None = None  # mxfp4: e8m0 [E, out, in/32]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, out, in); one expert in a linear"""
        shape = self.ref.shape
        match self.kind:
            case "linear":
                return 1, shape[0], shape[1]
            case "experts":
                return shape[0], shape[2], shape[1]
            case "mxfp4":
                return shape[0], shape[1], shape[2] * shape[3] * 2


@dataclass(frozen=True)
class Plan:
    """What is to be done to the checkpoint in `source`."""

    source: Path
    preset: Preset
    linears: tuple[Linear, ...]  # in the order of the file
    excluded: tuple[str, ...]  # modules left alone that a reader could think quantized
    copied: tuple[TensorRef, ...]  # tensors that go over byte for byte


@dataclass(frozen=True)
class Amax:
    """Largest magnitudes of one module, before groups are tied. What is None the writer takes from the weights."""

    weight: float | None = None
    input: float | None = None
    block: np.ndarray | None = None  # [out, in/16], where a search chose the block scales


def make_plan(source: Path, preset: Preset, include: Sequence[str] = ()) -> Plan:
    """Apply a preset to a checkpoint directory, a target's or a drafter's; `include` adds "fc" or "lm_head".

    Raises UserError, with the tensor's name, for weights that cannot be quantized or already are.
    """
    source = Path(source)
    config, tensors = read_config(source), read_tensors(source)
    mxfp4 = find_packed(source, config, tensors)
    if mxfp4 and not preset.mxfp4:
        name = next(iter(mxfp4))
        fix = f"choose --preset {_casting()}: it casts the experts; a drafter takes --draft-preset nvfp4-mlp"
        raise UserError(f"{name} is in MXFP4, which {preset.name} does not take", where=source, fix=fix)
    requested = _requested(source, config, tensors, include)
    linears = tuple(_linears(tensors, mxfp4, preset, requested))
    if not linears:
        others = ", ".join(name for name in PRESETS if name != preset.name)
        fix = f"choose another: {others}; --draft-preset is for the drafter alone, --target-only leaves it out"
        raise UserError(f"{preset.name} finds nothing to quantize", where=source, fix=fix)
    for linear in linears:
        _check(linear)
        if linear.kind == "experts":
            _check_layout(linear, config)
    taken = {ref.name for linear in linears for ref in (linear.ref, linear.scales) if ref}
    copied = tuple(ref for ref in _in_order(tensors) if ref.name not in taken)
    return Plan(source, preset, linears, _excluded(linears, copied, config), copied)


def _linears(
    tensors: Mapping[str, TensorRef], mxfp4: Mapping[str, TensorRef], preset: Preset, requested: set[str]
) -> Iterator[Linear]:
    for ref in _in_order(tensors):
        module = ref.name.removesuffix(".weight")
        inside = LAYER.match(ref.name)
        local = module[inside.end() :] if inside else ""
        wanted = any(fnmatchcase(local, pattern) for pattern in preset.linears)
        if module in requested or (wanted and module != ref.name):
            yield Linear(module, ref, _group(module))
        elif wanted and local in FUSED:
            yield Linear(module, ref, module, "experts")
        elif ref.name in mxfp4 and any(fnmatchcase(local.removesuffix("_blocks"), p) for p in preset.linears):
            module = ref.name.removesuffix("_blocks")
            yield Linear(module, ref, module, "mxfp4", mxfp4[ref.name])


def _in_order(tensors: Mapping[str, TensorRef]) -> list[TensorRef]:
    return sorted(tensors.values(), key=lambda ref: (ref.file.name, ref.offset, ref.name))


def _group(module: str) -> str:
    parent, _, name = module.rpartition(".")
    return next((f"{parent}.{group}" for group, members in GROUPS.items() if name in members), module)


def _requested(source: Path, config: Config, tensors: Mapping[str, TensorRef], include: Sequence[str]) -> set[str]:
    """The modules behind the names of `include`."""
    modules = set()
    for name in include:
        if "embed" in name:
            fix = "leave it out; a table lookup has no 4-bit form here"
            raise UserError(f"{name} cannot be quantized", where="--include", fix=fix)
        if name not in ON_REQUEST:
            fix = f"choose from {', '.join(ON_REQUEST)}; a preset decides about the layers"
            raise UserError(f"{name} cannot be asked for", where="--include", fix=fix)
        if name == "lm_head" and config.flag("tie_word_embeddings", False):
            fix = "leave it out: it is the embedding's table, which has no 4-bit form here"
            raise UserError("lm_head is tied to the embedding", where=config.file, fix=fix)
        found = [module for module in (name, f"model.{name}") if f"{module}.weight" in tensors]
        if not found:
            raise UserError(f"there is no {name}.weight", where=source, fix=f"leave {name} out of --include")
        modules |= {*found}
    return modules


def _check(linear: Linear) -> None:
    ref = linear.ref
    if linear.kind != "mxfp4" and ref.dtype not in FLOATS:
        fix = f"weights must be one of {', '.join(FLOATS)}"
        raise UserError(f"{ref.name} has dtype {ref.dtype}, which cannot be quantized", where=ref.file, fix=fix)
    axes = {"linear": 2, "experts": 3, "mxfp4": 4}[linear.kind]
    if len(ref.shape) != axes or 0 in ref.shape:
        what = f"{ref.name} has shape {list(ref.shape)}, wanted are {axes} axes, none of them empty"
        raise UserError(what, where=ref.file, fix="leave it out with another preset")
    if (width := linear.shape[2]) % BLOCK:
        raise UserError(
            f"{ref.name} has shape {list(ref.shape)}: its {width} inputs are not divisible by {BLOCK}",
            where=ref.file,
            fix="NVFP4 has one scale for 16 inputs; choose a preset that leaves this one alone",
        )


def _check_layout(linear: Linear, config: Config) -> None:
    """Are these experts [E, in, out]? Blocks along the wrong axis would be written without a complaint."""
    ref, hidden = linear.ref, config.integer("hidden_size")
    axis = next(axis for name, axis in FUSED.items() if ref.name.endswith(name))
    square = ref.shape[1] == ref.shape[2]
    if ref.shape[axis] == hidden and (not square or config.text("model_type", "") == "gpt_oss"):
        return
    what = f"{ref.name} has shape {list(ref.shape)}, which is not the [experts, in, out] of gpt-oss"
    fix = f"hidden_size is {hidden}; save the experts one by one, or choose a preset that leaves them alone"
    raise UserError(what, where=ref.file, fix=fix)


def _excluded(linears: Sequence[Linear], copied: Sequence[TensorRef], config: Config) -> tuple[str, ...]:
    """What readers must not take for packed: names as the file has them, what readers fuse them into, and globs.

    Readers mount a drafter elsewhere: TensorRT-LLM as `model.layers.0`, vLLM behind the target's layers as
    `model.layers.36`. vLLM compares the members' names, TensorRT-LLM that of its fused module and of all above it
    (`is_module_excluded_from_quantization`); both take globs, as NVIDIA's quantize_drafter.py writes them.
    """
    matrices = [ref.name for ref in copied if len(ref.shape) > 1]
    modules = {name.removesuffix(".weight") for name in matrices if name.endswith((".weight", *FUSED))}
    for parent in {module.rpartition(".")[0] for module in modules}:
        for fused, members in GROUPS.items():
            if {f"{parent}.{member}" for member in members} <= modules:
                modules.add(f"{parent}.{fused}")
    if any(module.endswith("embed_tokens") for module in modules) and config.flag("tie_word_embeddings", False):
        modules.add("lm_head")  # it has no tensor, but readers make a module of it
    packed = {name for linear in linears for name in (linear.module, linear.group)}
    globs = {glob for glob in map(_glob, modules) if not any(fnmatchcase(name, glob) for name in packed)}
    return tuple(sorted(modules | globs))


def _glob(module: str) -> str:
    """The module wherever a reader mounts it: `*.self_attn.q_proj`, `*fc`."""
    if inside := LAYER.match(module):
        return f"*.{module[inside.end() :]}"
    return f"*{module.removeprefix('model.')}"


def _casting() -> str:
    return next(preset.name for preset in PRESETS.values() if preset.mxfp4)
