"""Checkpoints of any size in no time: real headers, holes for data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.shards import name_shards
from dflash_trt.checkpoint.weights import DTYPES, INDEX
from tests.tiny import MXFP4, draft_shapes

Shape = tuple[int, ...]

GPT_OSS_120B: Mapping[str, Any] = {  # its published config.json
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "pad_token_id": 199999,
    "quantization_config": MXFP4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip


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


def write_gpt_oss(directory: Path, config: Mapping[str, Any], *, storage: str = "mxfp4", files: int = 1) -> Path:
    """A gpt-oss target with experts as "mxfp4" or "float", its layers spread over `files` as its publisher does."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    shapes, layers = gpt_oss_shapes(config, storage), config["num_hidden_layers"]
    shards: list[dict[str, Shape]] = [{} for _ in range(files)]
    for name, shape in shapes.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0 if "embed" in name else layers - 1
        shards[layer * files // layers][name] = shape
    names = name_shards(files)
    for file, shard in zip(names, shards, strict=True):
        write_file(directory / file, shard, dtypes={n: "U8" for n in shard if n.endswith(("_blocks", "_scales"))})
    if files > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def gpt_oss_shapes(config: Mapping[str, Any], storage: str = "mxfp4") -> dict[str, Shape]:
    """Written out here, so that readers are tested without themselves."""
    hidden, ffn, experts = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    heads = config["num_attention_heads"]
    q, kv = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, rows, width in [("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)]:
        layer |= {f"self_attn.{name}_proj.weight": (rows, width), f"self_attn.{name}_proj.bias": (rows,)}
    layer |= {"self_attn.sinks": (heads,), "mlp.router.weight": (experts, hidden), "mlp.router.bias": (experts,)}
    for name, rows, width in [("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)]:
        name = f"mlp.experts.{name}"
        layer[f"{name}_bias"] = (experts, rows)
        if storage == "mxfp4":
            layer[f"{name}_blocks"] = (experts, rows, width // 32, 16)
            layer[f"{name}_scales"] = (experts, rows, width // 32)
        else:
            layer[name] = (experts, width, rows)
    table = (config["vocab_size"], hidden)
    whole: dict[str, Shape] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        whole["lm_head.weight"] = table
    for index in range(config["num_hidden_layers"]):
        whole |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return whole
