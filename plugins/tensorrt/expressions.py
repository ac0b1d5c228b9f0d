"""Launch expressions (`"cdiv(Q, 16)"`) evaluated on integers, or on symbols that TensorRT resolves at run time.

`tensorrt.plugin`'s symbols add, subtract, multiply and floor-divide with a symbol on the left; `cdiv`, `min` and `max`
are functions that refuse two plain integers. So integers are folded here, and an integer on the left is lifted.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import Failure

OPERATORS: dict[type[ast.operator], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
FUNCTIONS: dict[str, Callable[[int, int], int]] = {"cdiv": lambda a, b: -(-a // b), "min": min, "max": max}


@dataclass(frozen=True)
class Algebra:
    """How symbols are computed with."""

    lift: Callable[[int], Any]  # an integer as a symbol
    functions: Mapping[str, Callable[[Any, Any], Any]]  # cdiv, min, max of symbols


INTEGERS = Algebra(int, FUNCTIONS)


def evaluate(text: str, names: Mapping[str, Any], algebra: Algebra = INTEGERS) -> Any:
    """The value of an expression: an int where all its names are, else a symbol."""
    return _value(ast.parse(text, mode="eval").body, text, names, algebra)


def _value(node: ast.expr, text: str, names: Mapping[str, Any], algebra: Algebra) -> Any:
    def inner(part: ast.expr) -> Any:
        return _value(part, text, names, algebra)

    match node:
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(name) if name in names:
            return names[name]
        case ast.Name(name):
            raise Failure(f"launch expression {text!r} names {name!r}, known are {', '.join(sorted(names))}")
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            a, b = inner(left), inner(right)
            return OPERATORS[type(op)](algebra.lift(a) if isinstance(a, int) and not isinstance(b, int) else a, b)
        case ast.Call(ast.Name(name), [first, *rest], []) if name in FUNCTIONS and rest:
            value = inner(first)
            for part in rest:
                other = inner(part)
                plain = isinstance(value, int) and isinstance(other, int)
                value = (FUNCTIONS if plain else algebra.functions)[name](value, other)
            return value
    raise Failure(f"launch expression {text!r} holds what TensorRT does not compute: {ast.unparse(node)}")
