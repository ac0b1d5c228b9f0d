"""Recipes (`build_recipes/*.yaml`): one file says how one pair is served on one machine for one goal.

docs/recipes.md explains the keys to those who write them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from dflash_trt.document import Document, Keys, Problem, Problems, nearest, read_document, unknown_key
from dflash_trt.errors import UserError
from dflash_trt.gpus import Gpus, parse_gpus

FOLDER = Path(str(files("dflash_trt.build_recipes")))
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _count(value: Any) -> Any:
    """A whole number; `32k` and `8192 tokens` are how people write other files."""
    if isinstance(value, str) and (matched := re.fullmatch(r"([\d_,]+)\s*([kKmM]i?)?\s*[a-zA-Z]*", value.strip())):
        number = int(re.sub(r"[_,]", "", matched[1]) or 0)
        factor = {"": 1, "k": 1000, "ki": 1024, "m": 10**6, "mi": 1 << 20}[(matched[2] or "").lower()]
        raise PydanticCustomError("unit", f"is {value!r}, not a whole number;write {number * factor}, without a unit")
    return value


def _fraction(value: Any) -> Any:
    percent = value.strip().removesuffix("%") if isinstance(value, str) else value
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", percent):
        number = float(percent)
        meant = number / 100 if number > 1 or "%" in value else number
        raise PydanticCustomError("unit", f"is {value!r}, not a fraction;write {meant:g}, a share between 0 and 1")
    if type(value) in (int, float) and 1 < value <= 100:
        raise PydanticCustomError("unit", f"is {value:g}, more than everything;write {value / 100:g} for {value:g} %")
    return value


def _bytes(value: Any) -> int:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)", value.strip()) if isinstance(value, str) else None
    if not matched:
        raise PydanticCustomError("unit", f"is {value!r}, not an amount of memory;write it as 64 GiB or 512 MiB")
    return int(float(matched[1]) * UNITS[matched[2]])


def _gpus(value: Any) -> Gpus:
    try:
        return parse_gpus(value, where=None) if isinstance(value, str) else parse_gpus("")
    except UserError as error:
        what, _, fix = str(error).partition(" — ")
        raise PydanticCustomError("gpus", f"{what.replace(repr(value), f'is {value!r}: it')};{fix}") from None


Count = Annotated[int, BeforeValidator(_count), Field(ge=1, le=1 << 40, strict=True)]
Fraction = Annotated[float, BeforeValidator(_fraction), Field(gt=0, le=1)]
Memory = Annotated[int, BeforeValidator(_bytes)]  # bytes
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]*$")]
Name = Annotated[str, Field(max_length=96, pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$")]
Repository = Annotated[str, Field(max_length=200, pattern=r"^[\w.-]+/[\w.-]+$")]


class Section(BaseModel):
    """Unknown keys are refused everywhere."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Checkpoint(Section):
    checkpoint: Repository  # owner/name on Hugging Face
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")] | None = None  # None: the newest
    path: Path | None = None  # a local copy; relative to the recipe's folder
    precision: Literal["bf16", "fp8", "mxfp4", "nvfp4"]  # of the weights


class Drafter(Checkpoint):
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"] = "VANILLA"
    trained_on: Literal["thinking", "non-thinking", "both"] | None = None  # answers of that mode; None: not known


class Parallel(Section):
    tp: Count = 1  # ranks that share a layer
    ep: Count = 1  # groups that share the experts; divides tp
    pp: Count = 1  # ranks that share the layers
    attention_dp: bool = False  # every rank attends for its own requests


class Limits(Section):
    batch: Count  # requests at a time
    sequence: Count  # tokens of a request, prompt and answer
    tokens: Count  # of all requests in one step


class KvCache(Section):
    fraction: Fraction  # of the memory that is free once the weights are loaded
    dtype: Literal["auto", "bf16", "fp8", "nvfp4"] = "auto"
    prefix_reuse: bool = False


class Container(Section):
    image: Text
    shared_memory: Memory = 64 << 30


class Recipe(Section):
    """All keys of a recipe. Lengths count tokens; K (`draft_length`) counts the drafts that a step verifies."""

    recipe: Literal[1]  # version of this format
    name: Name  # that of the file
    description: Text
    goal: Literal["latency", "interactive", "throughput"]
    gpus: Annotated[Gpus, BeforeValidator(_gpus)]  # of one node: B300x8
    nodes: Count = 1
    lane: Literal["serve", "trtllm-build", "engine"]
    release: Text | None = None  # of TensorRT-LLM
    unsupported: Text | None = None  # why this does not work today; such a recipe is listed and never launched
    target: Checkpoint
    drafter: Drafter
    block_size: Count
    draft_length: Count
    parallel: Parallel = Parallel()
    limits: Limits
    kv_cache: KvCache
    moe_backend: Literal["TRTLLM", "CUTLASS", "TRITON"] | None = None
    stream_interval: Count | None = None  # tokens between two messages of a stream
    container: Container | None = None
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = {}
    options: dict[str, Any] = {}  # further keys of trtllm-serve's YAML, as they stand there
    notes: list[Text] = []

    @property
    def machine(self) -> Gpus:
        return Gpus(self.gpus.card, self.gpus.count, self.nodes)


@dataclass(frozen=True)
class Loaded:
    """A recipe and the file it was read from."""

    recipe: Recipe
    document: Document


def recipe_files() -> dict[str, Path]:
    """Name → file of the recipes that come with the package."""
    return {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}


def read_recipe(name_or_file: str) -> Loaded:
    """A recipe of the package by its name, or any file. Raises Problems with all that is wrong with it."""
    known = recipe_files()
    file = known.get(name_or_file, Path(name_or_file))
    if name_or_file not in known and not file.exists():
        meant = nearest(file.stem, known)
        fix = f"did you mean {meant}?" if meant else "`dflash-trt recipe list` names them all"
        raise UserError(f"there is no recipe and no file {name_or_file!r}", fix=fix)
    document = read_document(file)
    problems = [*_cross_check(document)]
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        raise Problems(file, [*_explain(error.errors(), document), *problems]) from None
    if recipe.name != file.stem:
        problems.append(
            Problem(f"name is {recipe.name!r}", document.line(("name",)), f"write {file.stem}, as the file")
        )
    if problems:
        raise Problems(file, problems)
    return Loaded(recipe, document)


def _cross_check(document: Document) -> Iterator[Problem]:
    """What no single key can tell; of each rule, if the keys it needs are whole numbers."""

    def problem(keys: Keys, what: str, fix: str) -> Problem:
        return Problem(f"{'.'.join(map(str, keys))} {what}", document.line(keys), fix)

    def whole(*keys: str, default: int | None = None) -> int | None:
        found: Any = document.values
        for key in keys:
            found = found.get(key, default) if isinstance(found, dict) else default
        return found if type(found) is int and found > 0 else None

    values = document.values
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
    if k and block and k + 1 > block:
        holds = f"a block of {block} holds the anchor and {block - 1} drafts"
        yield problem(("draft_length",), f"is {k}, but {holds}", f"write {block - 1} or less")
    batch, tokens = whole("limits", "batch"), whole("limits", "tokens")
    if batch and tokens and k and tokens < batch * (k + 1):
        fix = f"write {batch * (k + 1)} or more"
        yield problem(("limits", "tokens"), f"is {tokens}, but a step verifies {batch} x {k + 1} tokens", fix)
    for role in ("target", "drafter"):
        section = values.get(role)
        if isinstance(section, dict) and isinstance(path := section.get("path"), str):
            where = document.file.parent / path
            if not (where / "config.json").is_file():
                fix = "give the folder of a downloaded checkpoint, or leave path out and pass it when you launch"
                yield problem((role, "path"), f"is {path!r}, but there is no {where / 'config.json'}", fix)
    lane, release = values.get("lane"), values.get("release")
    if lane in ("serve", "trtllm-build") and release is None:
        yield problem(("release",), "is missing", "name the TensorRT-LLM release that serves this recipe")


def _explain(errors: Iterable[ErrorDetails], document: Document) -> Iterator[Problem]:
    """Pydantic's findings in our words."""
    for error in errors:
        keys = tuple(error["loc"])
        line = document.line(keys)
        name = ".".join(map(str, keys))
        value = error["input"]
        match error["type"]:
            case "extra_forbidden":
                prefix = name.removesuffix(str(keys[-1]))
                yield unknown_key(keys[-1], _fields(keys[:-1]), line, prefix)
            case "missing":
                yield Problem(f"{name} is missing", line)
            case "unit" | "gpus":
                what, _, fix = error["msg"].partition(";")
                yield Problem(f"{name} {what}", line, fix)
            case "literal_error":
                meant = f"write {error['ctx']['expected'].replace(chr(39), '')}"
                yield Problem(f"{name} is {value!r}", line, meant)
            case "string_pattern_mismatch":
                yield Problem(f"{name} is {value!r}", line, f"it must match {error['ctx']['pattern']}")
            case _:
                said = error["msg"]
                yield Problem(f"{name} is {value!r}: {said[:1].lower()}{said[1:]}", line)


def _fields(keys: Keys) -> list[str]:
    """The keys known below `keys`."""
    model: Any = Recipe
    for key in keys:
        field = model.model_fields.get(key) if hasattr(model, "model_fields") else None
        kinds: list[Any] = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    fields: Mapping[str, Any] = getattr(model, "model_fields", {})
    return list(fields)
