"""What TensorRT is handed, up to the call into it: names, types, shapes, launch expressions. It is not installed."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dflash_trt.errors import Failure, UserError
from dflash_trt.plugins import kernels
from dflash_trt.plugins.tensorrt import PLUGINS, Plugin, register
from dflash_trt.plugins.tensorrt.expressions import evaluate
from dflash_trt.plugins.tensorrt.launch import choose, describe, io_types, name_sizes
from dflash_trt.plugins.tensorrt.register import signature
from tests.plugins.cases import CASES, SYMBOLS, TORCH, Case, Symbol, facts, pointer, recorded

DYNAMIC = ("B", "Q", "S", "N", "C", "splits")  # sizes that a network may leave open


@pytest.fixture(params=CASES, ids=lambda case: f"{case.plugin}-{case.dtype}")
def case(request) -> Case:
    return request.param


def test_the_plugin_launches_what_the_launcher_launches(case, monkeypatch):
    """Grid, arguments in order and type, constants, warps: what TensorRT gets is what the interpreter's tests test."""
    plugin, inputs = PLUGINS[case.plugin], case.inputs
    made = recorded(case, inputs, monkeypatch)
    dtypes, sizes = facts(plugin, inputs, case.attributes)
    kernel, *others = choose(plugin, sizes, dtypes)
    assert not others
    assert tuple(evaluate(text, sizes) for text in kernel.grid) == made.grid
    given = [argument for argument in made.arguments if argument is not None]
    assert len(given) == len(kernel.arguments)
    for argument, value in zip(kernel.arguments, given, strict=True):
        if argument.pointer:
            assert pointer(value) == argument.type
        else:
            assert value == evaluate(argument.value or argument.name, sizes)
    made_before = {"sums", "partial", "lse"}  # by the launch before
    assert all(
        value is inputs[argument.name]
        for argument, value in zip(kernel.inputs, given, strict=False)
        if argument.name not in made_before
    )
    constants = {name: value for name, value in kernel.constants.items() if value is not None}
    assert {name: made.constants[name] for name in constants} == constants
    assert made.constants.get("num_warps", 4) == kernel.num_warps
    assert made.constants.get("num_stages", 2) == kernel.num_stages


def test_outputs_have_the_types_and_shapes_that_the_launcher_allocates(case, monkeypatch):
    plugin, inputs = PLUGINS[case.plugin], case.inputs
    made = recorded(case, inputs, monkeypatch)
    dtypes, sizes = facts(plugin, inputs, case.attributes)
    outputs = [argument for argument in made.arguments if isinstance(argument, torch.Tensor)][-len(plugin.op.outputs) :]
    for (tensor, dtype, shape), output in zip(describe(plugin, sizes, dtypes), outputs, strict=True):
        assert (TORCH[dtype], shape) == (output.dtype, list(output.shape))
        assert not tensor.alias or output is inputs[tensor.alias]


def test_dynamic_sizes_reach_the_launch_as_expressions_that_tensorrt_computes(case):
    """With symbols for all that a network may leave open: the same numbers once they are known."""
    plugin = PLUGINS[case.plugin]
    inputs = case.inputs
    dtypes, known = facts(plugin, inputs, case.attributes)
    shapes = {t.name: _opened(plugin, t.axes, inputs[t.name].shape) for t in plugin.inputs}
    opened = name_sizes(plugin.inputs, shapes) | dict(case.attributes)
    assert any(isinstance(size, Symbol) for size in opened.values())
    kernel = choose(plugin, opened, dtypes)[0]
    assert kernel.identity == choose(plugin, known, dtypes)[0].identity
    for text in (*kernel.grid, *(argument.value or argument.name for argument in kernel.numbers)):
        assert _closed(evaluate(text, opened, SYMBOLS), known) == evaluate(text, known)
    there = describe(plugin, known, dtypes)
    for (_, _, shape), (_, _, expected) in zip(describe(plugin, opened, dtypes, SYMBOLS), there, strict=True):
        assert [_closed(size, known) for size in shape] == expected
    fake = describe(plugin, opened, dtypes, SYMBOLS, fake=True)  # as asked before shapes exist: types and ranks
    assert [(dtype, len(shape)) for _, dtype, shape in fake] == [(dtype, len(shape)) for _, dtype, shape in there]


def _opened(plugin: Plugin, axes: tuple[str, ...], shape: torch.Size) -> list[Any]:
    open_axes = set(DYNAMIC) - set(plugin.op.static)
    return [Symbol(axis) if axis in open_axes else size for axis, size in zip(axes, shape, strict=True)]


def _closed(value: Any, sizes: Mapping[str, Any]) -> Any:
    return evaluate(value.text, sizes) if isinstance(value, Symbol) else value


def test_autotuning_gets_one_type_for_each_input_and_output(case):
    plugin = PLUGINS[case.plugin]
    dtypes, sizes = facts(plugin, case.inputs, case.attributes)
    words = io_types(plugin, sizes, dtypes).split(", ")
    assert len(words) == len(plugin.inputs) + len(plugin.op.outputs)
    assert set(words) <= {"BF16", "FP16", "FP32", "INT64", "INT32"}


def test_tensorrt_is_not_here_and_registration_says_so():
    if importlib.util.find_spec("tensorrt"):
        pytest.skip("TensorRT is installed")
    with pytest.raises(Failure, match=r"TensorRT is not installed: .* build with --ops native"):
        register(100)


def test_a_gpu_without_kernels_is_refused_before_anything_else():
    with pytest.raises(UserError, match=r"no plugins for SM89 .* 90, 100, 103, 120.* --ops native"):
        register(89)


def test_every_shipped_kernel_is_a_plugin():
    for kernel in kernels.shipped():
        inputs = [argument.name for argument in kernel.inputs]
        (plugin,) = (p for p in PLUGINS.values() if p.op.name == kernel.op and [t.name for t in p.inputs] == inputs)
        assert [t.name for t in plugin.op.outputs] == [argument.name for argument in kernel.outputs]
        assert [t.alias for t in plugin.op.outputs] == [argument.alias for argument in kernel.outputs]
        assert {argument.type for argument in kernel.numbers} <= {"i32"}


@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=list(PLUGINS))
def test_functions_have_the_signatures_that_tensorrt_checks(plugin):
    """`register` wants a type for each parameter and no defaults; the others end in `outputs` and `tactic`."""
    inputs = [t.name for t in plugin.inputs]
    described = signature(plugin, tensor=torch.Tensor, returns=tuple[torch.Tensor])
    kinds = [parameter.annotation for parameter in described.parameters.values()]
    assert list(described.parameters) == inputs + list(plugin.attributes)
    assert kinds == [torch.Tensor] * len(inputs) + list(plugin.attributes.values())
    assert set(plugin.attributes.values()) <= {int, float}
    assert all(parameter.default is inspect.Parameter.empty for parameter in described.parameters.values())
    assert list(signature(plugin, "outputs").parameters) == [*inputs, *plugin.attributes, "outputs"]
    ahead = signature(plugin, "outputs", "tactic")
    assert list(ahead.parameters) == [*inputs, *plugin.attributes, "outputs", "tactic"]
    assert not {"outputs", "stream", "tactic"} & {*inputs, *plugin.attributes}  # names that TensorRT keeps
    assert plugin.name.isidentifier() and plugin.id == f"dflash::{plugin.name}"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"dtypes": {"rows": "float32"}}, "input rows has type float32 .* bfloat16 or float16"),
        ({"dtypes": {"cache": "float16"}}, "inputs have types bfloat16 and float16 .* one type"),
        ({"dtypes": {"start": "int32"}}, "input start has type int32 .* int64"),
        ({"sizes": {"D": 80, "C": 80 * 80}}, "heads of 80 .* 64, 128, 256, or convert with --ops native"),
        ({"sizes": {"D": Symbol("D")}}, "dimension D is not static"),
        ({"sizes": {"R": 65, "rotated": 130}}, "turns 65 pairs of a head of 128"),
        ({"sizes": {"C": 80 * 64}}, "C = Hc \\* D does not hold .* Hc 80"),
        ({"sizes": {"rotated": 64}}, "rotated = 2 \\* R does not hold"),
        ({"sizes": {"L": 7}}, "L = Hc does not hold"),
    ],
)
def test_what_no_kernel_computes_is_refused_with_what_is_supported(change, words):
    case = CASES[0]
    plugin = PLUGINS[case.plugin]
    dtypes, sizes = facts(plugin, case.inputs, case.attributes)
    with pytest.raises(UserError, match=words):
        choose(plugin, sizes | change.get("sizes", {}), dtypes | change.get("dtypes", {}))


def test_inputs_that_disagree_on_a_size_are_refused():
    plugin, shapes = PLUGINS["kv_inject"], {name: list(x.shape) for name, x in CASES[0].inputs.items()}
    with pytest.raises(UserError, match="dimension B of count is 4, elsewhere 3"):
        name_sizes(plugin.inputs, shapes | {"count": [4]})
    with pytest.raises(UserError, match=r"cache has 3 dimensions .* B, Hc, S, D"):
        name_sizes(plugin.inputs, shapes | {"cache": [3, 80, 4096]})


def test_a_size_that_is_static_in_one_input_is_static():
    plugin, shapes = PLUGINS["kv_inject"], {name: list(x.shape) for name, x in CASES[0].inputs.items()}
    sizes = name_sizes(plugin.inputs, shapes | {"rows": [Symbol("B"), Symbol("Q"), shapes["rows"][2]]})
    assert (sizes["B"], sizes["Q"]) == (3, 16)


@pytest.mark.parametrize(
    "text, value",
    [("Q", 17), ("cdiv(Q, 16)", 2), ("2 * B - 1", 5), ("max(B, cdiv(Q, 4), 3)", 5), ("min(7, B * Q) // 2", 3)],
)
def test_expressions_are_the_same_on_integers_and_on_symbols(text, value):
    sizes = {"B": 3, "Q": 17}
    assert evaluate(text, sizes) == value
    symbol = evaluate(text, {name: Symbol(name) for name in sizes}, SYMBOLS)
    assert evaluate(symbol.text, sizes) == value


@pytest.mark.parametrize(
    "text", ["B / 2", "B % 2", "B ** 2", "f(B)", "B if B else 1", "'B'", "cdiv(B)", "B[0]", "True"]
)
def test_expressions_that_tensorrt_does_not_compute_are_refused(text):
    with pytest.raises(Failure, match="what TensorRT does not compute"):
        evaluate(text, {"B": 1})


def test_an_unknown_size_is_named():
    with pytest.raises(Failure, match="'B \\+ X' names 'X', known are B, Q"):
        evaluate("B + X", {"B": 1, "Q": 2})
