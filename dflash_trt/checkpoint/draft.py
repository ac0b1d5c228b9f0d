"""Read a drafter in the z-lab layout: config keys wherever their exporters put them, tensors with or without prefix."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.config import Config, read_config
from dflash_trt.checkpoint.model import Draft, DraftConfig, StackConfig, TensorRef
from dflash_trt.checkpoint.quantized import PACKED, packed_dtypes, read_quantization
from dflash_trt.checkpoint.stack import check_tensors, read_bias, read_stack, read_windows, stack_shapes
from dflash_trt.checkpoint.variants import KEYS, refuse_variant_config, refuse_variant_tensors
from dflash_trt.checkpoint.weights import read_tensors, rename_tensors
from dflash_trt.errors import UserError

NESTED = "dflash_config"
NESTED_KEYS = {
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "is_causal", "causal", "use_swa",
    "swa_window_size", "input_embedding_scale", "output_multiplier", "logit_scale", "final_logit_softcapping",
}  # fmt: skip


def read_draft(path: Path, block_size: int | None = None) -> Draft:
    """Read and check a drafter; no weight is loaded.

    `block_size` asks for shorter blocks than the drafter was trained with, or tells the size where its config does not.
    Raises UserError for anything missing, contradictory, damaged or unsupported.
    """
    path = Path(path)
    config = read_config(path)
    nested = config.section(NESTED).values.keys()
    config = config.joined(NESTED)
    refuse_variant_config(config)
    if unread := sorted(nested - NESTED_KEYS - KEYS.keys()):
        raise config.bad(f"{NESTED}.{unread[0]}", "is not supported", "if it only tells of the training, remove it")
    tensors = rename_tensors(read_tensors(path), lambda name: name.removeprefix("model."))
    refuse_variant_tensors(tensors)

    windows, causal = _read_attention(config)
    stack = read_stack(
        config,
        attention_bias=read_bias(config, "attention_bias", tensors, "self_attn"),
        qk_norm=True,
        windows=windows,
    )
    draft = DraftConfig(
        **vars(stack),
        block_size=_read_block_size(config, block_size),
        mask_token_id=_read_mask(config, stack.vocab),
        target_layer_ids=_read_target_layer_ids(config),
        num_target_layers=config.integer("num_target_layers", None, at_least=1),
        causal=causal,
        embedding_scale=config.number("input_embedding_scale", 1.0),
        logit_scale=config.number("output_multiplier", config.number("logit_scale", 1.0)),
        logit_softcap=config.number("final_logit_softcapping", None),
    )
    if draft.num_target_layers is not None:
        check_target_layer_ids(draft.target_layer_ids, draft.num_target_layers, config.file)
    _check_fc(tensors.get("fc.weight"), draft)
    shapes = _shapes(stack, len(draft.target_layer_ids))
    tensors, shapes, quantization = read_quantization(config, tensors, shapes)
    check_tensors(tensors, shapes, config, packed_dtypes(quantization))
    return Draft(path, draft, tensors, quantization)


def check_target_layer_ids(ids: tuple[int, ...], layers: int, where: object) -> None:
    """Ids are 0-based layer outputs, so the last layer is `layers - 1`."""
    if outside := [i for i in ids if not 0 <= i < layers]:
        raise UserError(
            f"target_layer_ids holds {outside[0]}, but the target has layers 0 to {layers - 1}",
            where=where,
            fix="ids are 0-based layer outputs",
        )


def _read_block_size(config: Config, wanted: int | None) -> int:
    trained = config.integer("block_size", None)
    size = trained if wanted is None else wanted
    if size is None:
        raise config.bad("block_size", "is missing", "pass --block-size with the size the drafter was trained for")
    if size < 2:
        raise config.bad("block_size", f"is {size}; a block holds the anchor and at least one draft")
    if trained is not None and size > trained:
        raise config.bad(
            "block_size",
            f"{size} asked, but the drafter was trained for {trained}",
            f"pass --block-size {trained} or less",
        )
    return size


def _read_mask(config: Config, vocab: int) -> int:
    mask = config.integer("mask_token_id")
    if mask >= vocab:
        raise config.bad("mask_token_id", f"is {mask}, but the embedding table has {vocab} rows")
    return mask


def _read_target_layer_ids(config: Config) -> tuple[int, ...]:
    ids = config.integers("target_layer_ids")
    if not ids or len(set(ids)) < len(ids):
        raise config.bad("target_layer_ids", f"is {list(ids)}: it must name layers, each once")
    return ids


def _read_attention(config: Config) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Per layer its window, and whether attention inside the block is causal.

    `is_causal` overrides `causal`, which overrides the layer's kind: sliding layers are causal, full ones are not
    (z-lab's reference and vLLM). `use_swa` makes all layers sliding and, unless told otherwise, not causal.
    """
    windows = read_windows(config)
    per_layer = tuple(window is not None for window in windows)
    if config.flag("use_swa", False):
        width = config.integer("swa_window_size", config.integer("sliding_window", None, at_least=1), at_least=1)
        if width is None:
            raise config.bad("swa_window_size", "is missing beside use_swa")
        windows, per_layer = (width,) * len(windows), (False,) * len(windows)
    said = config.flag("is_causal", config.flag("causal", None))
    return windows, per_layer if said is None else (said,) * len(windows)


def _check_fc(fc: TensorRef | None, draft: DraftConfig) -> None:
    """The mismatch that a generic shape error would not explain."""
    columns = len(draft.target_layer_ids) * draft.hidden
    if fc is not None and fc.dtype != PACKED and fc.shape[1:] != (columns,):
        raise UserError(
            f"fc.weight has shape {list(fc.shape)}, but {len(draft.target_layer_ids)} target_layer_ids x hidden size "
            f"{draft.hidden} = {columns} columns",
            where=fc.file,
            fix="config and weights are of different revisions",
        )


def _shapes(stack: StackConfig, taps: int) -> dict[str, tuple[int, ...]]:
    own: dict[str, tuple[int, ...]] = {
        "fc.weight": (stack.hidden, taps * stack.hidden),
        "hidden_norm.weight": (stack.hidden,),
    }
    return own | stack_shapes(stack, o_bias=True)
