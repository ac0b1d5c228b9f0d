"""A small builder over onnx-ir: every method adds the nodes of one idea and returns the value they make.

Activations of a decoder stack stay two-dimensional, `[B*Q, width]`, so that every projection is one `Gemm`; only
attention sees the four-dimensional form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from dflash_trt.graph.function import DOMAIN, OPSET, Op

IR_VERSION = 11  # the lowest that holds opset 24 types; ONNX Runtime and TensorRT both read it

Attributes = str | int | float | Sequence[int] | Sequence[float] | ir.Graph
FLOATS = {"float32": ir.DataType.FLOAT, "bfloat16": ir.DataType.BFLOAT16, "float16": ir.DataType.FLOAT16}


class Net:
    """Nodes and initializers of one graph under construction."""

    def __init__(
        self, dtype: str, *, native: bool, ops: str = "native", moe: str = "native", beside: Path | None = None
    ):
        """`native`: in the form that TensorRT compiles: no conditionals, 4-bit types; else as ONNX Runtime runs it.

        `ops`: attention, caches and choices by TensorRT's "native" layers or as "plugin" ops (`plugin.py`).
        `moe`: how a native graph computes experts (`moe.py`).
        `beside`: the folder the graph will lie in; weights in files of that folder are referred to without a link.
        """
        self.dtype = FLOATS[dtype]  # of weights and activations
        self.native = native
        self.plugins = ops == "plugin"
        self.moe = moe
        self.beside = beside
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.initializers: dict[str, ir.Value] = {}
        self.links: dict[str, Path] = {}  # external data location → checkpoint file
        self._tape = tape.Tape()
        self._scope: list[str] = []
        self._functions: dict[str, ir.Function] = {}
        self._made: dict[ir.Value, ir.Value] = {}

    # -- structure -----------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of the nodes made inside; profilers and compilers show them."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = ir.val(name, dtype, ir.Shape(shape))
        self.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str]) -> None:
        value.name = name
        value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
        self.outputs.append(value)

    def op(
        self, kind: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = "", **attributes: Attributes
    ) -> Any:
        """Add one node; returns its output, or a tuple of them when `outputs` > 1."""
        name = "/".join([*self._scope, kind])
        made = self._tape.op_multi_out(
            kind,
            inputs,
            attributes=attributes,
            num_outputs=outputs,
            domain=domain,
            name=f"{name}.{len(self._tape.nodes)}",
        )
        for value in made:
            value.name = f"v{len(self._tape.nodes)}.{value.index()}"
        return made[0] if outputs == 1 else tuple(made)

    def named(self, name: str, value: ir.Value) -> ir.Value:
        """Give a value a name that others look it up by (the engine room sets attention lengths so)."""
        value.name = name
        return value

    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        """Register a constant under its own name, once."""
        assert tensor.name is not None
        if tensor.name not in self.initializers:
            self.initializers[tensor.name] = ir.val(
                tensor.name, tensor.dtype, ir.Shape(tensor.shape.numpy()), const_value=tensor
            )
        return self.initializers[tensor.name]

    def const(self, array: object, dtype: type | np.dtype = np.int64) -> ir.Value:
        """An inline constant, shared by all who ask for the same one."""
        value = np.asarray(array, dtype=dtype)
        digest = hashlib.sha256(value.tobytes()).hexdigest()[:16]
        return self.initializer(
            ir.tensor(value, name=f"const.{value.dtype}.{'x'.join(map(str, value.shape))}.{digest}")
        )

    def branch(self, condition: ir.Value, then: Callable[[], ir.Value], otherwise: Callable[[], ir.Value]) -> ir.Value:
        """`If`: only the chosen side is computed. Both sides may read any value made before.

        In TensorRT's form the result is `then`, which must hold for either outcome.
        """
        if self.native:
            return then()
        return self.op(
            "If", condition, then_branch=self._subgraph("then", then), else_branch=self._subgraph("else", otherwise)
        )

    def _subgraph(self, name: str, body: Callable[[], ir.Value]) -> ir.Graph:
        outer, self._tape = self._tape, tape.Tape()
        try:
            with self.scope(name):
                result = self.op("Identity", body())
            result.name = f"{'.'.join(self._scope)}.{name}.{len(outer.nodes)}"
            for number, node in enumerate(self._tape.nodes):
                for value in node.outputs:
                    value.name = f"{result.name}.{number}.{value.index()}" if value is not result else value.name
            return ir.Graph([], [result], nodes=self._tape.nodes, name=name)
        finally:
            self._tape = outer

    def call(self, op: Op, *inputs: ir.Value, **attributes: Attributes) -> Any:
        """One node of an op of our own, as `op`; its function becomes part of the model."""
        if op.name not in self._functions:
            self._functions[op.name] = op.function()
        outputs = len(self._functions[op.name].outputs)
        return self.op(op.name, *inputs, domain=DOMAIN, outputs=outputs, **attributes)

    def once(self, source: ir.Value, make: Callable[[], ir.Value]) -> ir.Value:
        """What `make` makes of `source`, made at the first call alone."""
        if source not in self._made:
            self._made[source] = make()
        return self._made[source]

    def model(self, name: str) -> ir.Model:
        used = {node.domain for node in self._tape.nodes} - {""}
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self._tape.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": OPSET} | dict.fromkeys(sorted(used), 1),
            name=name,
        )
        return ir.Model(
            graph, ir_version=IR_VERSION, producer_name="dflash-trt", functions=list(self._functions.values())
        )

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.op("Cast", x, to=int(dtype))

    def to_float32(self, x: ir.Value) -> ir.Value:
        """x, which is in the graph's dtype."""
        return x if self.dtype == ir.DataType.FLOAT else self.cast(x, ir.DataType.FLOAT)

    def from_float32(self, x: ir.Value) -> ir.Value:
        """A float32 x in the graph's dtype."""
        return x if self.dtype == ir.DataType.FLOAT else self.cast(x, self.dtype)

    def add(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.op("Add", x, y)

    def mul(self, x: ir.Value, y: ir.Value) -> ir.Value:
        return self.op("Mul", x, y)

    def reshape(self, x: ir.Value, shape: ir.Value | Sequence[int]) -> ir.Value:
        return self.op("Reshape", x, shape if isinstance(shape, ir.Value) else self.const(shape))

    def unsqueeze(self, x: ir.Value, *axes: int) -> ir.Value:
        return self.op("Unsqueeze", x, self.const(axes))

    def concat(self, parts: Sequence[ir.Value], axis: int) -> ir.Value:
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=axis)

    def split(self, x: ir.Value, sizes: Sequence[int], axis: int) -> tuple[ir.Value, ...]:
        if len(sizes) == 1:
            return (x,)
        return self.op("Split", x, self.const(sizes), axis=axis, outputs=len(sizes))

    def arange(self, count: ir.Value | int) -> ir.Value:
        """0 … count-1, int64 [count]."""
        if isinstance(count, int):
            return self.const(np.arange(count))
        return self.op("Range", self.const(0), count, self.const(1))

    def linear(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None = None) -> ir.Value:
        """x [T, in] · weightᵀ [out, in] (+ bias [out] or a residual [T, out]) → [T, out]."""
        return self.op("Gemm", x, weight, *([bias] if bias is not None else []), transB=1)

    def rms_norm(self, x: ir.Value, weight: ir.Value, eps: float) -> ir.Value:
        """Over the last axis, in float32 inside."""
        return self.op("RMSNormalization", x, weight, epsilon=eps, axis=-1, stash_type=1)

    def swiglu(self, gate_up: ir.Value, ffn: int) -> ir.Value:
        """[T, 2*ffn] → silu(first half) * second half, [T, ffn]."""
        gate, up = self.split(gate_up, [ffn, ffn], axis=-1)
        return self.mul(self.mul(gate, self.op("Sigmoid", gate)), up)
