"""Each op of the plugins on a device, against its float64 reference: one small ragged problem a model and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dflash_trt.plugins.kernels import accept, block_attention, draft_head, kv_inject
from dflash_trt.plugins.kernels.spec import DTYPES, MODELS, Config
from dflash_trt.plugins.reference import accept as plain_accept
from dflash_trt.plugins.reference import block_attention as plain_attention
from dflash_trt.plugins.reference import draft_head as plain_head
from dflash_trt.plugins.reference import kv_inject as plain_inject

EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def checks(device: str, configs: Sequence[Config] = MODELS) -> Iterator[dict[str, Any]]:
    """JSON-able records; `right` tells whether a result is."""
    for config in configs:
        for dtype in DTYPES:
            for op, check in (("kv_inject", check_injection), ("block_attention", check_attention)):
                error, bound = check(config.replace(dtype=dtype), device)
                yield {"op": op, "model": config.name, "dtype": dtype, "error": error, "right": error <= bound}
        for op, exact in (("accept", check_accept), ("sample", check_sample), ("draft_head", check_head)):
            yield {"op": op, "model": config.name, "right": exact(config, device)}


def check_injection(config: Config, device: str) -> tuple[float, float]:
    """Largest error of the cache, and its bound: the norm's factor, its weight and the rotation round once each."""
    batch, length, heads = 3, 64, 2 * config.layers * config.kv_heads
    kind, pairs = getattr(torch, config.dtype), config.head_dim // 2
    rows = torch.randn(batch, config.block, heads * config.head_dim, device=device, dtype=kind)
    angles = torch.randn(batch, config.block, pairs, device=device)
    k_norm = torch.rand(config.layers, config.head_dim, device=device, dtype=kind) + 0.5
    cache = torch.randn(batch, heads, length, config.head_dim, device=device, dtype=kind)
    start = torch.tensor([0, length - 4, 7], device=device)  # the second row overflows
    count = torch.tensor([config.block, config.block, 0], device=device)
    before = as_float64(cache)
    overflow = kv_inject.launch(
        rows, angles.cos(), angles.sin(), k_norm, start, count, cache, layers=config.layers, eps=config.eps
    )
    inputs = [as_float64(x) for x in (rows, angles.cos(), angles.sin(), k_norm)]
    wanted, lost = plain_inject.kv_inject(
        *inputs, start.cpu().numpy(), count.cpu().numpy(), before, layers=config.layers, eps=config.eps
    )
    assert int(overflow) == lost
    return float(np.abs(as_float64(cache) - wanted).max()), 6 * EPSILON[config.dtype] * float(np.abs(wanted).max())


def check_attention(config: Config, device: str) -> tuple[float, float]:
    """Largest error over masks, sinks and splits; a weighted mean with rounded weights: its bound follows max |v|."""
    batch, length, worst, largest = 3, 600, 0.0, 0.0
    kind, shape = getattr(torch, config.dtype), (batch, config.kv_heads, config.block, config.head_dim)
    q = torch.randn(batch, config.heads, config.block, config.head_dim, device=device, dtype=kind)
    k, v = (torch.randn(shape, device=device, dtype=kind) for _ in range(2))
    cache = torch.randn(batch, 2 * config.kv_heads, length, config.head_dim, device=device, dtype=kind)
    start, count = torch.tensor([0, 580, 300], device=device), torch.tensor([config.block, 3, 0], device=device)
    sinks = torch.randn(config.heads, device=device)
    for causal, window, sink, splits in ((False, 0, None, 1), (True, 0, sinks, 4), (True, 128, sinks, None)):
        how = {"k_head": 0, "v_head": config.kv_heads, "causal": causal, "window": window}
        got = block_attention.launch(q, k, v, cache, start, count, sink, **how, splits=splits)
        arrays = [as_float64(x) for x in (q, k, v, cache)]
        arrays += [start.cpu().numpy(), count.cpu().numpy(), None if sink is None else as_float64(sink)]
        wanted = plain_attention.block_attention(*arrays, **how, scale=config.head_dim**-0.5)
        worst = max(worst, float(np.abs(as_float64(got) - wanted).max()))
        largest = max(largest, float(v.abs().max()), float(cache.abs().max()))
    return worst, 4 * EPSILON[config.dtype] * largest


def check_accept(config: Config, device: str) -> bool:
    def draw(*shape: int, below: int) -> Any:
        return torch.randint(below, shape, device=device)

    batch, query = 33, config.block + 2
    choices = (draw(batch, config.block, below=2), draw(batch, config.block, below=2))
    given = 1 + draw(batch, below=2)
    inputs = (
        *choices, draw(batch, below=2).float(), draw(batch, query, below=2), given + draw(batch, below=config.block),
        given, draw(batch, below=1000),
    )  # fmt: skip
    return same(accept.launch_accept(*inputs), plain_accept.accept(*(x.cpu().numpy() for x in inputs)))


def check_sample(config: Config, device: str) -> bool:
    weights, uniform = torch.rand(8, config.vocab, device=device), torch.rand(8, device=device)
    wanted = plain_accept.sample(weights.cpu().numpy(), uniform.cpu().numpy())
    return same([accept.launch_sample(weights, uniform)], [wanted])


def check_head(config: Config, device: str) -> bool:
    logits = torch.randn(9, config.vocab, device=device).to(torch.bfloat16)  # coarse: many are equal
    wanted = plain_head.draft_head(as_float64(logits), 1000)
    return same(draft_head.launch(logits, torch.tensor([1000], device=device)), wanted)


def same(got: Any, wanted: Any) -> bool:
    return all((x.cpu().numpy() == y).all() for x, y in zip(got, wanted, strict=True))


def as_float64(x: Any) -> Any:
    return x.double().cpu().numpy()
