"""A YAML file that somebody wrote by hand, with the line of every key: all its problems are told at once.

Read as PyYAML's safe loader reads it (YAML 1.1), since TensorRT-LLM does the same: what is checked here is what is
served there. Duplicate keys, which that loader lets pass, are problems.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.errors import UserError, one_line

Keys = tuple[str | int, ...]

PLAIN = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")  # what a mapping and a list are without a tag
MERGE = "tag:yaml.org,2002:merge"
LONGEST = 80  # characters of a value that messages repeat
# What YAML 1.1 takes for numbers of base 8 and 60, and nobody means: 010 is 8, 1:30 is 90.
TRAPS = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
LARGEST = 1 << 18  # bytes; a file that is larger was not written by hand


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file. `line` counts from 1; None: with the file as a whole."""

    what: str
    line: int | None = None
    fix: str | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return place + one_line(self.what) + (f" — {self.fix}" if self.fix else "")


class Problems(UserError):
    """All problems of one file; a single one makes an ordinary message."""

    def __init__(self, file: object, problems: Iterable[Problem]):
        self.file = file
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        if len(self.problems) == 1:
            [one] = self.problems
            super().__init__(one_line(one.what), where=f"{file}, line {one.line}" if one.line else file, fix=one.fix)
        else:
            lines = "".join(f"\n  {problem}" for problem in self.problems)
            super().__init__(f"{len(self.problems)} problems in {file}:{lines}")


class Document:
    """The values of a YAML file (dicts, lists, scalars), and where each of them stands."""

    def __init__(self, file: Path, values: dict[Any, Any], lines: dict[Keys, int]):
        self.file = file
        self.values = values
        self._lines = lines

    def line(self, keys: Keys) -> int | None:
        """The line of the key at that path, or of its nearest parent that exists; None for the file as a whole."""
        while keys:
            if keys in self._lines:
                return self._lines[keys]
            keys = keys[:-1]
        return None


def read_document(file: Path) -> Document:
    """Raises Problems for a file that cannot be read, is no YAML mapping, or names a key twice."""
    file = Path(file)
    try:
        if file.stat().st_size > LARGEST:
            raise Problems(file, [Problem(f"is larger than {LARGEST >> 10} KiB", fix="it is no file of settings")])
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        fix = "name a YAML file that can be read"
        raise UserError(f"cannot read {file.name}: {error.strerror}", where=file, fix=fix) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise Problems(file, [Problem("is not UTF-8", line, "save it as UTF-8")]) from None
    try:
        _refuse_aliases(file, text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        reader = _Reader()
        values = reader.read(root, ()) if root is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"is not YAML: {error.problem or error.context}"
        raise Problems(file, [Problem(what, mark.line + 1 if mark else None)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"is not YAML: it holds the character U+{error.character:04X}"
        raise Problems(file, [Problem(what, line, "remove it")]) from None
    except (RecursionError, ValueError, OverflowError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"holds a value that is none: {error}"
        raise Problems(file, [Problem(what)]) from None
    if not isinstance(values, dict):
        kind = "is empty" if values is None else "is not a mapping of keys to values"
        raise Problems(file, [*reader.problems, Problem(kind, fix="write `key: value`, one a line")])
    if reader.problems:
        raise Problems(file, reader.problems)
    return Document(file, values, reader.lines)


def shown(value: Any) -> str:
    """A value as YAML writes it, cut where it is long."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    if isinstance(value, datetime.date):
        text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def nearest(word: object, known: Iterable[str]) -> str | None:
    """The known word that is spelled most alike, if any is near."""
    return next(iter(get_close_matches(str(word).lower(), known, n=1, cutoff=0.6)), None)


def unknown_key(key: object, known: Iterable[str], line: int | None = None, where: str = "") -> Problem:
    """`where` is the section the key stands in, with its dot: `parallel.`."""
    known = list(known)
    meant = nearest(key, known)
    fix = f"did you mean {meant}?" if meant else f"known here: {', '.join(known)}"
    return Problem(f"{where}{key} is not a known key", line, fix)


class _Reader:
    """Turns nodes into values, and remembers their lines."""

    def __init__(self) -> None:
        self.lines: dict[Keys, int] = {}
        self.problems: list[Problem] = []
        self._construct = yaml.constructor.SafeConstructor()

    def read(self, node: yaml.Node, keys: Keys) -> Any:
        self.lines.setdefault(keys, node.start_mark.line + 1)
        known = self._construct.yaml_constructors if isinstance(node, yaml.ScalarNode) else PLAIN
        if node.tag not in known:
            self.problems.append(Problem(f"the tag {node.tag} is not read here", self.lines[keys], "leave it out"))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, keys)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*keys, index)) for index, item in enumerate(node.value)]
        try:
            value = self._construct.construct_object(node)
        except ValueError as error:  # a date without such a day, a number of thousands of digits
            self.problems.append(Problem(f"holds a value that is none: {error}", self.lines[keys], "put it in quotes"))
            return None
        if isinstance(value, int | float) and TRAPS.fullmatch(node.value):
            fix = f"write {value}, or put it in quotes"
            self.problems.append(Problem(f"{node.value} is {value} in YAML", self.lines[keys], fix))
        return value

    def _read_mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem("a key is no plain word", line))
                continue
            if key_node.tag == MERGE:
                self.problems.append(Problem("merge keys (<<) are not read here", line, "write them out"))
                continue
            key = self._construct.construct_object(key_node)
            path = (*keys, key)
            if key in values:
                first = f"first on line {self.lines[path]}"
                self.problems.append(Problem(f"{key} stands twice, {first}", line, "remove one"))
                continue
            self.lines[path] = line
            values[key] = self.read(value_node, path)
        return values


def _refuse_aliases(file: Path, text: str) -> None:
    """A few lines of aliases can stand for gigabytes, and a value with two places has no line."""
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    marks = [event.start_mark for event in events if isinstance(event, yaml.AliasEvent)]
    aliases = [mark.line + 1 if mark else None for mark in marks]
    if aliases:
        raise Problems(file, [Problem("aliases (*name) are not read here", line, "write it out") for line in aliases])
