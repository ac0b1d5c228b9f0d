"""NVIDIA ModelOpt's part: it wraps the modules, watches the calibration text pass, and finds every amax.

Weights get block sizes of `type: static`, though their scales could be dynamic: then ModelOpt ties q/k/v and gate/up by
name while it calibrates (modelopt/torch/quantization/utils/shared_input.py), without CUDA. Its simulated forward needs
CUDA; the algorithm `max` never runs it. Inputs have one amax a tensor, and block scales found as the values come.
"""

from __future__ import annotations

import importlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dflash_trt.checkpoint.nvfp4 import BLOCK
from dflash_trt.errors import Failure, UserError
from dflash_trt.quantize.plan import Amax
from dflash_trt.quantize.presets import Preset

INSTALL = "pip install 'dflash-trt[quantize]'"
E2M1, E4M3 = (2, 1), (4, 3)  # ModelOpt's way to write a float format: exponent and mantissa bits
ALGORITHMS: dict[str, Any] = {"mse": {"method": "mse", "fp8_scale_sweep": True}}  # others go by their name alone
ONLY_MODELOPTS = ("awq_lite",)  # change the weights, so that ModelOpt has to write them (awq.py)
_NUMBER = re.compile(r"s\.\d+$")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")


def load(name: str) -> ModuleType:
    """Import a module that only calibration needs. Raises UserError that says how to install it."""
    try:
        with quiet():
            return importlib.import_module(name)
    except ImportError as error:
        what = f"{name.partition('.')[0]} cannot be imported ({error})"
        raise UserError(what, where="calibration", fix=INSTALL) from None


def check_device(preset: Preset) -> None:
    """Raises UserError if the preset's calibration cannot run on this machine. Nothing is loaded but torch."""
    if preset.needs_cuda and not load("torch").cuda.is_available():
        raise UserError(
            f"{preset.name} needs an NVIDIA GPU: its calibration runs ModelOpt's simulated forward",
            where="this machine has none that torch can use",
            fix="choose nvfp4, nvfp4-mlp or nvfp4-weight-only",
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep ModelOpt's prints, transformers' notes and both's warnings from the user: none asks for anything."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            if transformers := sys.modules.get("transformers"):
                transformers.utils.logging.disable_progress_bar()
            yield
    finally:
        logging.disable(before)


@dataclass(frozen=True)
class Probe:
    """The quantizers of one module to be."""

    module: str  # whatever the caller calls it
    weight: str | None  # the quantizer's name below the model; None where the weight is not ModelOpt's to see
    input: str | None  # None: weight only
    rows: int  # of the weight, to give the amax of blocks its shape


def probe(modules: Container[str], module: str, name: str, *, weight: bool, input: bool, rows: int) -> Probe:
    """Where ModelOpt will put the quantizers of the module `name`; `modules` are the names of all.

    Experts that the file has one by one are one module in transformers 5. Raises UserError if there is no such module.
    """
    if name in modules:
        stem, number = f"{name}.", ""
    elif match := EXPERT.fullmatch(name):
        stem, number = f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}_", match[2]
    else:  # all experts in one parameter (gpt-oss)
        stem, number = f"{name}_", ""
    if stem.rpartition(".")[0] not in modules:
        what = f"{name} is not in the model that transformers makes of the checkpoint"
        raise UserError(what, where=module, fix="give --input-amax to do without calibration")
    quantizer = f"{stem}weight_quantizers.{number}" if number else f"{stem}weight_quantizer"
    return Probe(module, quantizer if weight else None, f"{stem}input_quantizer" if input else None, rows)


def measure(model: Any, probes: Sequence[Probe], algorithm: str, forward: Callable[[], None]) -> list[Amax]:
    """Let ModelOpt calibrate the probed modules of `model`; `forward` runs all text through it. One amax a probe.

    The algorithm `mse`, which also hands over the amax it chose for each block, has never been run: it needs CUDA.
    Raises Failure naming a module whose input no text reached.
    """
    mtq = load("modelopt.torch.quantization")
    try:
        with quiet():
            mtq.quantize(model, _config(probes, algorithm), lambda _: forward())
    except AssertionError as error:  # its answer to NaN and Inf
        fix = "all weights are finite, so a layer overflows: calibrate a bfloat16 or float32 checkpoint"
        raise Failure(f"ModelOpt stopped calibrating, an activation is not finite: {error} — {fix}") from None
    if algorithm in ONLY_MODELOPTS:
        return [Amax()] * len(probes)
    modules = dict(model.named_modules())
    return [_read(p, modules, algorithm) for p in probes]


def _config(probes: Sequence[Probe], algorithm: str) -> dict[str, Any]:
    """Exactly the probed quantizers, all others off. The patterns are whole names, but for the numbers of experts: a
    pattern each would be matched against every other's quantizer."""

    def entry(name: str, kind: str) -> dict[str, Any]:
        sizes = {-1: BLOCK, "type": kind, "scale_bits": E4M3}
        return {"quantizer_name": name, "cfg": {"num_bits": E2M1, "block_sizes": sizes}}

    kind = "dynamic" if algorithm in ONLY_MODELOPTS else "static"
    weights = [entry(name, kind) for name in dict.fromkeys(_NUMBER.sub("s.*", p.weight or "") for p in probes) if name]
    inputs = [entry(name, "dynamic") for name in dict.fromkeys(p.input for p in probes) if name]
    off = {"quantizer_name": "*", "enable": False}
    return {"quant_cfg": [off, *weights, *inputs], "algorithm": ALGORITHMS.get(algorithm, algorithm)}


def _read(probe: Probe, modules: Mapping[str, Any], algorithm: str) -> Amax:
    weight = block = seen = None
    if probe.weight:
        quantizer = modules[probe.weight]
        weight = float(quantizer.amax.max())  # of the blocks' amaxes
        if algorithm == "mse":
            block, weight = quantizer.amax.reshape(probe.rows, -1).cpu().numpy(), float(quantizer.global_amax)
    if probe.input:
        if (amax := getattr(modules[probe.input], "amax", None)) is None:
            fix = "give other text with --calib, or one amax for all inputs with --input-amax"
            raise Failure(f"{probe.module} could not be calibrated: no text reached it — {fix}")
        seen = float(amax.max())
    return Amax(weight, seen, block)
