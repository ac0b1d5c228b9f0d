"""From an op's shapes to the kernel that computes it and how TensorRT launches it. No TensorRT here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import Failure, UserError
from dflash_trt.plugins import kernels
from dflash_trt.plugins.compile import SMS, Compiled, compile_kernel
from dflash_trt.plugins.kernels.spec import DTYPES, Kernel
from dflash_trt.plugins.tensorrt.expressions import INTEGERS, Algebra, evaluate
from dflash_trt.plugins.tensorrt.ops import TYPE_CODES, Plugin, T, Tensor

POINTERS = DTYPES | {"float32": "*fp32", "int64": "*i64", "int32": "*i32"}
TUNED = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "int64": "INT64", "int32": "INT32"}


@dataclass(frozen=True)
class Launch:
    """What `aot_impl` gives TensorRT. Grid and numbers are ints, or symbols where a size is dynamic."""

    compiled: Compiled
    grid: tuple[Any, Any, Any]
    numbers: tuple[Any, ...]  # the kernel's integers, between the inputs and the outputs


def check_sm(sm: int) -> None:
    """Refuse a GPU that no kernel is compiled for."""
    if sm not in SMS:
        fix = f"plugins are compiled for {', '.join(map(str, SMS))}; convert with --ops native"
        raise UserError(f"there are no plugins for SM{sm}", where="dflash plugins", fix=fix)


def name_sizes(tensors: Sequence[Tensor], shapes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Sizes by name, from the shapes of the inputs. A dimension is an int where it is static, else anything."""
    sizes: dict[str, Any] = {}
    for tensor in tensors:
        shape = shapes[tensor.name]
        if len(shape) != len(tensor.axes):
            raise UserError(f"{tensor.name} has {len(shape)} dimensions", fix=f"they are {', '.join(tensor.axes)}")
        for axis, size in zip(tensor.axes, shape, strict=True):
            known = int(axis) if axis.isdigit() else sizes.get(axis, size)
            if isinstance(known, int) and isinstance(size, int) and known != size:
                raise UserError(f"dimension {axis} of {tensor.name} is {size}, elsewhere {known}")
            if not axis.isdigit() and not isinstance(sizes.get(axis), int):
                sizes[axis] = size
    return sizes


def choose(plugin: Plugin, sizes: Mapping[str, Any], dtypes: Mapping[str, str]) -> list[Kernel]:
    """The kernels that compute an op at these sizes (attributes among them); several are tactics of one op.

    Raises UserError for what is not supported, naming what is.
    """
    where = plugin.id
    op = plugin.op
    kind = activation(plugin, sizes, dtypes)
    wanted = {axis for tensor in plugin.inputs for axis in tensor.axes} & set(op.static)
    if dynamic := sorted(name for name in wanted if not isinstance(sizes.get(name), int)):
        raise UserError(f"dimension {', '.join(dynamic)} is not static", where=where, fix="fix it in the network")
    for rule in op.rules:
        if not _holds(rule, sizes):
            raise UserError(f"sizes do not fit: {rule} does not hold", where=where, fix=f"they are {_told(sizes)}")
    config = op.config({**sizes, **dict.fromkeys((tensor.name for tensor in plugin.inputs), True)}, kind)
    pointers = [(tensor.name, POINTERS[dtypes[tensor.name]]) for tensor in plugin.inputs]
    found = [
        kernel
        for kernel in kernels.load(op.file, config)
        if kernel.op == op.name
        and [(argument.name, argument.type) for argument in kernel.inputs] == pointers
        and all(sizes[name] == value for name, value in kernel.constants.items() if isinstance(sizes.get(name), int))
    ]
    if not found:
        raise Failure(f"no kernel of {op.file} takes {pointers} at {_told(sizes)} — {where}")
    return found


def _holds(rule: str, sizes: Mapping[str, Any]) -> bool:
    """Whether a rule holds, as far as its sizes are there and static."""
    left, relation, right = re.split(r" (=|<=) ", rule)
    if not all(isinstance(sizes.get(name), int) for name in re.findall(r"[A-Za-z_]\w*", left + " " + right)):
        return True
    a, b = evaluate(left, sizes), evaluate(right, sizes)
    return a == b if relation == "=" else a <= b


def _told(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if isinstance(size, (int, float)))


def describe(
    plugin: Plugin,
    sizes: Mapping[str, Any],
    dtypes: Mapping[str, str],
    algebra: Algebra = INTEGERS,
    *,
    fake: bool = False,
) -> list[tuple[Tensor, str, list[Any]]]:
    """Type and shape of each output. `fake`: sizes are not known yet; so are the shapes, None in each place."""
    kind, names = activation(plugin, sizes, dtypes), dict(sizes)
    if not fake:
        kernel = choose(plugin, sizes, dtypes)[0]
        names = {**kernel.constants, **names, "grid_y": evaluate(kernel.grid[1], sizes, algebra)}
    return [
        (
            tensor,
            kind if tensor.dtypes == T else tensor.dtypes[0],
            [None if fake else evaluate(axis, names, algebra) for axis in tensor.axes],
        )
        for tensor in plugin.op.outputs
    ]


def activation(plugin: Plugin, sizes: Mapping[str, Any], dtypes: Mapping[str, str]) -> str:
    """T: the one type of an op's activations, or its attribute `to`. Raises UserError for a type that it does not
    take."""
    where = plugin.id
    for tensor in plugin.inputs:
        if dtypes[tensor.name] not in tensor.dtypes:
            what = f"input {tensor.name} has type {dtypes[tensor.name]}"
            raise UserError(what, where=where, fix=f"it may have {' or '.join(tensor.dtypes)}")
    found = {dtypes[tensor.name] for tensor in plugin.inputs if tensor.dtypes == T}
    if "to" in plugin.attributes:
        if sizes["to"] not in TYPE_CODES:
            raise UserError(f"attribute to is {sizes['to']}", where=where, fix=f"it may be one of {TYPE_CODES}")
        found = {TYPE_CODES[sizes["to"]]}
    if len(found) > 1:
        raise UserError(f"inputs have types {' and '.join(sorted(found))}", where=where, fix="give them one type")
    return next(iter(found), T[0])


def io_types(plugin: Plugin, sizes: Mapping[str, Any], dtypes: Mapping[str, str]) -> str:
    """The types of inputs and outputs as `AutoTuneCombination` spells them."""
    kind = activation(plugin, sizes, dtypes)
    inputs = [dtypes[tensor.name] for tensor in plugin.inputs]
    outputs = [kind if tensor.dtypes == T else tensor.dtypes[0] for tensor in plugin.op.outputs]
    return ", ".join(TUNED[dtype] for dtype in (*inputs, *outputs))


def launch(kernel: Kernel, sm: int, sizes: Mapping[str, Any], algebra: Algebra = INTEGERS) -> Launch:
    """The PTX for an SM and its launch expressions over these sizes."""
    if wide := [argument.name for argument in kernel.numbers if argument.type != "i32"]:
        raise Failure(f"{kernel.op}: TensorRT passes integers of 32 bits alone, not {', '.join(wide)}")
    grid = tuple(evaluate(text, sizes, algebra) for text in kernel.grid)
    numbers = tuple(evaluate(argument.value or argument.name, sizes, algebra) for argument in kernel.numbers)
    return Launch(compile_kernel(kernel, sm), (grid[0], grid[1], grid[2]), numbers)
