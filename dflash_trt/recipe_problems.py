"""What is wrong with a recipe, in words: what its schema found, and what no single key can tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from dflash_trt.document import Document, Keys, Problem, shown, unknown_key
from dflash_trt.errors import UserError
from dflash_trt.gpus import parse_gpus

# Variables of the launchers and of the shell that runs them: a recipe's would be overwritten, or break them.
TAKEN = re.compile(
    "NAME|RELEASE|NODES|WORLD|TARGET|DRAFT|RENDERED_DRAFT|TARGET_DOWNLOAD|DRAFT_DOWNLOAD|HOST|PORT|GRACE|START_TIMEOUT"
    "|STOP_SIGNAL|IMAGE|STARTED_IN|ENVIRONMENT|RANKS|SERVER_COMMAND|DFLASH_TRT_RUN|HEALTH|DOCKER|DOCKER_GPUS|CONTAINER"
    "|MPI_TYPE|LLM_CONFIG_PATH|PATH|PWD|OLDPWD|HOME|TMPDIR|IFS|UID|EUID|PPID|SECONDS|RANDOM|SHELLOPTS|BASH.*"
)
SECRET = re.compile(r"(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)")
PATTERNS = {  # the schema's, by the key; in words
    "name": "write small letters and digits, with single dots or dashes between them",
    "checkpoint": "write OWNER/NAME, as on Hugging Face",
    "revision": "write a commit of the repository, 7 to 40 hexadecimal digits",
}
SECTION = "it is a section: write its keys below it, indented"


def cross_check(document: Document) -> Iterator[Problem]:
    """What no single key can tell; of each rule, if the keys it needs are whole numbers."""

    def problem(keys: Keys, what: str, fix: str) -> Problem:
        return Problem(f"{'.'.join(map(str, keys))} {what}", document.line(keys), fix)

    def whole(*keys: str, default: int | None = None) -> int | None:
        found: Any = document.values
        for key in keys:
            if not isinstance(found, dict):
                return None
            found = found.get(key, {} if key != keys[-1] else default)
        return found if type(found) is int and found > 0 else None

    values = document.values
    name = values.get("name")
    if isinstance(name, str) and name != document.file.stem and re.fullmatch(r"[a-z0-9.-]+", name):
        yield problem(("name",), f"is {shown(name)}", f"write {document.file.stem}, as the file")
    tp, ep, pp = (whole("parallel", key, default=1) for key in ("tp", "ep", "pp"))
    if tp and ep and tp % ep:
        yield problem(("parallel", "ep"), f"is {ep}, which does not divide tp {tp}", "groups of experts are equal")
    try:
        gpus = parse_gpus(str(values.get("gpus"))).count * (whole("nodes", default=1) or 0)
    except UserError:
        gpus = 0
    if tp and pp and gpus and tp * pp != gpus:
        fix = f"tp x pp must be {gpus}, or `gpus` name fewer"
        yield problem(("parallel",), f"makes {tp * pp} ranks of tp {tp} x pp {pp} for {gpus} GPUs", fix)
    k, block = whole("draft_length"), whole("block_size")
    if k and block and block > 1 and k + 1 > block:
        holds = f"a block of {block} holds the anchor and {block - 1} drafts"
        yield problem(("draft_length",), f"is {k}, but {holds}", f"write {block - 1} or less")
    batch, tokens = whole("limits", "batch"), whole("limits", "tokens")
    if batch and tokens and k and tokens < batch * (k + 1):
        fix = f"write {batch * (k + 1)} or more"
        yield problem(("limits", "tokens"), f"is {tokens}, but a step verifies {batch} x {k + 1} tokens", fix)
    for role in ("target", "drafter"):
        section = values.get(role)
        if isinstance(section, dict) and isinstance(path := section.get("path"), str):
            file = document.file.parent / path / "config.json"
            if not _is_file(file):
                fix = "give the folder of a downloaded checkpoint, or leave path out and pass it when you launch"
                yield problem((role, "path"), f"is {shown(path)}, but there is no {file}", fix)
    lane, release = values.get("lane"), values.get("release")
    if lane in ("serve", "trtllm-build") and release is None:
        yield problem(("release",), "is missing", "name the TensorRT-LLM release that serves this recipe")
    yield from _variables(document, ("environment",), TAKEN)
    yield from _variables(document, ("options", "env_overrides"))


def _is_file(path: Any) -> bool:
    try:
        return bool(path.is_file())
    except (OSError, ValueError):  # a name too long; a zero byte
        return False


def _variables(document: Document, keys: Keys, taken: re.Pattern[str] | None = None) -> Iterator[Problem]:
    section: Any = document.values
    for key in keys:
        section = section.get(key) if isinstance(section, dict) else None
    for name in section if isinstance(section, dict) else ():
        where, line = ".".join(map(str, (*keys, name))), document.line((*keys, name))
        if SECRET.fullmatch(str(name).upper()):
            fix = "leave it out, and export it where you start a launcher"
            yield Problem(f"{where} is a secret, and rendered files are for all to read", line, fix)
        elif taken and taken.fullmatch(str(name)):
            fix = "leave it out, and set it where you start them"
            yield Problem(f"{where} is a variable of the launchers or of their shell", line, fix)


def explain(errors: Iterable[ErrorDetails], document: Document, schema: type[BaseModel]) -> Iterator[Problem]:
    """Pydantic's findings in our words. `schema` is that of the whole document."""
    for error in errors:
        keys, value, about = tuple(error["loc"]), error["input"], error.get("ctx", {})
        if keys[-1] == "[key]":  # its location is the key as text
            keys = (*keys[:-2], value)
        line, name = document.line(keys), ".".join(map(str, keys))
        match error["type"]:
            case "extra_forbidden":
                yield _unknown(keys, line, schema)
            case "missing":
                yield Problem(f"{name} is missing", line, "add it: docs/recipes.md has a whole recipe")
            case "own":
                yield Problem(f"{name} {about['what']}", line, about["fix"])
            case "invalid_key":
                yield Problem(f"the key {shown(value)} is no text", document.line((*keys[:-1], value)), "remove it")
            case kind if error["loc"][-1] == "[key]":
                what = "is no text" if kind == "string_type" else "is no name"
                fix = "remove it" if kind == "string_type" else "write letters, digits and _"
                yield Problem(f"{'.'.join(map(str, keys[:-1]))}: the key {shown(value)} {what}", line, fix)
            case kind:
                yield Problem(f"{name} is {shown(value)}", line, _fix(kind, keys, value, about) or error["msg"])


def _fix(kind: str, keys: Keys, value: Any, about: Mapping[str, Any]) -> str | None:
    if value is None:
        return "give it a value, or leave it out"
    match kind:
        case "literal_error":
            return f"write {str(about['expected']).replace(chr(39), '')}"
        case "string_pattern_mismatch":
            return PATTERNS.get(str(keys[-1]), f"it must match {about['pattern']}")
        case "int_type" | "int_from_float":
            return "write a whole number"
        case "float_type":
            return "write a number between 0 and 1"
        case "bool_type":
            return "write true or false"
        case "greater_than_equal":
            return f"write {about['ge']} or more"
        case "greater_than":
            return f"write more than {about['gt']:g}"
        case "less_than_equal":
            return f"write {about['le']:g} or less" if about["le"] < 1 << 20 else f"write {about['le']} or less"
        case "string_type":
            return "write text" if isinstance(value, list | dict) else f'write it in quotes: "{shown(value)}"'
        case "string_unicode":
            return "write plain text"
        case "string_too_long":
            return f"write at most {about['max_length']} characters"
        case "string_too_short":
            return "give it a value, or leave it out"
        case "list_type":
            return "it is a list: write one `- …` a line below it"
        case "dict_type" | "model_type":
            return SECTION
        case "path_type":
            return "write the path of a folder, in quotes"
    return None


def _unknown(keys: Keys, line: int | None, schema: type[BaseModel]) -> Problem:
    """With the section that has such a key, or the nearest name here."""
    *above, key = keys
    places = _places(schema)
    if len(places.get(str(key), ())) == 1:
        return Problem(f"{'.'.join(map(str, keys))} is not a known key", line, f"its place is {places[str(key)][0]}")
    model: type[BaseModel] | None = schema
    for one in above:
        model = _section(model, one)
    prefix = "".join(f"{one}." for one in above)
    return unknown_key(key, list(model.model_fields) if model else [], line, prefix)


def _places(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Key → where it stands, with dots."""
    places: dict[str, list[str]] = {}
    for name in schema.model_fields:
        places.setdefault(name, []).append(name)
        if inner := _section(schema, name):
            for key in inner.model_fields:
                places.setdefault(key, []).append(f"{name}.{key}")
    return places


def _section(model: type[BaseModel] | None, key: object) -> type[BaseModel] | None:
    field = model.model_fields.get(str(key)) if model else None
    kinds: list[Any] = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
