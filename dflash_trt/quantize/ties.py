"""Projections that readers fuse get one global scale for their weights and one for their input: the larger amax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from dflash_trt.checkpoint.nvfp4 import E2M1_MAX, global_scale
from dflash_trt.errors import Failure, UserError
from dflash_trt.quantize.plan import Amax, Linear, Plan


def groups(plan: Plan) -> dict[str, list[Linear]]:
    """Group → its members, in the order of the file."""
    found: dict[str, list[Linear]] = {}
    for linear in plan.linears:
        found.setdefault(linear.group, []).append(linear)
    return found


def tie(plan: Plan, amax: Mapping[str, Amax] | None, input_amax: float | None = None) -> dict[str, Amax]:
    """Module → the largest magnitudes of its group; None where they are to be taken from the weights.

    `input_amax` stands in for inputs that `amax` does not tell of. Raises UserError if inputs are to be quantized and
    their range is unknown, Failure if calibration met NaN or Inf.
    """
    tied = {}
    for members in groups(plan).values():
        given = [(amax or {}).get(linear.module, Amax()) for linear in members]
        weight = _largest([one.weight for one in given], members, "weight")
        inputs = None
        if plan.preset.activations:
            inputs = _largest([input_amax if one.input is None else one.input for one in given], members, "input")
            if inputs is None:
                raise UserError(
                    f"the range of {members[0].module}'s input is not known",
                    where=f"--preset {plan.preset.name}",
                    fix="calibrate, or choose nvfp4-weight-only",
                )
        for linear, one in zip(members, given, strict=True):
            tied[linear.module] = Amax(weight, inputs, one.block)
    return tied


def input_scale(amax: float) -> np.float32:
    """Of inputs whose largest magnitude is `amax`. Where calibration saw only zeros, ModelOpt warns and takes 6."""
    return global_scale(amax or E2M1_MAX)


def _largest(values: Sequence[float | None], members: Sequence[Linear], what: str) -> float | None:
    for value, linear in zip(values, members, strict=True):
        if value is not None and not (math.isfinite(value) and value >= 0):
            fix = "did a layer overflow? Calibrate in bfloat16 or float32"
            raise Failure(f"calibration found {value} as the largest {what} of {linear.module} — {fix}")
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
