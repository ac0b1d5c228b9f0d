"""What a checkpoint directory holds, as data that `inspect` shows or prints as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.config import Config, read_config
from dflash_trt.checkpoint.draft import read_draft
from dflash_trt.checkpoint.experts import INSIDE, count_values
from dflash_trt.checkpoint.model import Draft, DraftConfig, Experts, Quantization, Rope, Target
from dflash_trt.checkpoint.quantized import packed_dtypes
from dflash_trt.checkpoint.target import read_target
from dflash_trt.errors import UserError

DRAFT_KEYS = ("dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids", "block_size")
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "max_position")


def describe_checkpoint(path: Path, block_size: int | None = None) -> dict[str, Any]:
    """A JSON-able card. A checkpoint that cannot be used has the reason under `problems` and little else."""
    card: dict[str, Any] = {"kind": "checkpoint", "path": str(path)}
    try:
        card["kind"] = "drafter" if is_draft(read_config(path)) else "target"
        checkpoint = read_draft(path, block_size) if card["kind"] == "drafter" else read_target(path)
        return card | _describe(checkpoint) | {"problems": []}
    except UserError as error:
        return card | {"problems": [str(error)]}


def is_draft(config: Config) -> bool:
    """Is this the config of a drafter, readable or not?"""
    names = config.values.get("architectures") or []
    return any(key in config for key in DRAFT_KEYS) or any("DFlash" in str(name) for name in names)


def _describe(checkpoint: Target | Draft) -> dict[str, Any]:
    config, refs, quantization = checkpoint.config, checkpoint.tensors.values(), checkpoint.quantization
    packed = packed_dtypes(quantization)
    stored: Counter[str] = Counter()
    for ref in refs:
        stored[ref.dtype] += ref.nbytes
    cache_values = 2 * config.layers * config.kv_heads * config.head_dim  # K and V
    own = _describe_draft(checkpoint.config) if isinstance(checkpoint, Draft) else _describe_target(checkpoint)
    return {
        **own,
        "files": sorted({ref.file.name for ref in refs}),
        "parameters": count_values({name: ref for name, ref in checkpoint.tensors.items() if name not in packed})
        + (quantization.values if quantization else 0),
        "nvfp4": _nvfp4(quantization),
        "stored_bytes": dict(stored),
        **{key: getattr(config, key) for key in SIZES},
        "rope": _rope(config.rope),
        "attention_bias": config.attention_bias,
        "cache_bytes_per_token": {"bfloat16": 2 * cache_values, "float32": 4 * cache_values},
    }


def _nvfp4(quantization: Quantization | None) -> dict[str, Any] | None:
    """Sizes in bytes; `of_bf16` is the packed weights' size against the same weights in bfloat16."""
    if quantization is None:
        return None
    packed = quantization.packed
    return {
        "algo": quantization.algo,
        "weights": len(packed),
        "activations": sum(packed.values()),
        "nbytes": quantization.nbytes,
        "of_bf16": round(quantization.nbytes / (2 * quantization.values), 4) if packed else None,
        "notes": list(quantization.notes),
    }


def _describe_draft(config: DraftConfig) -> dict[str, Any]:
    layers = zip(config.windows, config.causal, strict=True)
    scales = {"embedding_scale": 1.0, "logit_scale": 1.0, "logit_softcap": None}
    return {
        "family": "DFlash, z-lab layout",
        "attention": [_attention(window, causal) for window, causal in layers],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        **{key: getattr(config, key) for key, usual in scales.items() if getattr(config, key) != usual},
    }


def _describe_target(target: Target) -> dict[str, Any]:
    config = target.config
    return {
        "family": config.model_type,
        "attention": [_attention(window, causal=True) for window in config.windows],
        "tied_head": config.tie_embeddings,
        "mlp_bias": config.mlp_bias,
        "experts": _experts(target, config.experts) if config.experts else None,
        "sinks": config.sinks,
        "eos_ids": list(config.eos_ids),
    }


def _experts(target: Target, experts: Experts) -> dict[str, Any]:
    """`bytes`: of all of them, their scales and biases."""
    size = sum(ref.nbytes for name, ref in target.tensors.items() if INSIDE in name)
    return {"count": experts.count, "top_k": experts.top_k, "storage": experts.storage, "bytes": size}


def _attention(window: int | None, causal: bool) -> str:
    return f"{f'window {window}' if window else 'full'}, {'causal' if causal else 'bidirectional'}"


def _rope(rope: Rope) -> dict[str, Any]:
    """The kind, the base and whatever is not at its default."""
    changed = {f.name: getattr(rope, f.name) for f in fields(rope) if getattr(rope, f.name) != f.default}
    return {"kind": rope.kind} | changed
