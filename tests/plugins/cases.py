"""Uses of every plugin, and what stands in for Triton's launches and TensorRT's symbols in tests of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dflash_trt.plugins.kernels import accept, block_attention, draft_head, kv_inject
from dflash_trt.plugins.tensorrt import PLUGINS, Plugin
from dflash_trt.plugins.tensorrt.expressions import Algebra
from dflash_trt.plugins.tensorrt.launch import POINTERS, name_sizes

TORCH = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "int64", "int32")}


class Symbol:
    """An expression as strict as `tensorrt.plugin`'s: nothing with an integer on the left, no other operators."""

    def __init__(self, text: object):
        self.text = str(text)

    def _with(self, sign: str, other: object) -> Symbol:
        assert isinstance(other, (Symbol, int))
        return Symbol(f"({self.text} {sign} {other.text if isinstance(other, Symbol) else other})")

    def __add__(self, other: object) -> Symbol:
        return self._with("+", other)

    def __sub__(self, other: object) -> Symbol:
        return self._with("-", other)

    def __mul__(self, other: object) -> Symbol:
        return self._with("*", other)

    def __floordiv__(self, other: object) -> Symbol:
        return self._with("//", other)


def _function(name: str) -> Any:
    def call(a: object, b: object) -> Symbol:
        assert isinstance(a, Symbol) or isinstance(b, Symbol), "TensorRT refuses two plain integers"
        return Symbol(f"{name}({', '.join(x.text if isinstance(x, Symbol) else str(x) for x in (a, b))})")

    return call


SYMBOLS = Algebra(Symbol, {name: _function(name) for name in ("cdiv", "min", "max")})


class Recorder:
    """In place of a Triton function: keeps what a launcher would launch."""

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []

    def __getitem__(self, grid: Any) -> Any:
        def call(*arguments: Any, **constants: Any) -> None:
            full = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
            self.launches.append(SimpleNamespace(grid=full, arguments=arguments, constants=constants))

        return call


@dataclass(frozen=True)
class Case:
    """One use of a plugin: sizes of its axes, and how its launcher is called with tensors of these sizes."""

    plugin: str
    sizes: Mapping[str, int]
    launch: Callable[..., Any]
    function: tuple[Any, str]  # module and name of the Triton function
    attributes: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Shapes alone: on torch's device without memory."""
        return {
            t.name: torch.empty(
                [int(axis) if axis.isdigit() else self.sizes[axis] for axis in t.axes],
                dtype=TORCH[self.dtype if self.dtype in t.dtypes else t.dtypes[0]],
                device="meta",
            )
            for t in PLUGINS[self.plugin].inputs
        }


def injected(plugin: str, layers: int, kv_heads: int, dim: int, rotated: int, **sizes: int) -> Case:
    heads = 2 * layers * kv_heads
    sizes |= {"Hc": heads, "C": heads * dim, "R": rotated, "D": dim, "L": layers}
    normed = plugin == "kv_inject"
    attributes = {"rotated": 2 * rotated} | ({"epsilon": 1e-5} if normed else {})

    def call(rows, cos, sin, start, count, cache, k_norm=None):
        made = kv_inject.launch(
            rows, cos, sin, k_norm, start, count, cache, layers=layers if normed else 1, eps=1e-5 if normed else 0.0
        )
        return cache, made

    return Case(plugin, sizes, call, (kv_inject, "kv_inject"), attributes)


def sampled(plugin: str, n: int, vocab: int, function: str) -> Case:
    chunks = -(-vocab // accept.CHUNK)

    def call(weights, uniform=None, sums=None):
        return accept.launch_sample(weights, torch.empty(n, device="meta") if uniform is None else uniform)

    return Case(plugin, {"N": n, "V": vocab, "CHUNKS": chunks}, call, (accept, function), dtype="float32")


def attending(
    plugin: str, heads: int, kv_heads: int, dim: int, splits: int | None, window: int = 0, **sizes: int
) -> Case:
    sizes |= {"Hq": heads, "Hkv": kv_heads, "D": dim}
    mask = {"causal": window > 0, "window": window, "both_sides": False}
    head = {"k_head": 2 * kv_heads, "v_head": 5 * kv_heads}

    def call(q, k_block, v_block, cache, start, count, sinks=None):
        return block_attention.launch(
            q, k_block, v_block, cache, start, count, sinks, **head, **mask, scale=dim**-0.5, splits=splits
        )

    attributes = {
        **head,
        "causal": int(window > 0),
        "window": window,
        "both_sides": 0,
        "scale": float(np.float32(dim**-0.5)),
    }
    return Case(plugin, sizes, call, (block_attention, "attend"), attributes)


def combining(plugin: str, heads: int, dim: int, splits: int, **sizes: int) -> Case:
    """The launcher's second launch: its sizes follow from queries that need as many splits."""

    def call(partial, lse, count, sinks=None):
        batch, query = partial.shape[1], partial.shape[3]
        q = torch.empty(batch, heads, query, dim, dtype=torch.bfloat16, device="meta")
        k = q[:, :1].contiguous()
        cache = torch.empty(batch, 2, 64, dim, dtype=q.dtype, device="meta")
        return block_attention.launch(q, k, k, cache, count, count, sinks, k_head=0, v_head=1, splits=splits)

    sizes |= {"Hq": heads, "D": dim, "splits": splits}
    return Case(plugin, sizes, call, (block_attention, "combine"), {"to": 16})


CASES = [
    injected("kv_inject", 5, 8, 128, 64, B=3, Q=16, S=4096),
    injected("kv_inject", 8, 1, 64, 32, B=1, Q=300, S=1024),
    injected("kv_inject_unnormed", 1, 8, 128, 32, B=128, Q=1, S=131072),
    attending("block_attention", 64, 8, 64, 1, window=128, B=128, Q=16, S=2048, Hc=48),
    attending("block_attention_plain", 32, 8, 128, 1, B=3, Q=16, S=2048, Hc=48),
    attending("block_attention_split", 32, 8, 128, None, B=1, Q=16, S=131072, Hc=48),
    attending("block_attention_split", 8, 1, 64, None, window=4096, B=2, Q=10, S=8192, Hc=6),
    combining("block_attention_combine", 64, 64, 16, B=4, Q=10),
    combining("block_attention_combine_plain", 32, 128, 7, B=1, Q=16),
    Case("accept", {"B": 9, "K": 10, "Q": 33}, accept.launch_accept, (accept, "accept"), dtype="int64"),
    sampled("sample_sums", 7, 151936, "sample_sums"),
    sampled("sample", 7, 151936, "sample"),
    sampled("sample_few", 40, 1024, "sample"),
    Case("draft_head", {"N": 30, "V": 25136}, draft_head.launch_parts, (draft_head, "draft_head")),
    Case("draft_head", {"N": 1, "V": 151936}, draft_head.launch_parts, (draft_head, "draft_head"), dtype="float32"),
    Case("draft_head_combine", {"N": 17, "C": 32}, draft_head.launch_combine, (draft_head, "draft_head_combine")),
]


def recorded(case: Case, inputs: Mapping[str, torch.Tensor], monkeypatch: Any) -> SimpleNamespace:
    """What the launcher launches."""
    module, function = case.function
    recorders = {name: Recorder() for name, value in vars(module).items() if hasattr(value, "fn") and name[0] != "_"}
    with monkeypatch.context() as patched:
        for name, recorder in recorders.items():
            patched.setattr(module, name, recorder)
        case.launch(**inputs)
    (made,) = recorders[function].launches
    return made


def facts(plugin: Plugin, inputs: Mapping[str, torch.Tensor], attributes: Mapping[str, Any]) -> tuple[dict, dict]:
    """Types and sizes as registration reads them."""
    names = {value: name for name, value in TORCH.items()}
    sizes = name_sizes(plugin.inputs, {name: list(x.shape) for name, x in inputs.items()})
    return {name: names[x.dtype] for name, x in inputs.items()}, sizes | dict(attributes)


def pointer(x: torch.Tensor) -> str:
    return POINTERS[next(name for name, dtype in TORCH.items() if dtype == x.dtype)]
