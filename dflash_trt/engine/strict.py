"""JSON into frozen dataclasses, exactly as annotated: a missing or ill-typed key is named, never guessed."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Mismatch(Exception):
    """A JSON value that does not fit; `key` is its dotted path."""

    def __init__(self, key: str, what: str):
        super().__init__(f"{key} {what}")


def decode(kind: type[T], value: Any, key: str = "") -> T:
    """`value` as a `kind`: a dataclass, tuple[X, ...], dict[str, X], X | None, str, int or float.

    Unknown keys are ignored and missing ones take their defaults, so that other minor versions can be read.
    Raises Mismatch.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, value, key)
    if origin is types.UnionType:
        return None if value is None else decode(arguments[0], value, key)  # type: ignore[return-value]
    if origin is tuple and isinstance(value, list):
        return tuple(decode(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))  # type: ignore[return-value]
    if origin is dict and isinstance(value, dict):
        return {name: decode(arguments[1], item, f"{key}.{name}") for name, item in value.items()}  # type: ignore[return-value]
    if kind is float and type(value) is int:
        return float(value)  # type: ignore[return-value]
    if type(value) is not (origin or kind):
        names = {tuple: "a list", dict: "an object", str: "a string", int: "an integer", float: "a number"}
        raise Mismatch(key, f"is {value!r}, not {names[origin or kind]}")
    return value


def _decode_record(kind: type[T], value: Any, key: str) -> T:
    if not isinstance(value, dict):
        raise Mismatch(key, f"is {value!r}, not an object")
    hints = get_type_hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, path = field.name, f"{key}.{field.name}".lstrip(".")
        if name in value:
            fields[name] = decode(hints[name], value[name], path)
        elif field.default is dataclasses.MISSING:
            raise Mismatch(path, "is missing")
    return kind(**fields)
