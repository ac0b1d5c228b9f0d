"""Recipes (`build_recipes/*.yaml`): one file says how one pair is served on one machine for one goal.

docs/recipes.md explains the keys to those who write them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from dflash_trt.document import Document, Problems, nearest, read_document, shown
from dflash_trt.errors import UserError
from dflash_trt.gpus import Gpus, parse_gpus
from dflash_trt.recipe_problems import cross_check, explain

FOLDER = Path(str(files("dflash_trt.build_recipes")))
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _wrong(what: str, fix: str) -> PydanticCustomError:
    """What is said of a value after its key's name."""
    return PydanticCustomError("own", "{what}", {"what": what, "fix": fix})


def _number(text: str) -> float | None:
    """As people write numbers: 0.8, 0,8, 1e3."""
    try:
        number = float(text.replace(",", ".", 1))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _count(value: Any) -> Any:
    """A whole number; `32k` and `8192 tokens` are how people write other files, 1e3 is text to YAML 1.1."""
    number: float | None = value if isinstance(value, float) and math.isfinite(value) else None
    if isinstance(value, str):
        if matched := re.fullmatch(r"(\d[\d_,]*)\s*([kKmM]i?)?\s*[a-zA-Z]*", value.strip()):
            factor = {"": 1, "k": 1000, "ki": 1024, "m": 10**6, "mi": 1 << 20}[(matched[2] or "").lower()]
            number = int(re.sub(r"[_,]", "", matched[1])) * factor
        else:
            number = _number(value)
    if number is not None and number == int(number):
        raise _wrong(f"is {shown(value)}, not a whole number", f"write {int(number)}, without a unit")
    return value


def _fraction(value: Any) -> Any:
    number = _number(value.strip().removesuffix("%").strip()) if isinstance(value, str) else None
    if number is not None:
        meant = number / 100 if number > 1 or "%" in value else number
        raise _wrong(f"is {shown(value)}, not a fraction", f"write {meant:g}, a share between 0 and 1")
    if type(value) in (int, float) and 2 <= value <= 100:
        raise _wrong(f"is {value:g}, more than everything", f"write {value / 100:g} for {value:g} %")
    return value


def _bytes(value: Any) -> int:
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB)", value.strip()) if isinstance(value, str) else None
    if not matched:
        raise _wrong(f"is {shown(value)}, not an amount of memory", "write it as 64 GiB or 512 MiB")
    return int(float(matched[1]) * UNITS[matched[2]])


def _gpus(value: Any) -> Gpus:
    text = value if isinstance(value, str) else ""
    try:
        return parse_gpus(text, where=None)
    except UserError as error:
        what, _, fix = str(error).partition(" — ")
        raise _wrong(f"is {shown(value)}: it{what.removeprefix(repr(text))}", fix) from None


def _printable(text: str) -> str:
    """Line breaks, of which YAML has more than one kind, would end the comments that texts are put into."""
    if strange := next((c for c in text if not c.isprintable()), None):
        raise _wrong(f"holds the character U+{ord(strange):04X}", "write one line of plain text")
    return text


Count = Annotated[int, BeforeValidator(_count), Field(ge=1, le=1 << 40, strict=True)]
Fraction = Annotated[float, BeforeValidator(_fraction), Field(gt=0, le=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Memory = Annotated[int, BeforeValidator(_bytes)]  # bytes
Line = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
Text = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_printable)]
Name = Annotated[str, Field(max_length=96, pattern=r"^[a-z0-9]+([.-][a-z0-9]+)*$")]
Repository = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{7,40}$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Section(BaseModel):
    """Unknown keys are refused everywhere."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Checkpoint(Section):
    checkpoint: Repository  # owner/name on Hugging Face
    revision: Commit | None = None  # None: the newest
    path: Path | None = None  # a local copy; relative to the recipe's folder
    precision: Literal["bf16", "fp8", "mxfp4", "nvfp4"]  # of the weights


class Drafter(Checkpoint):
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"] = "VANILLA"
    trained_on: Literal["thinking", "non-thinking", "both"] | None = None  # answers of that mode; None: not known


class Parallel(Section):
    tp: Count = 1  # ranks that share a layer
    ep: Count = 1  # groups that share the experts; divides tp
    pp: Count = 1  # ranks that share the layers
    attention_dp: Flag = False  # every rank attends for its own requests


class Limits(Section):
    batch: Count  # requests at a time
    sequence: Count  # tokens of a request, prompt and answer
    tokens: Count  # of all requests in one step


class KvCache(Section):
    fraction: Fraction  # of the memory that is free once the weights are loaded
    dtype: Literal["auto", "bf16", "fp8", "nvfp4"] = "auto"
    prefix_reuse: Flag = False


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
    block_size: Annotated[Count, Field(ge=2)]  # the anchor and at least a draft
    draft_length: Count
    parallel: Parallel = Parallel()
    limits: Limits
    kv_cache: KvCache
    moe_backend: Literal["TRTLLM", "CUTLASS", "TRITON"] | None = None
    stream_interval: Count | None = None  # tokens between two messages of a stream
    container: Container | None = None
    environment: dict[Variable, Line] = {}
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
    problems = [*cross_check(document)]
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        raise Problems(file, [*explain(error.errors(), document, Recipe), *problems]) from None
    if problems:
        raise Problems(file, problems)
    return Loaded(recipe, document)
