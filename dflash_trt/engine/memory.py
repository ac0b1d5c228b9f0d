"""What an engine takes of a GPU's memory, rank by rank, read off its graphs without a GPU.

Weights count as TensorRT keeps them: packed ones as they are stored, others in the engine's dtype, and scales of MXFP4,
which it looks up in a table, in `SCALE` bytes. Activations, the workspace, CUDA and NCCL are not known before
a build; `RESERVED` of the card is set aside for them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import onnx_ir as ir

from dflash_trt.engine.hardware import MEMORY
from dflash_trt.engine.load import Engine
from dflash_trt.engine.manifest import WIDTHS

RESERVED = 0.1
SCALE = 4  # bytes, as seen in engines of TensorRT-RTX 1.7
TWICE = "draft.*.[kv]_proj.weight"  # stacked for all layers' context, and with q for a layer's block
FLOATS = (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.FLOAT16)

# Pattern of a weight's name in a graph → what it is for; the first that fits holds.
KINDS = {
    "draft.*": "drafter",
    "target.*embed_tokens*": "embedding",
    "target.lm_head*": "head",
    "target.*.experts.*": "experts",
    "target.*.self_attn.*": "attention",
    "target.*.mlp.router.*": "router",
    "target.*.mlp.*": "MLP",
    "target.*": "norms",
}


@dataclass(frozen=True)
class RankMemory:
    """One rank's share, in bytes."""

    rank: int
    weights: dict[str, int]  # by kind
    cache_per_token: dict[str, int]  # by model: K and V of one position in all layers
    cache_per_slot: dict[str, int]  # by model, for the longest sequence
    slots: dict[str, int]  # by card: how many sequences of that length fit beside the weights


def measure(engine: Engine) -> list[RankMemory]:
    """The memory of each rank. Reads every rank's graph, no weights."""
    return [_measure(engine, rank) for rank in range(engine.manifest.mapping.world)]


def _measure(engine: Engine, rank: int) -> RankMemory:
    manifest = engine.manifest
    weights = _weights(engine.graph(rank=rank, draft=manifest.draft is not None, cpu=False), WIDTHS[manifest.dtype])
    token = manifest.cache_per_token
    slot = {role: size * manifest.limits.cache_len for role, size in token.items()}
    free = {card: size * 1e9 * (1 - RESERVED) - sum(weights.values()) for card, size in MEMORY.items()}
    slots = {card: max(0, int(left // sum(slot.values()))) for card, left in free.items()}
    return RankMemory(rank, weights, token, slot, slots)


def _weights(graph: Path, width: int) -> dict[str, int]:
    """Bytes by kind, in the order of `KINDS`; `width`: of a value of the engine's dtype."""
    found: Counter[str] = Counter()
    for name, value in ir.load(graph).graph.initializers.items():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            kind = next(kind for pattern, kind in KINDS.items() if fnmatchcase(name, pattern))
            found[kind] += _size(name, tensor, width if kind != "embedding" else None)
    return {kind: found[kind] for kind in dict.fromkeys(KINDS.values()) if found[kind]}


def _size(name: str, tensor: ir.ExternalTensor, width: int | None) -> int:
    """`width` None: as stored, for rows of the embedding are cast after they are looked up."""
    if tensor.dtype == ir.DataType.UINT8:
        width = SCALE
    elif tensor.dtype not in FLOATS:
        width = None
    size = tensor.nbytes if width is None else width * math.prod(tensor.shape.numpy())
    return 2 * size if tensor.dtype in FLOATS and fnmatchcase(name, TWICE) else size
