"""Projections of any precision: whoever projects names the weights, the tensors say how they are stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from dflash_trt.graph.collective import all_reduce
from dflash_trt.graph.net import Net
from dflash_trt.graph.nvfp4 import round_rows, unpack
from dflash_trt.graph.weights import Weights


def project(
    net: Net,
    weights: Weights,
    x: ir.Value,
    *modules: str,
    residual: ir.Value | None = None,
    summed_over: Sequence[int] = (),
) -> ir.Value:
    """x [T, in] through all modules at once → their outputs side by side, [T, sum of out] (+ residual).

    Unquantized weights are stacked into one product. A packed weight has a product of its own, for TensorRT takes 4-bit
    constants nowhere but right before DequantizeLinear; activations that several of them scale alike are rounded once.

    `summed_over`: the ranks of which each holds some of a single module's inputs; bias and residual are added to their
    sum.
    """
    if len(summed_over) > 1:
        (module,) = modules
        (rounded,) = _rounded(net, weights, x, modules)
        whole = all_reduce(net, net.linear(rounded, _weight(net, weights, module)), summed_over)
        extra = _sum(net, weights.bias(f"{module}.bias"), residual)
        return whole if extra is None else net.add(whole, extra)
    if not any(weights.is_packed(module) for module in modules):
        bias = weights.bias(*(f"{module}.bias" for module in modules))
        return net.linear(x, weights(*(f"{module}.weight" for module in modules)), _sum(net, bias, residual))
    outputs = []
    for module, rounded in zip(modules, _rounded(net, weights, x, modules), strict=True):
        bias = weights.bias(f"{module}.bias")
        outputs.append(net.linear(rounded, _weight(net, weights, module), _sum(net, bias, residual)))
    return net.concat(outputs, axis=-1)


def _rounded(net: Net, weights: Weights, x: ir.Value, modules: Sequence[str]) -> list[ir.Value]:
    """x as each module takes it."""
    made: dict[float | None, ir.Value] = {None: x}  # by input scale
    scales = [weights.input_scale(module) for module in modules]
    for scale in scales:
        if scale not in made:
            made[scale] = round_rows(net, x, net.const(scale, np.float32))
    return [made[scale] for scale in scales]


def _weight(net: Net, weights: Weights, module: str) -> ir.Value:
    """[out, in] in the graph's dtype."""
    if not weights.is_packed(module):
        return weights(f"{module}.weight")
    packed = weights.packed(module)
    return net.once(packed[0], lambda: unpack(net, *packed))  # the drafter projects context and block with the same


def _sum(net: Net, bias: ir.Value | None, residual: ir.Value | None) -> ir.Value | None:
    """What is added to the product rides on it."""
    if bias is None or residual is None:
        return residual if bias is None else bias
    return net.add(residual, bias)
