"""Registration with `tensorrt.plugin` (TensorRT 10.15 and newer): the only file that imports TensorRT.

    register   types and shapes of the outputs; an aliased one is its input's buffer
    autotune   the types at hand, linear layout, a tactic for each kernel that computes the same
    aot_impl   entry name, PTX, launch expressions, integer arguments

NEVER RUN with TensorRT, which could not be installed where this was written. It follows the Python sources of
tensorrt-cu13 11.4 (`tensorrt/plugin/*.py`) and NVIDIA's guide "Writing custom operators with TensorRT Python plugins";
those sources took every plugin here, by hand, over a substitute for their compiled half. Tested is all that these
functions hand over. Open until TensorRT and a GPU are at hand:

* whether an exception raised in here, a refusal, ends the build with its message;
* whether TensorRT asks the driver for more than 48 KiB of dynamic shared memory where a kernel needs it;
* whether plugins that follow one another on one aliased cache stay in place when compiled ahead of time;
* speed, and what autotuning chooses.

The builder must set `PreviewFeature.ALIASED_PLUGIN_IO_10_03` and ask for the ahead-of-time form: `aot=True` in
`add_plugin`, or the attributes that `lower` gives the ONNX node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import GenericAlias
from typing import Any

from dflash_trt.errors import Failure
from dflash_trt.plugins.tensorrt.expressions import Algebra
from dflash_trt.plugins.tensorrt.launch import check_sm, choose, describe, io_types, launch, name_sizes
from dflash_trt.plugins.tensorrt.ops import PLUGINS, Plugin

DATA_TYPES = {"bfloat16": "BF16", "float16": "HALF", "float32": "FLOAT", "int64": "INT64", "int32": "INT32"}

_registered: dict[str, int] = {}  # plugin name → SM: TensorRT's registry is one per process too


def register(sm: int) -> list[str]:
    """Register every plugin for engines of this SM; returns their names. A second call for the same SM adds nothing.

    Raises UserError for an SM without kernels, Failure where TensorRT is missing or too old.
    """
    check_sm(sm)
    if others := set(_registered.values()) - {sm}:
        raise Failure(f"plugins are registered for SM{others.pop()} — build for SM{sm} in a process of its own")
    try:
        import tensorrt
        import tensorrt.plugin as trtp
    except ImportError as error:
        raise Failure(f"TensorRT is not installed: {error} — build with --ops native") from None
    if not hasattr(trtp, "aot_impl"):
        raise Failure(f"TensorRT {tensorrt.__version__} has no ahead-of-time plugins — install 10.15 or newer")
    for name, plugin in PLUGINS.items():
        if name not in _registered:
            _register(plugin, sm, tensorrt.DataType, trtp)
            _registered[name] = sm
    return list(_registered)


def signature(plugin: Plugin, *more: str, tensor: Any = None, returns: Any = None) -> inspect.Signature:
    """Inputs, attributes, then `outputs` and `tactic`: TensorRT checks names, order and, of `register`, types."""
    empty = inspect.Parameter.empty
    kinds = {t.name: tensor or empty for t in plugin.inputs}
    kinds |= {name: kind if tensor else empty for name, kind in plugin.attributes.items()} | dict.fromkeys(more, empty)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
        for name, kind in kinds.items()
    ]
    return inspect.Signature(parameters, return_annotation=returns or inspect.Signature.empty)


def _register(plugin: Plugin, sm: int, data_type: Any, trtp: Any) -> None:
    """The three functions of one plugin."""
    algebra = Algebra(trtp.ShapeExpr, {"cdiv": trtp.cdiv, "min": trtp.min, "max": trtp.max})
    types = {name: getattr(data_type, member) for name, member in DATA_TYPES.items()}
    tensors = plugin.inputs

    def facts(given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        """Types of the inputs; sizes (ints where static, else symbols) and attributes."""
        names = {value: name for name, value in types.items()}
        dtypes = {t.name: names.get(given[t.name].dtype, str(given[t.name].dtype)) for t in tensors}
        sizes = name_sizes(tensors, {t.name: _shape(given[t.name]) for t in tensors})
        return dtypes, sizes | {name: given[name] for name in plugin.attributes}

    def register_outputs(given: Mapping[str, Any]) -> Any:
        dtypes, sizes = facts(given)
        fake = any(_is_fake(given[t.name]) for t in tensors)  # TensorRT asks for types; shapes do not exist yet
        outputs = []
        for tensor, dtype, shape in describe(plugin, sizes, dtypes, algebra, fake=fake):
            if tensor.alias:
                outputs.append(given[tensor.alias].aliased())
            else:
                dims = tuple(trtp.ShapeExpr() if size is None else size for size in shape)
                outputs.append(trtp.from_shape_expr(dims, types[dtype]))
        return tuple(outputs)

    def autotune(given: Mapping[str, Any]) -> list[Any]:
        dtypes, sizes = facts(given)
        tactics = range(1, len(choose(plugin, sizes, dtypes)) + 1)
        return [trtp.AutoTuneCombination(io_types(plugin, sizes, dtypes), "LINEAR", list(tactics))]

    def aot_impl(given: Mapping[str, Any]) -> Any:
        dtypes, sizes = facts(given)
        kernel = choose(plugin, sizes, dtypes)[max((given["tactic"] or 1) - 1, 0)]
        ready = launch(kernel, sm, sizes, algebra)
        parameters = trtp.KernelLaunchParams()
        parameters.grid_x, parameters.grid_y, parameters.grid_z = ready.grid
        parameters.block_x = ready.compiled.threads
        parameters.shared_mem = ready.compiled.shared
        extra = trtp.SymIntExprs(len(ready.numbers))
        for i, number in enumerate(ready.numbers):
            extra[i] = trtp.SymInt32(number)
        return ready.compiled.entry, ready.compiled.ptx, parameters, extra

    desc = trtp.TensorDesc
    outputs = GenericAlias(tuple, (desc,) * len(plugin.op.outputs))
    kernel = tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]
    trtp.register(plugin.id)(_with(register_outputs, signature(plugin, tensor=desc, returns=outputs)))
    trtp.autotune(plugin.id)(_with(autotune, signature(plugin, "outputs")))
    trtp.aot_impl(plugin.id)(_with(aot_impl, signature(plugin, "outputs", "tactic", returns=kernel)))


def _with(function: Callable[[Mapping[str, Any]], Any], shape: inspect.Signature) -> Callable[..., Any]:
    """`function` as one that takes the arguments of a signature."""

    def called(*values: Any, **named: Any) -> Any:
        return function(shape.bind(*values, **named).arguments)

    called.__signature__ = shape  # type: ignore[attr-defined]
    called.__name__ = function.__name__
    return called


def _is_fake(desc: Any) -> bool:
    return any(size.is_fake for size in desc.shape_expr)


def _shape(desc: Any) -> Sequence[Any]:
    """Ints where static, else symbols."""
    symbols = list(desc.shape_expr)
    if desc.has_shape:
        return [size if size >= 0 else symbol for size, symbol in zip(desc.shape, symbols, strict=True)]
    return [s.constant_value() if not s.is_fake and s.is_constant else s for s in symbols]
