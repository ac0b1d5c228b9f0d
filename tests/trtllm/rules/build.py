"""Deployments for tests: one that nothing speaks against, and what to change in it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import yaml

from dflash_trt.checkpoint.shape import DrafterShape, Shape
from dflash_trt.document import Document, read_document
from dflash_trt.gpus import parse_gpus
from dflash_trt.published import published
from dflash_trt.trtllm.deployment import Deployment, Source
from dflash_trt.trtllm.settings import read_settings

TARGET, DRAFT = "openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash"
GONE = object()  # the key is taken out

CONFIG: dict[str, Any] = {
    "tensor_parallel_size": 8,
    "max_batch_size": 16,
    "max_seq_len": 32768,
    "max_num_tokens": 32768,
    "kv_cache_config": {"free_gpu_memory_fraction": 0.8, "dtype": "auto", "enable_block_reuse": False},
    "cuda_graph_config": {"enable_padding": True, "max_batch_size": 16},
    "moe_config": {"backend": "TRTLLM"},
    "speculative_config": {
        "decoding_type": "DFlash",
        "speculative_model": DRAFT,
        "max_draft_len": 9,
        "attention_backend": "TRTLLM",
    },
}


@functools.cache
def shapes(target: str, draft: str) -> tuple[Shape, DrafterShape]:
    return published(target).shape(), published(draft).drafter_shape()


def change(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with dotted keys set, or taken out."""
    config = copy.deepcopy(config)
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        if value is GONE:
            del inner[key]
        else:
            inner[key] = value
    return config


VANILLA_BACKEND = {"speculative_config.attention_backend": "VANILLA"}


def write(folder: Path, config: dict[str, Any]) -> Document:
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return read_document(file)


def deployment(
    config: dict[str, Any] | None = None,
    *,
    gpus: str = "B300x8",
    nodes: int = 1,
    release: str = "1.4.0rc1",
    target: str = TARGET,
    draft: str = DRAFT,
    target_is: dict[str, Any] | None = None,  # fields of the target's shape
    draft_is: dict[str, Any] | None = None,
    target_source: dict[str, Any] | None = None,  # fields of its Source
    draft_source: dict[str, Any] | None = None,
    document: Document | None = None,
    **fields: Any,
) -> Deployment:
    """The good deployment, changed; `config` as `change` takes it."""
    changed = change(CONFIG, config or {})
    settings = read_settings(changed)
    one, two = shapes(target, draft)
    target_shape = dataclasses.replace(one, **(target_is or {}))
    draft_shape = dataclasses.replace(two, **(draft_is or {}))
    precision = target_shape.quantization or "bf16"
    sources = (
        dataclasses.replace(Source(target, target_shape, precision=precision), **(target_source or {})),
        dataclasses.replace(Source(draft, draft_shape, precision="bf16"), **(draft_source or {})),
    )
    lines = {"line": document.line} if document else {}
    return Deployment(
        file=Path("serve.yaml"),
        release=release,
        gpus=parse_gpus(gpus, nodes=nodes),
        config=changed,
        settings=settings,
        target=sources[0],
        drafter=sources[1],
        **{"environment": settings.environment, **lines, **fields},
    )
