"""Functions of a model's own (domain `dflash`), whose bodies are standard ops: what ONNX Runtime runs for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

DOMAIN = "dflash"
OPSET = 24

Operand = ir.Value | np.ndarray | np.generic


class Body:
    """Nodes of one function; called like an op, with arrays for constants."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix`: of the names of its values, which must differ from those of the body around it."""
        self._prefix = prefix
        self._tape = tape.Tape()

    @property
    def nodes(self) -> list[ir.Node]:
        return list(self._tape.nodes)

    def __call__(self, op: str, *inputs: Operand, outputs: int = 1, **attributes: Any) -> Any:
        """One node; its output, or a tuple of them when `outputs` > 1."""
        values = [x if isinstance(x, ir.Value) else self._constant(np.asarray(x)) for x in inputs]
        made = self._tape.op_multi_out(op, values, attributes=attributes, num_outputs=outputs)
        for value in made:
            value.name = f"{self._prefix}t{len(self._tape.nodes)}.{value.index()}"
        return made[0] if outputs == 1 else tuple(made)

    def loop(self, count: ir.Value, state: ir.Value, turn: Callable[[Body, ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """`state = turn(body, i, state)` for i = 0 … count-1 (scalars); a turn may read any value made before."""
        body = Body(f"{self._prefix}t{len(self._tape.nodes)}.")
        number = ir.val(f"{body._prefix}number", ir.DataType.INT64, ir.Shape([]))
        more = ir.val(f"{body._prefix}more", ir.DataType.BOOL, ir.Shape([]))
        before = ir.val(f"{body._prefix}before")
        outputs = [body("Identity", more), body("Identity", turn(body, number, before))]
        graph = ir.Graph([number, more, before], outputs, nodes=body.nodes, name="turn")
        return self("Loop", count, np.bool_(True), state, body=graph)

    def attribute(self, name: str) -> ir.Value:
        """The calling node's integer attribute as a scalar."""
        return self("Constant", value_int=ir.RefAttr("value_int", name, ir.AttributeType.INT))

    def number(self, name: str) -> ir.Value:
        """The calling node's float attribute as a scalar."""
        return self("Constant", value_float=ir.RefAttr("value_float", name, ir.AttributeType.FLOAT))

    def _constant(self, array: np.ndarray) -> ir.Value:
        value = self._tape.op("Constant", [], attributes={"value": ir.tensor(array)})
        value.name = f"{self._prefix}c{len(self._tape.nodes)}"
        return value


@dataclass(frozen=True)
class Op:
    """An op of domain `dflash`. Its inputs are the parameters of `body` after the first, which makes the nodes."""

    name: str
    body: Callable[..., ir.Value | tuple[ir.Value, ...]]
    attributes: Mapping[str, ir.AttributeType] = field(default_factory=dict)

    def function(self) -> ir.Function:
        """`dflash::name`, made anew: a model owns its functions."""
        _, *names = inspect.signature(self.body).parameters
        values = [ir.val(name) for name in names]
        op = Body()
        results = self.body(op, *values)
        outputs = list(results) if isinstance(results, tuple) else [results]
        graph = ir.Graph(values, outputs, nodes=op.nodes, opset_imports={"": OPSET}, name=self.name)
        declared = [ir.Attr(name, kind, None) for name, kind in self.attributes.items()]
        return ir.Function(DOMAIN, self.name, graph=graph, attributes=declared)
