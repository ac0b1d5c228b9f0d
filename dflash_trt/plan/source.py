"""What to plan: from a recipe, from published checkpoints, or from local directories."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_trt.checkpoint.shape import DrafterShape, Shape, read_drafter_shape, read_shape
from dflash_trt.errors import UserError
from dflash_trt.gpus import Gpus, parse_gpus
from dflash_trt.kv import CACHE_WIDTHS
from dflash_trt.plan.acceptance import Acceptance, find_acceptance, fit_rates
from dflash_trt.plan.models import Model, Split, read_model
from dflash_trt.plan.steps import Method
from dflash_trt.plan.sweep import BATCHES, Goal, Workload
from dflash_trt.published import published, repositories
from dflash_trt.recipes import read_recipe

OTHER = "give the drafter that was trained for this target"
MOST_DRAFT = 63  # drafts of a step; published blocks have 16 at most


@dataclass(frozen=True)
class Order:
    """All that a plan is made for."""

    model: Model
    gpus: Gpus
    splits: tuple[Split, ...]
    searched: bool  # `splits` are all there are, not one that was asked for
    workload: Workload
    accepted: dict[Method, Acceptance]
    batches: tuple[int, ...] = BATCHES
    drafts: tuple[int, ...] | None = None
    goal: Goal = "interactive"
    notes: tuple[str, ...] = ()


def order_of_recipe(name_or_file: str, category: str, context: int, sequence: int | None, search: bool) -> Order:
    """The recipe's pair, machine, split, goal and, unless given, sequence. Raises UserError for what is not covered."""
    loaded = read_recipe(name_or_file)
    recipe, file = loaded.recipe, loaded.document.file
    if recipe.parallel.pp > 1:
        what = f"pipeline parallelism (pp {recipe.parallel.pp}) is not modelled"
        raise UserError(what, where=file, fix="plan splits layers over the GPUs of one node")
    beside = [path and file.parent / path for path in (recipe.target.path, recipe.drafter.path)]
    model = open_model(
        str(beside[0] or recipe.target.checkpoint), str(beside[1] or recipe.drafter.checkpoint), recipe.target.precision
    )
    model = replace(model, name=recipe.target.checkpoint)
    parallel = recipe.parallel
    split = Split(parallel.tp, parallel.ep, parallel.attention_dp)
    cache = "bf16" if recipe.kv_cache.dtype == "auto" else recipe.kv_cache.dtype
    notes = (f"the recipe is marked unsupported: {recipe.unsupported}",) if recipe.unsupported else ()
    return Order(
        model=model,
        gpus=recipe.machine,
        splits=splits_of(model, recipe.machine) if search else checked(model, recipe.machine, [split]),
        searched=search,
        workload=make_workload(model, context, sequence or recipe.limits.sequence, cache),
        accepted=find_accepted(model, category),
        goal=recipe.goal,
        notes=notes,
    )


def order_of_checkpoints(
    target: str,
    draft: str | None,
    gpus: str,
    splits: Sequence[Split] | None,
    category: str,
    context: int,
    sequence: int | None,
    cache: str = "bf16",
    precision: str | None = None,
) -> Order:
    """`splits` None: every one that the machine and the model allow."""
    machine, model = parse_gpus(gpus), open_model(target, draft, precision)
    accepted = find_accepted(model, category)
    if draft and draft not in repositories() and (known := accepted.get("dflash")):
        source = f"{known.source}; that is of the published drafter: pass --tau with what yours does"
        accepted["dflash"] = replace(known, source=source)
    return Order(
        model=model,
        gpus=machine,
        splits=splits_of(model, machine) if splits is None else checked(model, machine, splits),
        searched=splits is None,
        workload=make_workload(model, context, sequence, cache),
        accepted=accepted,
    )


def make_workload(model: Model, context: int, sequence: int | None, cache: str) -> Workload:
    """`sequence` None: four contexts, or all that the model was made for."""
    if cache not in CACHE_WIDTHS:
        raise UserError(f"there is no KV cache in {cache}", where="--kv-dtype", fix=f"choose {', '.join(CACHE_WIDTHS)}")
    if model.max_position and context > model.max_position:
        what = f"{context:,} tokens are more than the {model.max_position:,} that {model.name} was made for"
        raise UserError(what, where="--context", fix=f"pass {model.max_position} or less")
    sequence = sequence or min(4 * context, model.max_position or 4 * context)
    if context > sequence:
        what = f"a context of {context:,} tokens on average is more than the {sequence:,} of the longest sequence"
        raise UserError(what, where="--context", fix=f"lower it, or pass --sequence {context} or more")
    if model.max_position and sequence > model.max_position:
        what = f"{sequence:,} tokens are more than the {model.max_position:,} that {model.name} was made for"
        raise UserError(what, where="--sequence", fix=f"pass {model.max_position} or less")
    return Workload(context, sequence, cache)


@functools.cache
def open_model(target: str, draft: str | None, precision: str | None = None) -> Model:
    """A directory or a published repository each; without a drafter, the published one for that target."""
    shape, name = _target(target)
    drafter = _drafter(draft) if draft else _published_drafter(name)
    if drafter and drafter.num_target_layers not in (None, shape.layers):
        what = f"the drafter is for a target of {drafter.num_target_layers} layers, but {name} has {shape.layers}"
        raise UserError(what, where=drafter.file, fix=OTHER)
    if drafter and drafter.hidden != shape.hidden:
        what = f"the drafter has {drafter.hidden} hidden values, but {name}, whose embedding and head it uses, has "
        raise UserError(f"{what}{shape.hidden}", where=drafter.file, fix=OTHER)
    return read_model(name, shape, drafter, precision)


def _target(text: str) -> tuple[Shape, str]:
    """Its shape, and the name by which drafters and acceptance lengths are found: a copy of a published one has its."""
    if Path(text).is_dir():
        shape, folder = read_shape(Path(text)), Path(text).resolve().name.lower()
        for name in repositories():
            if name.rpartition("/")[2].lower() == folder and published(name).role == "target":
                theirs = published(name).shape()
                if (theirs.layers, theirs.hidden, theirs.heads) == (shape.layers, shape.hidden, shape.heads):
                    return shape, name
        return shape, text
    found = published(text, where="--target")
    if found.role != "target":
        raise UserError(f"{text} is a drafter", where="--target", fix=f"its target is {found.target}")
    return found.shape(), text


def _drafter(text: str) -> DrafterShape:
    if Path(text).is_dir():
        return read_drafter_shape(Path(text))
    found = published(text, where="--draft")
    if found.role != "drafter":
        raise UserError(f"{text} is a target", where="--draft", fix="give its DFlash drafter")
    return found.drafter_shape()


@functools.cache
def _published_drafter(target: str) -> DrafterShape | None:
    found = (published(name) for name in repositories())
    return next((one.drafter_shape() for one in found if one.target == target), None)


def splits_of(model: Model, gpus: Gpus) -> tuple[Split, ...]:
    """Powers of two up to a node; experts whole or split all the way; attention split or, with experts, by rows."""
    found = []
    for tp in (1 << power for power in range(gpus.count.bit_length())):
        choices = [Split(tp)]
        if model.target.experts and tp > 1:
            choices += [Split(tp, tp), Split(tp, tp, True)]
        for split in choices:
            try:
                model.check_split(split)
            except UserError:
                continue
            found.append(split)
    return tuple(found)


def checked(model: Model, gpus: Gpus, splits: Sequence[Split]) -> tuple[Split, ...]:
    for split in splits:
        if split.tp > gpus.count:
            what = f"tp {split.tp} is more than the {gpus.count} GPUs of a node of {gpus}"
            fix = "links between nodes are not modelled; give a tp within a node"
            raise UserError(what, where="--tp", fix=fix)
        model.check_split(split)
    return tuple(splits)


def find_accepted(model: Model, category: str) -> dict[Method, Acceptance]:
    methods: tuple[Method, ...] = ("eagle3", "dflash")
    found = {method: find_acceptance(model.name, method, category) for method in methods}
    return {method: one for method, one in found.items() if one}


def check_drafts(model: Model, drafts: Sequence[int]) -> None:
    """Raises UserError for a K that the drafter's block does not hold."""
    block = model.dflash.block if model.dflash else None
    if block and max(drafts) + 1 > block:
        what = (
            f"draft length {max(drafts)} does not fit a block of {block}, which holds the anchor and {block - 1} drafts"
        )
        raise UserError(what, where="--draft-length", fix=f"pass {block - 1} or less")


def parse_acceptance(text: str, where: str) -> Acceptance:
    """`4.4@9`, or several as in `3.1@3,4.4@9`: tokens a step when so many drafts are checked."""
    tau: dict[int, float] = {}
    for part in text.split(","):
        tokens, at, draft = part.partition("@")
        try:
            length, drafts = float(tokens), int(draft)
        except ValueError:
            at = ""
        if not at or not 1 <= drafts <= MOST_DRAFT:
            fix = f"write tokens@drafts, as in 4.4@9, with {MOST_DRAFT} drafts at most"
            raise UserError(f"{part!r} is no acceptance length", where=where, fix=fix)
        if drafts in tau:
            raise UserError(f"{text!r} has two lengths for {drafts} drafts", where=where, fix="give one")
        tau[drafts] = length
    return fit_rates(tau, source=where)


def parse_numbers(text: str, where: str, most: int) -> tuple[int, ...]:
    """`1,2,4`, `1-9` or both."""
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        low, dash, high = part.partition("-")
        try:
            numbers = range(int(low), int(high if dash else low) + 1)
        except ValueError:
            numbers = range(0)
        if not numbers or numbers[0] < 1 or numbers[-1] > most:
            fix = f"write numbers from 1 to {most:,}, as in 1,2,4 or 1-9"
            raise UserError(f"{part!r} is no number or range", where=where, fix=fix)
        found |= set(numbers)
    return tuple(sorted(found))
