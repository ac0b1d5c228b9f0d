"""The block: its width, its mask token, and the target layers that the drafter listens to."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.checkpoint.shape import DrafterShape
from dflash_trt.trtllm.deployment import ERROR, WARNING, Deployment
from dflash_trt.trtllm.rules.table import Fault, rule
from dflash_trt.trtllm.settings import SPECULATION

LENGTH = (SPECULATION, "max_draft_len")
MASK = (SPECULATION, "mask_token_id")
IDS = (SPECULATION, "target_layer_ids")
ANCHOR_DRAFTS = ("DSpark", "an anchor slot that drafts")


@rule(
    "DF010",
    ERROR,
    "K+1 is not more than the block the drafter was trained on",
    why="TensorRT-LLM raises ValueError at the first forward, after all weights are loaded",
    source="_torch/speculative/dflash.py (TensorRT-LLM PR 17935)",
)
def block_holds_the_drafts(deployment: Deployment) -> Iterator[Fault]:
    width, drafter = deployment.settings.width, deployment.drafter.shape
    if width and drafter and drafter.block_size and width > (places := _places(drafter)):
        needed = width - places + drafter.block_size
        what = f"max_draft_len {width - 1} needs a block of {needed}; the drafter was trained on {drafter.block_size}"
        yield Fault(what, f"write {places - 1} or less", LENGTH)


@rule(
    "DF011",
    WARNING,
    "K+1 is as wide as the block the drafter was trained on",
    why="a narrower block drafts less, and it is not the one that training fitted",
    source="TensorRT-LLM PR 19466 warns; arXiv 2602.06036 table 8 (used at 8: 5.09 tokens trained at 16, 5.21 at 8)",
)
def block_is_used_whole(deployment: Deployment) -> Iterator[Fault]:
    width, drafter = deployment.settings.width, deployment.drafter.shape
    if width and width > 1 and drafter and drafter.block_size and width < (places := _places(drafter)):
        what = f"max_draft_len {width - 1} drafts less than the {places - 1} tokens of a block of {drafter.block_size}"
        yield Fault(what, f"write {places - 1}, unless measurements speak for less", LENGTH)


@rule(
    "DF012",
    ERROR,
    "max_num_tokens holds a step of all sequences: max_batch_size x (1+K)",
    why="memory was overwritten at start in one release; later ones refuse it",
    source="TensorRT-LLM PR 19466 (test_dflash_config_budget.py)",
)
def step_fits_the_tokens(deployment: Deployment) -> Iterator[Fault]:
    settings = deployment.settings
    if settings.width is None or settings.tokens >= (needed := settings.batch * settings.width):
        return
    fits = settings.tokens // settings.width
    said = "" if deployment.has("max_num_tokens") else " (the default)"
    batch = "" if deployment.has("max_batch_size") else " (the default)"
    yield Fault(
        f"max_num_tokens is {settings.tokens}{said}, but a step of max_batch_size {settings.batch}{batch} x "
        f"(1 + {settings.width - 1}) takes {needed}",
        f"write max_num_tokens {needed} or more" + (f", or max_batch_size {fits} or less" if fits else ""),
        ("max_num_tokens",) if deployment.has("max_num_tokens") else ("max_batch_size",),
    )


@rule(
    "DF013",
    ERROR,
    "a mask token is known",
    why="TensorRT-LLM raises ValueError, or falls back to vocab_size, which is one past the table",
    source="_torch/speculative/dflash.py and modeling_dflash.py of TensorRT-LLM",
)
def mask_is_known(deployment: Deployment) -> Iterator[Fault]:
    speculation, drafter = deployment.settings.speculation, deployment.drafter.shape
    if speculation and speculation.mask_token_id is None and drafter and drafter.mask_token_id is None:
        fix = "add mask_token_id, the token its training masked with, to speculative_config"
        yield Fault("neither the file nor the drafter's dflash_config names a mask_token_id", fix, MASK)


@rule(
    "DF014",
    ERROR,
    "the mask token has a row in the target's embedding",
    why="the block is embedded with the target's table: an id past its end reads other memory",
    source="_torch/speculative/dflash.py (blocks go through the target's embed_tokens)",
)
def mask_is_in_the_table(deployment: Deployment) -> Iterator[Fault]:
    speculation, drafter, target = deployment.settings.speculation, deployment.drafter.shape, deployment.target.shape
    said = speculation.mask_token_id if speculation else None
    mask = said if said is not None else drafter.mask_token_id if drafter else None
    vocab = target.vocab if target else drafter.vocab if drafter else None
    if mask is not None and vocab is not None and not 0 <= mask < vocab:
        whose = "the file's" if said is not None else "the drafter's"
        what = f"{whose} mask_token_id is {mask}, but the embedding has rows 0 to {vocab - 1}"
        yield Fault(what, "write the id that the drafter was trained with", MASK)


@rule(
    "DF015",
    WARNING,
    "the file does not overrule what the drafter was trained with",
    why="another mask or other layers mean other numbers than it learned from: nearly every draft is refused",
    source="DFlashDecodingConfig (the file wins); arXiv 2602.06036",
)
def training_is_respected(deployment: Deployment) -> Iterator[Fault]:
    speculation, drafter = deployment.settings.speculation, deployment.drafter.shape
    if speculation is None or drafter is None:
        return
    said, trained = speculation.mask_token_id, drafter.mask_token_id
    if said is not None and trained is not None and said != trained:
        yield Fault(f"mask_token_id {said} overrules the drafter's {trained}", "leave it out", MASK)
    ids, own = speculation.target_layer_ids, drafter.target_layer_ids
    if ids is not None and own is not None and sorted(ids) != sorted(own):
        severity = ERROR if len(ids) != len(own) else None
        also = f", and `fc` takes {len(own)} layers" if severity else ""
        yield Fault(f"target_layer_ids {_list(ids)} overrule the drafter's {_list(own)}{also}", "leave them out", IDS,
                    severity)  # fmt: skip


@rule(
    "DF016",
    ERROR,
    "target_layer_ids ascend",
    why="TensorRT-LLM sorts them, so `fc` gets its columns in another order than it was trained on; nothing fails, and "
    "next to no draft is accepted",
    source="_torch/speculative/dflash.py of TensorRT-LLM",
)
def ids_are_sorted(deployment: Deployment) -> Iterator[Fault]:
    ids = _ids(deployment)
    if list(ids) != sorted(ids):
        fix = "reorder the columns of fc.weight to ascending ids, and the ids with them"
        yield Fault(f"target_layer_ids {_list(ids)} do not ascend: they would be sorted", fix, IDS)


@rule(
    "DF017",
    ERROR,
    "target_layer_ids are layers of the target",
    why="a layer that does not exist hands over nothing: `fc` is fed memory nobody wrote",
    source="_torch/speculative/dflash.py; ids are 0-based layer outputs (TensorRT-LLM does not add 1)",
)
def ids_are_layers(deployment: Deployment) -> Iterator[Fault]:
    target, drafter = deployment.target.shape, deployment.drafter.shape
    layers = target.layers if target else drafter.num_target_layers if drafter else None
    if layers is None:
        return
    if outside := [id for id in _ids(deployment) if not 0 <= id < layers]:
        what = f"target_layer_ids hold {_list(outside)}, but the target has layers 0 to {layers - 1}"
        yield Fault(what, "is this the drafter's target? Ids count layer outputs from 0", IDS)


@rule(
    "DF018",
    ERROR,
    "no id is named twice in target_layer_ids",
    why="a layer is captured once: the columns of its other place are fed memory nobody wrote",
    source="_torch/speculative/dflash.py (DFlashSpecMetadata: one column range a layer)",
)
def ids_are_different(deployment: Deployment) -> Iterator[Fault]:
    ids = _ids(deployment)
    if twice := sorted({id for id in ids if ids.count(id) > 1}):
        yield Fault(f"target_layer_ids name {_list(twice)} twice", "correct the drafter's config.json", IDS)


@rule(
    "DF019",
    ERROR,
    "target_layer_ids are known",
    why="no hidden states would be captured, and the drafter drafts from nothing",
    source="_torch/speculative/dflash.py and llm_args.py (dflash_config.target_layer_ids, or the file)",
)
def ids_are_known(deployment: Deployment) -> Iterator[Fault]:
    speculation, drafter = deployment.settings.speculation, deployment.drafter.shape
    if speculation and drafter and not _ids(deployment):
        fix = "add target_layer_ids, as the drafter was trained, to speculative_config"
        yield Fault("neither the file nor the drafter's dflash_config names target_layer_ids", fix, IDS)


def _places(drafter: DrafterShape) -> int:
    """K+1 at most: the block's anchor does not draft, except in DSpark and its like."""
    return (drafter.block_size or 0) + (drafter.variant in ANCHOR_DRAFTS)


def _ids(deployment: Deployment) -> tuple[int, ...]:
    """Those that count: the file's, else the drafter's."""
    speculation, drafter = deployment.settings.speculation, deployment.drafter.shape
    if speculation and speculation.target_layer_ids:
        return speculation.target_layer_ids
    return (drafter.target_layer_ids or ()) if drafter else ()


def _list(ids: object) -> str:
    return ", ".join(map(str, ids)) if isinstance(ids, list | tuple) else str(ids)
