"""Which keys `trtllm-serve --config` takes in which release of TensorRT-LLM, and what is wrong with a mapping of them.

The tables are data: `releases/fields.yaml` has the keys, `releases/releases.yaml` what is known of each release.
TensorRT-LLM refuses unknown keys itself, but only after its import, on the machine with the GPUs. Its loader also takes
"8" for 8; here a number in quotes is a problem, for it is where units hide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from dflash_trt.document import Keys, Problem, nearest, read_document, shown
from dflash_trt.errors import UserError

FOLDER = Path(__file__).with_name("releases")
SCALARS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "map": "a mapping"}


class Places(Protocol):
    """Knows the line of a key: a `Document`, or what stands for one where the keys were made from another file."""

    def line(self, keys: Keys) -> int | None: ...


@dataclass(frozen=True)
class Field:
    """One key. `since` and `until` are indices into the list of releases, both included."""

    name: str
    type: str
    choices: Mapping[str, int] = field(default_factory=dict)  # value → the release it came with
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    optional: bool = False
    required: bool = False
    since: int = 0
    until: int | None = None
    open: bool = False
    by: str | None = None  # the key whose value picks a variant
    fields: Mapping[str, Field] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Field] | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Release:
    """One release. `fields` holds the keys of all: one that another release has is told from a misspelt one."""

    version: str
    index: int
    read: str
    inferred: str
    fields: Mapping[str, Field]

    def has(self, field: Field) -> bool:
        return field.since <= self.index and (field.until is None or self.index <= field.until)


def releases() -> list[str]:
    """Oldest first."""
    return list(_versions())


def read_release(version: str, where: object = "--release") -> Release:
    """Raises UserError for a release without a table."""
    versions = _versions()
    if version not in versions:
        known = ", ".join(versions)
        raise UserError(f"no table for TensorRT-LLM {version}", where=where, fix=f"tables are there for {known}")
    about = versions[version]
    return Release(version, list(versions).index(version), about["read"], about["inferred"], _fields())


def judge(
    release: Release, config: Mapping[Any, Any], document: Places | None = None, prefix: Keys = ()
) -> list[Problem]:
    """What this release would not take of `config`. `prefix`: where in `document` it stands, for the lines."""
    judged = _Judged(release, document, prefix)
    judged.section(config, release.fields, ())
    return judged.problems


class _Judged:
    def __init__(self, release: Release, document: Places | None, prefix: Keys):
        self.release = release
        self.problems: list[Problem] = []
        self._document = document
        self._prefix = prefix

    def section(
        self, config: Mapping[Any, Any], fields: Mapping[str, Field], keys: Keys, is_open: bool = False
    ) -> None:
        for name, value in config.items():
            if known := fields.get(name):
                self._field(known, value, (*keys, name))
            elif not is_open:
                self._add(f"{_dotted((*keys, name))} is not a known key", (*keys, name), self._meant(name, fields))
        for known in fields.values():
            if known.required and config.get(known.name) is None:
                self._add(f"{_dotted((*keys, known.name))} is missing", keys, "TensorRT-LLM fails without it")

    def _meant(self, name: object, fields: Mapping[str, Field]) -> str:
        """A key of this section, of another one, or nothing: the list of all would help nobody."""
        top = self.release.fields
        elsewhere = {key: f"{path}.{key}" for path, inner in _sections(top) for key in inner} | {
            key: key for key in top
        }
        elsewhere = {key: path for key, path in elsewhere.items() if key not in fields}
        if name in elsewhere:
            return f"its place is {elsewhere[str(name)]}"
        meant = nearest(name, [*fields, *elsewhere])
        return f"did you mean {elsewhere.get(meant, meant)}?" if meant else "TensorRT-LLM refuses keys it does not know"

    def _field(self, known: Field, value: Any, keys: Keys) -> None:
        if not self.release.has(known):
            self._other_release(known, keys)
        elif value is None:
            if not known.optional:
                self._add(f"{_dotted(keys)} is null", keys, f"give {_wanted(known)}, or leave it out")
        elif known.type in ("section", "variants"):
            if not isinstance(value, Mapping):
                self._add(f"{_dotted(keys)} is {shown(value)}, but it is a section", keys, "indent its keys below it")
            elif known.type == "variants":
                self._variant(known, value, keys)
            else:
                self.section(value, known.fields, keys, known.open)
        elif known.type.startswith("list["):
            self._list(known, value, keys)
        elif known.type != "any":
            self._scalar(known, value, keys)

    def _other_release(self, known: Field, keys: Keys) -> None:
        versions, what = releases(), f"TensorRT-LLM {self.release.version} has no {_dotted(keys)}"
        if known.since > self.release.index:
            other = versions[known.since]
            self._add(f"{what}: it was first seen in {other}", keys, f"leave it out, or choose release {other}")
        else:
            assert known.until is not None
            self._add(f"{what}: {versions[known.until]} was the last that had it", keys, "leave it out")

    def _variant(self, known: Field, value: Mapping[Any, Any], keys: Keys) -> None:
        assert known.by is not None
        kind = value.get(known.by)
        if not isinstance(kind, str) or kind not in known.variants:
            names = {name.lower(): name for name in known.variants}
            meant = nearest(kind, names) if kind is not None else None
            fix = f"did you mean {names[meant]}?" if meant else f"one of {', '.join(known.variants)}"
            what = "is missing" if kind is None else f"is {shown(kind)}"
            self._add(f"{_dotted((*keys, known.by))} {what}", (*keys, known.by), fix)
            return
        variant = known.variants[kind]
        fields = {**known.fields, **(variant or {}), known.by: Field(known.by, "str")}
        self.section(value, fields, keys, is_open=variant is None)

    def _list(self, known: Field, value: Any, keys: Keys) -> None:
        if not isinstance(value, list):
            self._add(f"{_dotted(keys)} is {shown(value)}", keys, "give a list: [1, 2, …]")
            return
        item = replace(known, type=known.type[5:-1])
        for index, one in enumerate(value):
            self._scalar(item, one, (*keys, index))

    def _scalar(self, known: Field, value: Any, keys: Keys) -> None:
        if not _is(known.type, value):
            self._add(f"{_dotted(keys)} is {shown(value)}", keys, f"give {_wanted(known)}")
        elif known.choices:
            self._choice(known, value, keys)
        else:
            for bound, breaks, word in (
                (known.minimum, lambda limit: value < limit, "less than"),
                (known.maximum, lambda limit: value > limit, "more than"),
                (known.above, lambda limit: value <= limit, "not above"),
            ):
                if bound is not None and breaks(bound):
                    self._add(f"{_dotted(keys)} is {shown(value)}, {word} {bound:g}", keys, f"give {_wanted(known)}")

    def _choice(self, known: Field, value: Any, keys: Keys) -> None:
        here = [choice for choice, since in known.choices.items() if since <= self.release.index]
        if value in here:
            return
        fix = f"one of {', '.join(here)}"
        if value in known.choices:
            other = releases()[known.choices[value]]
            what = f"{_dotted(keys)} is {value}, which TensorRT-LLM {self.release.version} does not have"
            self._add(f"{what}: it was first seen in {other}", keys, f"{fix}, or choose release {other}")
        else:
            self._add(f"{_dotted(keys)} is {shown(value)}", keys, fix)

    def _add(self, what: str, keys: Keys, fix: str | None = None) -> None:
        line = self._document.line((*self._prefix, *keys)) if self._document else None
        self.problems.append(Problem(what, line, fix))


def _sections(fields: Mapping[str, Field]) -> Iterator[tuple[str, Mapping[str, Field]]]:
    """The sections of the top, each with its keys; of speculative_config those of DFlash."""
    for known in fields.values():
        if known.fields:
            yield known.name, {**known.fields, **(known.variants.get("DFlash") or {})}


def _is(kind: str, value: Any) -> bool:
    if kind == "bool" or isinstance(value, bool):
        return kind == "bool" and isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind == "float":
        return isinstance(value, int | float) and abs(value) < math.inf
    return isinstance(value, Mapping if kind == "map" else str)


def _wanted(known: Field) -> str:
    if known.choices:
        return f"one of {', '.join(known.choices)}"
    wanted = SCALARS.get(known.type, f"a {known.type}")
    if known.type not in ("int", "float"):
        return wanted
    if known.minimum is not None and known.maximum is not None:
        return f"{wanted} from {known.minimum:g} to {known.maximum:g}"
    if known.minimum is not None:
        return f"{wanted}, {known.minimum:g} or more"
    return f"{wanted} without a unit"


def _dotted(keys: Keys, end: str = "") -> str:
    """`kv_cache_config.dtype`, `batch_sizes[2]`."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) and text else f".{key}" if text else str(key)
    return text + end if text else ""


@functools.cache
def _versions() -> Mapping[str, Mapping[str, str]]:
    return read_document(FOLDER / "releases.yaml").values


@functools.cache
def _fields() -> Mapping[str, Field]:
    return dict(_read_fields(read_document(FOLDER / "fields.yaml").values))


def _read_fields(values: Mapping[str, Any]) -> Iterator[tuple[str, Field]]:
    versions = releases()
    for name, spec in values.items():
        spec = dict(spec)
        for key in ("since", "until"):
            if key in spec:
                spec[key] = versions.index(spec[key])
        choices: dict[str, int] = {}
        for choice in spec.pop("choices", ()):
            word, since = next(iter(choice.items())) if isinstance(choice, dict) else (choice, versions[0])
            choices[word] = versions.index(since)
        fields = dict(_read_fields(spec.pop("fields", {})))
        variants = {
            kind: None if inner is None else dict(_read_fields(inner))
            for kind, inner in spec.pop("variants", {}).items()
        }
        yield name, Field(name=name, choices=choices, fields=fields, variants=variants, **spec)
