"""The ops of namespace `dflash` as TensorRT sees them: inputs with their axes, attributes, outputs. Nothing runs here.

Axes are named sizes. Those that a model fixes (heads, head_dim, layers) choose the kernel and must be static in the
network; B, Q, S and the like may be dynamic and reach the kernel as numbers and in its grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.plugins.kernels.spec import DTYPES, LARGEST_BLOCK, Config

NAMESPACE = "dflash"
T = tuple(DTYPES)  # the types of activations: one op has one of them throughout


@dataclass(frozen=True)
class Tensor:
    """An input or output."""

    name: str  # of the kernel's argument
    axes: tuple[str, ...]  # sizes; of an output: expressions over sizes, the kernel's constants and its `grid_y`
    dtypes: tuple[str, ...] = T
    without: str = ""  # suffix of the plugin that lacks this input; none: every plugin has it
    alias: str = ""  # of an output: the input whose buffer it is


@dataclass(frozen=True)
class Op:
    name: str
    file: str  # of plugins/kernels
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    config: Callable[[Mapping[str, Any], str], Config]  # of sizes and attributes, and T
    static: tuple[str, ...]  # sizes that choose the kernel
    attributes: Mapping[str, type] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)  # attribute → the optional input that it belongs to
    rules: tuple[str, ...] = ()  # "left = right" or "left <= right" over sizes: what the kernel takes for granted


@dataclass(frozen=True)
class Plugin:
    """An op with or without its optional input: a plugin's inputs and attributes are fixed."""

    op: Op
    name: str
    inputs: tuple[Tensor, ...]
    attributes: Mapping[str, type]

    @property
    def id(self) -> str:
        return f"{NAMESPACE}::{self.name}"


def _plugins(op: Op) -> list[Plugin]:
    made = [Plugin(op, op.name, op.inputs, op.attributes)]
    for tensor in op.inputs:
        if tensor.without:
            inputs = tuple(other for other in op.inputs if other is not tensor)
            attributes = {name: kind for name, kind in op.attributes.items() if op.needs.get(name) != tensor.name}
            made.append(Plugin(op, f"{op.name}_{tensor.without}", inputs, attributes))
    return made


def _tensors(text: str, *names: str, **options: Any) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, tuple(text.split()), **options) for name in names)


TYPE_CODES = {16: "bfloat16", 10: "float16"}  # onnx.TensorProto.DataType
I64, I32, F32 = ("int64",), ("int32",), ("float32",)


def _cache_writer(sizes: Mapping[str, Any], dtype: str) -> Config:
    """Without k_norm nothing tells layers apart, nor does it matter."""
    layers = sizes.get("L", 1)
    kv_heads = sizes["Hc"] // (2 * layers)
    eps = float(f"{sizes.get('epsilon', 0):.6g}")  # a float32 in ONNX: 1e-6 comes as 9.99999997e-07
    return Config("kv_inject", kv_heads, kv_heads, sizes["D"], layers, sizes["R"], dtype, k_norm="L" in sizes, eps=eps)


KV_INJECT = Op(
    "kv_inject",
    "kv_inject",
    inputs=(
        *_tensors("B Q C", "rows"),
        *_tensors("B Q R", "cos", "sin", dtypes=F32),
        *_tensors("L D", "k_norm", without="unnormed"),
        *_tensors("B", "start", "count", dtypes=I64),
        *_tensors("B Hc S D", "cache"),
    ),
    outputs=(*_tensors("B Hc S D", "cache_out", alias="cache"), *_tensors("1", "overflow", dtypes=I32)),
    config=_cache_writer,
    static=("C", "R", "Hc", "D", "L"),
    attributes={"rotated": int, "epsilon": float},
    needs={"epsilon": "k_norm"},
    rules=("C = Hc * D", "rotated = 2 * R", "Hc // 2 * 2 = Hc", "Hc // (2 * L) * 2 * L = Hc"),
)


def _plain(sizes: Mapping[str, Any], dtype: str) -> Config:
    """For ops that know neither heads nor layers."""
    return Config("accept", 1, 1, 64, dtype=dtype, block=sizes.get("K", 16), vocab=sizes.get("V", 0))


ACCEPT = Op(
    "accept",
    "accept",
    inputs=(
        *_tensors("B K", "greedy", "sampled", dtypes=I64),
        *_tensors("B", "temperature", dtypes=F32),
        *_tensors("B Q", "ids", dtypes=I64),
        *_tensors("B", "n_valid", "n_given", "past_len", dtypes=I64),
    ),
    outputs=_tensors("B", "n_accepted", "next_token", "new_len", dtypes=I64),
    config=_plain,
    static=("K",),
)
SAMPLE_SUMS = Op(
    "sample_sums",
    "accept",
    inputs=_tensors("N V", "weights", dtypes=F32),
    outputs=_tensors("N CHUNKS", "sums", dtypes=I64),
    config=_plain,
    static=("V",),
)
SAMPLE = Op(
    "sample",
    "accept",
    inputs=(
        *_tensors("N V", "weights", dtypes=F32),
        *_tensors("N", "uniform", dtypes=F32),
        *_tensors("N CHUNKS", "sums", dtypes=I64, without="few"),
    ),
    outputs=_tensors("N", "index", dtypes=I64),
    config=_plain,
    static=("V",),
)
DRAFT_HEAD = Op(
    "draft_head",
    "draft_head",
    inputs=(*_tensors("N V", "logits", dtypes=(*T, "float32")), *_tensors("1", "offset", dtypes=I64)),
    outputs=(
        *_tensors("cdiv(V,CHUNK) N", "value", dtypes=F32),
        *_tensors("cdiv(V,CHUNK) N", "index", dtypes=I64),
    ),
    config=_plain,
    static=("V",),
)
DRAFT_HEAD_COMBINE = Op(
    "draft_head_combine",
    "draft_head",
    inputs=(*_tensors("C N", "value", dtypes=F32), *_tensors("C N", "index", dtypes=I64)),
    outputs=(*_tensors("N", "best_value", dtypes=F32), *_tensors("N", "best_index", dtypes=I64)),
    config=_plain,
    static=(),
)


def _attention(sizes: Mapping[str, Any], dtype: str) -> Config:
    """The tile does not depend on Q, which one call may see open and another fixed: outputs and launch must agree."""
    plain, dim = sizes["D"] ** -0.5, sizes["D"]
    scale = sizes.get("scale", plain)
    window, causal = sizes.get("window", 0), bool(sizes.get("causal"))
    both_sides = bool(sizes.get("both_sides")) and window > 0 and not causal
    return Config(
        "block_attention", sizes["Hq"], sizes.get("Hkv", sizes["Hq"]), dim, dtype=dtype,
        block=LARGEST_BLOCK, window=window, both_sides=both_sides,
        causal=causal, sinks="sinks" in sizes, scale=None if math.isclose(scale, plain, rel_tol=1e-6) else scale,
    )  # fmt: skip


_ROWS = (
    *_tensors("B Hq Q D", "q"),
    *_tensors("B Hkv Q D", "k_block", "v_block"),
    *_tensors("B Hc S D", "cache"),
    *_tensors("B", "start", "count", dtypes=I64),
)
_SINKS = _tensors("Hq", "sinks", dtypes=F32, without="plain")
_SHARES = (*_tensors("grid_y B Hq Q D", "partial", dtypes=F32), *_tensors("grid_y B Hq Q", "lse", dtypes=F32))
_MASK: dict[str, Any] = {
    "config": _attention,
    "static": ("Hq", "Hkv", "D", "Hc"),
    "attributes": {"k_head": int, "v_head": int, "causal": int, "window": int, "both_sides": int, "scale": float},
    "rules": ("k_head + Hkv <= Hc", "v_head + Hkv <= Hc", "0 <= k_head", "0 <= v_head"),
}
BLOCK_ATTENTION = Op(
    "block_attention",
    "block_attention",
    inputs=(*_ROWS, *_SINKS),
    outputs=_tensors("B Hq Q D", "out"),
    **_MASK,
)
BLOCK_ATTENTION_SPLIT = Op("block_attention_split", "block_attention", inputs=_ROWS, outputs=_SHARES, **_MASK)
BLOCK_ATTENTION_COMBINE = Op(
    "block_attention_combine",
    "block_attention",
    inputs=(
        *_tensors("splits B Hq Q D", "partial", dtypes=F32),
        *_tensors("splits B Hq Q", "lse", dtypes=F32),
        *_tensors("B", "count", dtypes=I64),
        *_SINKS,
    ),
    outputs=_tensors("B Hq Q D", "out"),
    config=_attention,
    static=("Hq", "D"),
    attributes={"to": int},  # the output's type as ONNX numbers it: no input has it
)

OPS = (
    KV_INJECT,
    BLOCK_ATTENTION,
    BLOCK_ATTENTION_SPLIT,
    BLOCK_ATTENTION_COMBINE,
    ACCEPT,
    SAMPLE_SUMS,
    SAMPLE,
    DRAFT_HEAD,
    DRAFT_HEAD_COMBINE,
)
PLUGINS = {plugin.name: plugin for op in OPS for plugin in _plugins(op)}
