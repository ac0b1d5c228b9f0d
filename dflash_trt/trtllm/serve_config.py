"""The YAML of `trtllm-serve --config` that a recipe stands for.

Keys and meanings are those of TensorRT-LLM's `llm_args.py`; the comments say why a value is what it is. The file is
judged by the table of the recipe's release before anybody writes it. It never ran: TensorRT-LLM needs a GPU.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.document import Keys, Problem, Problems, shown
from dflash_trt.errors import UserError
from dflash_trt.recipes import Loaded, Recipe
from dflash_trt.trtllm.releases import judge, read_release, releases
from dflash_trt.trtllm.support import FIRST, older

MODELS = Path("/models")  # where checkpoints lie unless somebody says otherwise: /models/owner/name
KV_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
OTHER_LANES = {
    "engine": "use `dflash-trt convert`, `build` and `serve` (docs/ranks.md)",
    "trtllm-build": "use `dflash-trt export` (docs/trtllm-build.md)",
}
DRAFT_KEY = "speculative_model"
PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
# Words that YAML 1.1 takes for something else than text.
NOT_TEXT = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)


@dataclass(frozen=True)
class Origins:
    """Key of the rendered file → key of the recipe it comes from."""

    keys: Mapping[Keys, Keys]
    loaded: Loaded

    def line(self, keys: Keys) -> int | None:
        """Where in the recipe to look for what stands at `keys`, or at its nearest parent."""
        while keys:
            if keys in self.keys:
                return self.loaded.document.line(self.keys[keys])
            keys = keys[:-1]
        return None


@dataclass(frozen=True)
class Composed:
    """What a recipe says as TensorRT-LLM's keys, before anybody judged them."""

    recipe: Recipe
    config: dict[str, Any]
    places: Origins  # lines of the recipe that keys of `config` come from
    problems: tuple[Problem, ...]  # of options that contradict the recipe's other keys, and are not in `config`
    why: Mapping[Keys, str]  # comments on keys of `config`
    target: Path
    draft: Path

    def judged(self) -> list[Problem]:
        """All that speaks against rendering it: `problems`, and what its release does not take."""
        version = self.recipe.release or ""  # of this lane `read_recipe` asks for one
        if version in releases():
            return [*self.problems, *judge(read_release(version), self.config, self.places)]
        line = self.places.loaded.document.line(("release",))
        fix = f"tables are there for {', '.join(releases())}"
        return [*self.problems, Problem(f"no table for TensorRT-LLM {version}", line, fix)]

    def consistent(self) -> Composed:
        """Itself. Raises Problems with all of `judged()` where preflight, which has a rule for keys, has none."""
        version = self.recipe.release or ""
        if self.problems or not (version in releases() or older(version, FIRST)):
            raise Problems(self.places.loaded.document.file, self.judged())
        return self


@dataclass(frozen=True)
class Rendered:
    """A recipe as TensorRT-LLM reads it."""

    config: dict[str, Any]
    places: Origins  # lines of the recipe that keys of `config` come from
    text: str  # `config` as YAML, with comments
    target: Path
    draft: Path


def compose(loaded: Loaded, *, target: Path | None = None, draft: Path | None = None) -> Composed:
    """`target` and `draft` are directories; without, those of the recipe, or below `MODELS`.

    Raises UserError for recipes of another lane and those marked as unsupported.
    """
    recipe, file = loaded.recipe, loaded.document.file
    refuse_unsupported(recipe)
    if recipe.lane != "serve":
        what = f"{recipe.name} is a recipe of the lane {recipe.lane}, which has no trtllm-serve configuration"
        raise UserError(what, where=file, fix=OTHER_LANES[recipe.lane])
    target = _place(target, recipe.target.path, recipe.target.checkpoint, file)
    draft = _place(draft, recipe.drafter.path, recipe.drafter.checkpoint, file)

    entries = _entries(recipe, draft)
    if recipe.drafter.attention_backend == "VANILLA":  # the default, and a key that early releases lack
        entries.pop((*SPECULATION, "attention_backend"))
    config = _nested({keys: value for keys, (value, _, _) in entries.items()})
    origins = {keys: origin for keys, (_, origin, _) in entries.items()}
    problems = _merge(config, recipe.options, origins, loaded)
    why = {keys: why for keys, (_, _, why) in entries.items() if why}
    return Composed(recipe, config, Origins(origins, loaded), tuple(problems), why, target, draft)


def render_config(loaded: Loaded, *, target: Path | None = None, draft: Path | None = None) -> Rendered:
    """As `compose`. Raises Problems, too, for keys and values that the recipe's release does not take."""
    composed = compose(loaded, target=target, draft=draft)
    if problems := composed.judged():
        raise Problems(loaded.document.file, problems)
    text = _text(loaded.recipe, composed.config, composed.why)
    return Rendered(composed.config, composed.places, text, composed.target, composed.draft)


def refuse_unsupported(recipe: Recipe) -> None:
    """Raises UserError with the reason of a recipe that is only listed."""
    if recipe.unsupported:
        raise UserError(f"{recipe.name} does not work today: {recipe.unsupported}")


def _place(given: Path | None, own: Path | None, checkpoint: str, file: Path) -> Path:
    path = given if given is not None else MODELS / checkpoint if own is None else file.parent / own
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError("its name is not UTF-8, as YAML is", where=ascii(str(path)), fix="rename it") from None
    return path.absolute()


SPECULATION = ("speculative_config",)
# Keys of trtllm-serve that a recipe says in another way → its key.
SAID: dict[Keys, Keys] = {("model",): ("target",), (*SPECULATION, "speculative_model_dir"): ("drafter",)}
Entry = tuple[Any, Keys, str | None]  # value, its origin in the recipe, why


def _entries(recipe: Recipe, draft: Path) -> dict[Keys, Entry]:
    """What the file says, in its order."""
    limits, parallel, cache = recipe.limits, recipe.parallel, recipe.kv_cache
    width = recipe.draft_length + 1
    entries: dict[Keys, Entry] = {
        ("tensor_parallel_size",): (parallel.tp, ("parallel", "tp"), None),
        ("moe_expert_parallel_size",): (parallel.ep, ("parallel", "ep"), "groups that share the experts"),
        ("pipeline_parallel_size",): (parallel.pp, ("parallel", "pp"), None),
        ("enable_attention_dp",): (
            parallel.attention_dp,
            ("parallel", "attention_dp"),
            "every rank attends for its own requests" if parallel.attention_dp else "all ranks share every request",
        ),
        ("max_batch_size",): (
            limits.batch,
            ("limits", "batch"),
            "of each rank" if parallel.attention_dp else "requests that run at a time",
        ),
        ("max_seq_len",): (
            limits.sequence,
            ("limits", "sequence"),
            "prompt and answer; pinned, for the drafter's context buffer is as long as this",
        ),
        ("max_num_tokens",): (
            limits.tokens,
            ("limits", "tokens"),
            f"of a step; verifying alone takes {limits.batch} x {width} = {limits.batch * width}",
        ),
        ("kv_cache_config", "free_gpu_memory_fraction"): (
            cache.fraction,
            ("kv_cache", "fraction"),
            "of what is free beside the weights; the drafter's context buffer is not part of it",
        ),
        ("kv_cache_config", "dtype"): (KV_DTYPES[cache.dtype], ("kv_cache", "dtype"), None),
        ("kv_cache_config", "enable_block_reuse"): (
            cache.prefix_reuse,
            ("kv_cache", "prefix_reuse"),
            "a prefix found in the cache gives the drafter no context",
        ),
        ("cuda_graph_config", "enable_padding"): (True, ("limits",), "graphs for a few sizes serve all"),
        ("cuda_graph_config", "max_batch_size"): (limits.batch, ("limits", "batch"), None),
    }
    if recipe.moe_backend:
        entries["moe_config", "backend"] = (recipe.moe_backend, ("moe_backend",), _moe(recipe.moe_backend))
    if recipe.stream_interval:
        entries["stream_interval",] = (recipe.stream_interval, ("stream_interval",), "steps between two messages")
    trained = recipe.block_size
    return entries | {
        (*SPECULATION, "decoding_type"): ("DFlash", ("drafter",), None),
        (*SPECULATION, DRAFT_KEY): (str(draft), ("drafter", "path"), _pinned(recipe)),
        (*SPECULATION, "max_draft_len"): (
            recipe.draft_length,
            ("draft_length",),
            f"of {trained - 1} that blocks of {trained} were trained for",
        ),
        (*SPECULATION, "attention_backend"): (
            recipe.drafter.attention_backend,
            ("drafter", "attention_backend"),
            {"TRTLLM": "SM100 and SM103, with FlashInfer", "FA4": "aimed at SM90"}.get(
                recipe.drafter.attention_backend
            ),
        ),
    }


def _moe(backend: str) -> str | None:
    words = {"TRTLLM": "the backend for low latency", "CUTLASS": "the backend for many tokens a step"}
    return words.get(backend)


def _pinned(recipe: Recipe) -> str:
    """Drafters were retrained under their old names, so the revision is part of the answer."""
    drafter = recipe.drafter
    return f"{drafter.checkpoint}, " + (
        f"revision {drafter.revision[:12]}" if drafter.revision else "no revision pinned"
    )


def _nested(flat: Mapping[Keys, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for keys, value in flat.items():
        section = config
        for key in keys[:-1]:
            section = section.setdefault(str(key), {})
        section[str(keys[-1])] = value
    return config


def _merge(
    config: dict[str, Any], options: Mapping[str, Any], origins: dict[Keys, Keys], loaded: Loaded, keys: Keys = ()
) -> list[Problem]:
    """Add the recipe's `options` to what its other keys say; both saying the same thing is a problem."""
    problems = []
    for name, value in options.items():
        path = (*keys, name)
        if isinstance(config.get(name), dict) and isinstance(value, dict):
            problems += _merge(config[name], value, origins, loaded, path)
        elif name in config or path in SAID:
            where, line = f"options.{'.'.join(map(str, path))}", loaded.document.line(("options", *path))
            if isinstance(config.get(name), dict):
                what, fix = f"{where} is {shown(value)}, but it is a section", "indent its keys below it"
            else:
                own = ".".join(map(str, SAID.get(path) or origins[path]))
                what, fix = f"{where} is what {own} says", "leave one out"
            problems.append(Problem(what, line, fix))
        else:
            config[name] = value
            origins[path] = ("options", *path)
    return problems


HEAD = """\
# {name}: {description}
#
# For `trtllm-serve MODEL --config THIS` of TensorRT-LLM {release}, on {machine}. Made by `dflash-trt recipe render`:
# change the recipe, not this file. Its keys were checked against that release's; no GPU has seen it.
"""


def _text(recipe: Recipe, config: Mapping[str, Any], why: Mapping[Keys, str]) -> str:
    head = HEAD.format(name=recipe.name, description=recipe.description, release=recipe.release, machine=recipe.machine)
    return head + "\n" + "".join(f"{line}\n" for line in _lines(config, why, ()))


def _lines(values: Mapping[str, Any], why: Mapping[Keys, str], keys: Keys) -> list[str]:
    lines: list[str] = []
    for name, value in values.items():
        path = (*keys, name)
        start = "  " * len(keys) + _scalar(name) + ":"
        if isinstance(value, Mapping) and value:
            lines += [start, *_lines(value, why, path)]
        else:
            comment = f"  # {why[path]}" if path in why else ""
            lines.append(f"{start} {_scalar(value)}{comment}")
    return lines


def quoted(text: str) -> str:
    """In double quotes; what a terminal would not show is escaped."""
    shown = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in shown)


def _scalar(value: Any) -> str:
    """One line that YAML 1.1 and 1.2 read alike."""
    match value:
        case str():
            plain = PLAIN.fullmatch(value) and not NOT_TEXT.fullmatch(value)
            return value if plain else quoted(value)
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value]
        case list():
            return f"[{', '.join(map(_scalar, value))}]"
        case Mapping():
            return f"{{{', '.join(f'{_scalar(key)}: {_scalar(inner)}' for key, inner in value.items())}}}"
        case float() if math.isfinite(value):
            mantissa, e, exponent = repr(value).partition("e")
            return mantissa + (".0" if e and "." not in mantissa else "") + e + exponent  # YAML 1.1 wants the point
        case int():
            return str(value)
    return str(yaml.safe_dump(value, default_flow_style=True, width=1 << 20)).removesuffix("...\n").strip()
