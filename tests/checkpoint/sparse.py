"""Checkpoints of any size in no time: real headers, holes for data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.weights import DTYPES
from tests.tiny import draft_shapes

Shape = tuple[int, ...]


def write_file(file: Path, shapes: Mapping[str, Shape], dtype: str = "BF16", dtypes: Mapping[str, str] = {}) -> Path:
    """A safetensors file whose tensors are all zero; `dtypes` overrides `dtype` by name."""
    header, end = {}, 0
    for name, shape in shapes.items():
        kind = dtypes.get(name, dtype)
        size = DTYPES[kind].itemsize
        for axis in shape:
            size *= axis
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return write_raw(file, json.dumps(header).encode(), end)


def write_raw(file: Path, header: bytes, data_bytes: int = 0) -> Path:
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + data_bytes)
    return file


def write_draft(
    directory: Path,
    config: Mapping[str, Any],
    *,
    add: Mapping[str, Shape] = {},
    dtype: str = "BF16",
    dtypes: Mapping[str, str] = {},
) -> Path:
    """A drafter with the tensors its config implies and those of `add`."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_file(directory / "model.safetensors", {**draft_shapes(config), **add}, dtype, dtypes)
    return directory


def write_target(directory: Path, config: Mapping[str, Any], add: Mapping[str, Shape] = {}) -> Path:
    """A target with one embedding, a head unless tied, and q/k norms in Qwen3."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stack = draft_shapes({**config, "target_layer_ids": [0]})
    del stack["fc.weight"], stack["hidden_norm.weight"]
    shapes = {f"model.{name}": shape for name, shape in stack.items()}
    if config["model_type"] == "llama":
        shapes = {name: shape for name, shape in shapes.items() if "_norm" not in name}
    shapes["model.embed_tokens.weight"] = (config["vocab_size"], config["hidden_size"])
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    write_file(directory / "model.safetensors", {**shapes, **add})
    return directory
