"""Attention of a block or chunk to a cached context and to itself, for drafting and verifying: tiles, splits, launches.

`block_attention` does it in one launch, which is best where batch, heads and rows make enough programs. Elsewhere the
keys are split: `block_attention_split` attends to shares of them and `block_attention_combine` sums these up.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from dflash_trt.plugins.kernels.attend import attend, combine
from dflash_trt.plugins.kernels.spec import (
    GPT_OSS_120B,
    LARGEST_BLOCK,
    LLAMA31_8B,
    QWEN3_8B,
    SHIPPED,
    Argument,
    Config,
    Kernel,
)

# By head_dim and rows: keys of a tile, stages of the loop, warps. What is read ahead (all stages but one) should be
# what memory delivers within its latency, some 32 KiB a multiprocessor. SM120's 99 KiB of shared memory are the limit.
TILES = {
    (64, 64): (64, 5, 4),
    (64, 128): (64, 5, 8),
    (128, 64): (64, 3, 4),
    (128, 128): (32, 4, 8),
    (256, 64): (32, 2, 8),
}
PROGRAMS = 264  # two on each multiprocessor of an H200, one wave; B200 has a few more, SM120 holds one on each
MOST = 128  # splits
CHUNK = 16  # splits that `combine` reads at once

_TARGETS = (
    QWEN3_8B.replace(name="qwen3-8b-target", causal=True),
    LLAMA31_8B.replace(name="llama3.1-8b-target", causal=True),
    GPT_OSS_120B.replace(name="gpt-oss-120b-target", causal=True, sinks=True),
    GPT_OSS_120B.replace(name="gpt-oss-120b-target-window", causal=True, sinks=True, window=128),
)
CONFIGS = SHIPPED + _TARGETS + tuple(target.shard(8) for target in _TARGETS)


def kernels(config: Config) -> list[Kernel]:
    """The single launch, the split one, and what combines the latter's results."""
    attending, combining = _constants(config), _combining(config)
    group, rows = config.heads // config.kv_heads, attending["ROWS"]
    tiles = f"cdiv({group} * Q, {rows})"
    splits = f"max(1, min({_most(config)}, {PROGRAMS} // ({config.kv_heads} * B * {tiles})))"
    planes = f"{config.kv_heads} * B"

    kind, shape = config.pointer, f"h{config.heads}-{config.kv_heads}-d{config.head_dim}"
    sinks = "-sinks" * config.sinks
    mask = "-causal" * config.causal
    mask += f"-window{config.window}" * (config.window > 0) + "-both" * attending["BOTH_SIDES"]
    sink = (Argument("sinks", "*fp32"),) if config.sinks else ()
    no_sink = {} if config.sinks else {"sinks": None}
    block = (Argument("q", kind), Argument("k_block", kind), Argument("v_block", kind), Argument("cache", kind))
    rooms = (Argument("start", "*i64"), Argument("count", "*i64"))
    numbers = tuple(Argument(name, "i32") for name in ("Q", "S", "Hc", "k_head", "v_head"))
    parts = (("partial", "*fp32"), ("lse", "*fp32"))
    out = Argument("out", kind, output=True)
    tile = TILES[config.head_dim, rows]
    common: dict[str, Any] = {"function": attend, "num_stages": tile[1], "num_warps": tile[2], "tensor_core": True}
    return [
        Kernel(
            op="block_attention",
            name=f"{shape}-{rows}rows{mask}{sinks}-{config.dtype}",
            arguments=(*block, *rooms, *sink, *numbers, out),
            constants=attending | no_sink | {"partial": None, "lse": None},
            grid=(tiles, "1", planes),
            config=config,
            **common,
        ),
        Kernel(
            op="block_attention_split",
            name=f"{shape}-{rows}rows{mask}-{config.dtype}",
            arguments=(*block, *rooms, *numbers, *(Argument(name, kind, output=True) for name, kind in parts)),
            constants=attending | {"sinks": None, "out": None},
            grid=(tiles, splits, planes),
            config=config,
            **common,
        ),
        Kernel(
            op="block_attention_combine",
            name=f"h{config.heads}-d{config.head_dim}{sinks}-{config.dtype}",
            function=combine,
            arguments=(
                *(Argument(name, kind) for name, kind in parts), rooms[1], *sink,
                Argument("Q", "i32"), Argument("splits", "i32"), out,
            ),
            constants=combining | no_sink,
            grid=("Q", str(config.heads), "B"),
            config=config,
        ),
    ]  # fmt: skip


def _constants(config: Config) -> dict[str, Any]:
    rows = config.heads // config.kv_heads * config.block
    rows = 64 if rows <= 64 or config.head_dim == 256 else 128
    keys, stages, _ = TILES[config.head_dim, rows]
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    return {
        "Hq": config.heads,
        "Hkv": config.kv_heads,
        "D": config.head_dim,
        "SCALE": scale * math.log2(math.e),
        "CAUSAL": config.causal,
        "WINDOW": config.window,
        "BOTH_SIDES": config.both_sides and config.window > 0 and not config.causal,
        "ROWS": rows,
        "KEYS": keys,
        "STAGES": stages,
    }


def _most(config: Config) -> int:
    """Splits at most; each takes two tiles of keys or more, and a window holds few."""
    pair = 2 * _constants(config)["KEYS"]
    return min(MOST, max(1, (config.window + config.block) // pair)) if config.window else MOST


def _combining(config: Config) -> dict[str, Any]:
    return {"Hq": config.heads, "D": config.head_dim, "MOST": MOST, "CHUNK": CHUNK}


def launch(
    q: torch.Tensor,
    k_block: torch.Tensor,
    v_block: torch.Tensor,
    cache: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    k_head: int,
    v_head: int,
    causal: bool = False,
    window: int = 0,
    both_sides: bool = False,
    scale: float | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of q, [B, Hq, Q, D]. `splits` of the keys: as in the plugin unless given; 1 is a single launch."""
    batch, heads, query, dim = q.shape
    planes = k_block.shape[1]
    config = Config(
        "launch",
        heads,
        planes,
        dim,
        block=LARGEST_BLOCK,
        causal=causal,
        window=window,
        both_sides=both_sides,
        scale=scale,
    )
    constants = _constants(config)
    _, stages, warps = TILES[dim, constants["ROWS"]]
    tiles = triton.cdiv(heads // planes * query, constants["ROWS"])
    if splits and splits > MOST:
        raise ValueError(f"{splits} splits; combine adds up {MOST} at most")
    splits = splits or max(1, min(_most(config), PROGRAMS // (planes * batch * tiles)))
    out = torch.empty_like(q)
    numbers = (query, cache.shape[2], cache.shape[1], k_head, v_head)
    grid, how = (tiles, splits, planes * batch), {**constants, "num_stages": stages, "num_warps": warps}
    if splits == 1:
        attend[grid](q, k_block, v_block, cache, start, count, sinks, *numbers, out, None, None, **how)
        return out
    partial = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
    lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=q.device)
    attend[grid](q, k_block, v_block, cache, start, count, None, *numbers, None, partial, lse, **how)
    combine[(query, heads, batch)](partial, lse, count, sinks, query, splits, out, **_combining(config))
    return out
