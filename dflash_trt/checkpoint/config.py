"""Typed access to a checkpoint's JSON files; every complaint names file, key and value."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from dflash_trt.errors import UserError

Default = TypeVar("Default")
REQUIRED: Any = object()


class Config:
    """The keys of one JSON object. A key whose value is null counts as absent, as in transformers."""

    def __init__(self, file: Path, values: dict[str, Any]):
        self.file = file
        self.values = {key: value for key, value in values.items() if value is not None}

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def bad(self, key: str, what: str, fix: str | None = None) -> UserError:
        return UserError(f"{key} {what}", where=self.file, fix=fix)

    def integer(self, key: str, default: Default = REQUIRED, *, at_least: int = 0) -> int | Default:
        value = self._value(key, default)
        if key in self and (type(value) is not int or value < at_least):
            raise self.bad(key, f"is {value!r}, not an integer of at least {at_least}")
        return value

    def number(self, key: str, default: Default = REQUIRED) -> float | Default:
        """A positive number that a double can hold."""
        value = self._value(key, default)
        if key in self and (type(value) not in (int, float) or not 0 < value <= sys.float_info.max):
            raise self.bad(key, f"is {value!r}, not a positive number")
        return float(value) if key in self else value

    def flag(self, key: str, default: Default = REQUIRED) -> bool | Default:
        value = self._value(key, default)
        if key in self and type(value) is not bool:
            raise self.bad(key, f"is {value!r}, not true or false")
        return value

    def text(self, key: str, default: Default = REQUIRED) -> str | Default:
        value = self._value(key, default)
        if key in self and not isinstance(value, str):
            raise self.bad(key, f"is {value!r}, not a string")
        return value

    def integers(self, key: str, default: Default = REQUIRED) -> tuple[int, ...] | Default:
        value = self._value(key, default)
        if key in self:
            if not isinstance(value, list) or any(type(item) is not int for item in value):
                raise self.bad(key, f"is {value!r}, not a list of integers")
            return tuple(value)
        return value

    def texts(self, key: str, default: Default = REQUIRED) -> tuple[str, ...] | Default:
        value = self._value(key, default)
        if key in self:
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.bad(key, f"is {value!r}, not a list of strings")
            return tuple(value)
        return value

    def section(self, key: str) -> Config:
        """The object below `key`; empty if absent."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.bad(key, f"is {value!r}, not an object")
        return Config(self.file, value)

    def joined(self, key: str) -> Config:
        """The keys of this level and of the section `key` together; both may name a thing, if they agree."""
        inner = self.section(key).values
        for name in self.values.keys() & inner.keys():
            if self.values[name] != inner[name]:
                raise self.bad(name, f"is {self.values[name]!r} at top level but {inner[name]!r} in {key}", "keep one")
        return Config(self.file, self.values | inner)

    def one_of(self, key: str, allowed: Iterable[str], default: Default = REQUIRED) -> str | Default:
        value = self.text(key, default)
        if key in self and value not in (allowed := tuple(allowed)):
            raise self.bad(key, f"{value!r} is not supported", f"supported: {', '.join(allowed)}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is REQUIRED:
            raise self.bad(key, "is missing")
        return value


def read_config(directory: Path, name: str = "config.json") -> Config:
    return Config(directory / name, read_json(directory / name))


def read_json(file: Path) -> dict[str, Any]:
    """Raises UserError unless the file holds a JSON object."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file.name}: {error.strerror}", where=file) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.name} is not valid JSON ({error})", where=file) from None
    if not isinstance(value, dict):
        raise UserError(f"{file.name} is not a JSON object", where=file)
    return value
