"""KV injection in one launch for all layers: norm and rotate the keys, write keys and values into the cache.

Only bandwidth counts: each row is read once and written once. A program takes a few columns and a few heads, so that
it reads runs of HEADS * D and writes runs of COLUMNS * D elements. The tile lies in registers as the two halves that
RoPE pairs (and what it leaves alone), each a plain load of 16 bytes a thread.

The overflow count follows from `start` and `count` alone, so one program makes it for the batch; a sum by atomics
would need a cleared output, which TensorRT does not give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dflash_trt.plugins.kernels.spec import GPT_OSS_120B, LLAMA31_8B, QWEN3_8B, SHIPPED, Argument, Config, Kernel

TILE_BYTES = 8192  # 64 bytes in flight for each of 128 threads
LARGEST_COLUMNS = 16  # a decode step writes few: more would leave threads idle

_TARGETS = tuple(
    model.replace(name=f"{model.name}-target", layers=1, k_norm=model is QWEN3_8B)
    for model in (QWEN3_8B, LLAMA31_8B, GPT_OSS_120B)
)
CONFIGS = SHIPPED + _TARGETS + tuple(target.shard(8) for target in _TARGETS)


@triton.jit
def _load(rows, offset, width: tl.constexpr, padded: tl.constexpr, valid):
    """[tile, width] at element `offset` of each row, in float32; zeros where not valid."""
    i = tl.arange(0, padded)[None, :]
    return tl.load(rows[:, None] + (offset + i), mask=valid[:, None] & (i < width), other=0.0).to(tl.float32)


@triton.jit
def _store(rows, offset, x, width: tl.constexpr, padded: tl.constexpr, valid):
    i = tl.arange(0, padded)[None, :]
    x = x.to(rows.dtype.element_ty)
    tl.store(rows[:, None] + (offset + i), x, mask=valid[:, None] & (i < width))


@triton.jit
def _normed(x, by, weights, offset, width: tl.constexpr, padded: tl.constexpr, valid, T: tl.constexpr):
    """x times its row's factor and then its weights, rounded after each as the graph's operators do."""
    x = (x * by[:, None]).to(T).to(tl.float32)
    return (x * _load(weights, offset, width, padded, valid)).to(T).to(tl.float32)


@triton.jit
def kv_inject(
    rows, cos, sin, k_norm, start, count, cache,
    B, Q, S,
    cache_out, overflow,
    LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, EPS: tl.constexpr,
    COLUMNS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """rows T [B, Q, 2*L*Hkv*D], cos and sin f32 [B, Q, R], k_norm T [L, D] or None, start and count i64 [B],
    cache T [B, 2*L*Hkv, S, D] → the same cache, overflow i32 [1].

    HALF and REST are R and D - 2R as tile widths: the powers of two that hold them. HEADS divides L*Hkv.
    """
    T = rows.dtype.element_ty
    first_head = tl.program_id(0) * HEADS
    first_column = tl.program_id(1) * COLUMNS
    b = tl.program_id(2)
    if first_head + first_column + b == 0:
        _count_overflow(start, count, B, Q, S, overflow)

    # far starts are moved to where they overflow all the same: what follows fits 32 bits
    begin = tl.minimum(tl.maximum(tl.load(start + b), -Q), S).to(tl.int32)
    used = tl.minimum(tl.load(count + b), Q).to(tl.int32)
    if first_column >= used:
        return

    row = tl.arange(0, COLUMNS * HEADS)
    head = first_head + row % HEADS
    column = first_column + row // HEADS
    position = begin + column
    valid = (column < used) & (position >= 0) & (position < S)
    ALL: tl.constexpr = 2 * LAYERS * KV_HEADS
    token = b.to(tl.int64) * Q + column
    source = rows + (token * ALL + head) * HEAD_DIM
    place = cache_out + ((b.to(tl.int64) * ALL + head) * S + position) * HEAD_DIM

    TAIL: tl.constexpr = HEAD_DIM - 2 * ROTATED
    low = _load(source, 0, ROTATED, HALF, valid)
    high = _load(source, ROTATED, ROTATED, HALF, valid)
    if TAIL > 0:
        tail = _load(source, 2 * ROTATED, TAIL, REST, valid)
    if first_head < LAYERS * KV_HEADS:
        c = _load(cos + token * ROTATED, 0, ROTATED, HALF, valid)
        s = _load(sin + token * ROTATED, 0, ROTATED, HALF, valid)
        if k_norm is not None:
            squares = tl.sum(low * low + high * high, axis=1)
            if TAIL > 0:
                squares += tl.sum(tail * tail, axis=1)
            by = tl.rsqrt(squares / HEAD_DIM + EPS)
            weights = k_norm + head // KV_HEADS * HEAD_DIM
            low = _normed(low, by, weights, 0, ROTATED, HALF, valid, T)
            high = _normed(high, by, weights, ROTATED, ROTATED, HALF, valid, T)
            if TAIL > 0:
                tail = _normed(tail, by, weights, 2 * ROTATED, TAIL, REST, valid, T)
        low, high = low * c - high * s, high * c + low * s
    _store(place, 0, low, ROTATED, HALF, valid)
    _store(place, ROTATED, high, ROTATED, HALF, valid)
    if TAIL > 0:
        _store(place, 2 * ROTATED, tail, TAIL, REST, valid)


@triton.jit
def _count_overflow(start, count, B, Q, S, overflow):
    """Rows of the whole batch that have no place in the cache."""
    lanes = tl.arange(0, 128)
    lost = tl.zeros([128], tl.int32)
    for first in range(0, B, 128):
        held = first + lanes < B
        begin = tl.load(start + first + lanes, mask=held, other=0)
        begin = tl.minimum(tl.maximum(begin, -Q), S).to(tl.int32)
        used = tl.load(count + first + lanes, mask=held, other=0)
        used = tl.maximum(tl.minimum(used, Q), 0).to(tl.int32)
        fitting = tl.minimum(used, S - begin) - tl.maximum(-begin, 0)
        lost += used - tl.maximum(fitting, 0)
    tl.store(overflow, tl.sum(lost, axis=0))


def kernels(config: Config) -> list[Kernel]:
    """The one kernel of a drafter (`layers` of it at once) or of a target's layer (`layers` = 1)."""
    constants = _constants(config)
    columns, heads = constants["COLUMNS"], constants["HEADS"]
    norm = f"norm{config.eps:g}" if config.k_norm else "plain"
    sources = [("rows", config.pointer), ("cos", "*fp32"), ("sin", "*fp32"), ("k_norm", config.pointer)]
    sources += [("start", "*i64"), ("count", "*i64"), ("cache", config.pointer)]
    return [
        Kernel(
            op="kv_inject",
            name=f"l{config.layers}-h{config.kv_heads}-d{config.head_dim}-r{_rotated(config)}-{norm}-{config.dtype}",
            function=kv_inject,
            arguments=(
                *(Argument(name, kind) for name, kind in sources if config.k_norm or name != "k_norm"),
                *(Argument(name, "i32") for name in "BQS"),
                Argument("cache_out", config.pointer, output=True, alias="cache"),
                Argument("overflow", "*i32", output=True),
            ),
            constants=constants if config.k_norm else constants | {"k_norm": None},
            grid=(str(2 * config.layers * config.kv_heads // heads), f"cdiv(Q, {columns})", "B"),
            num_warps=_warps(columns * heads * config.head_dim),
            config=config,
        )
    ]


def _rotated(config: Config) -> int:
    return config.head_dim // 2 if config.rotated is None else config.rotated


def _constants(config: Config) -> dict:
    keys, rotated = config.layers * config.kv_heads, _rotated(config)
    rows = TILE_BYTES // 2 // config.head_dim
    heads = min(keys & -keys, 8)  # the largest power of two that divides all keys: a tile is keys or values alone
    tail = config.head_dim - 2 * rotated
    return {
        "LAYERS": config.layers,
        "KV_HEADS": config.kv_heads,
        "HEAD_DIM": config.head_dim,
        "ROTATED": rotated,
        "EPS": config.eps,
        "COLUMNS": min(rows // heads, LARGEST_COLUMNS),
        "HEADS": heads,
        "HALF": triton.next_power_of_2(rotated),
        "REST": triton.next_power_of_2(tail) if tail else 0,
    }


def _warps(elements: int) -> int:
    return max(elements // 1024, 1)


def launch(
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_norm: torch.Tensor | None,
    start: torch.Tensor,
    count: torch.Tensor,
    cache: torch.Tensor,
    *,
    layers: int,
    eps: float,
) -> torch.Tensor:
    """Write the rows into `cache`; returns the number of rows that found no place, int32 [1]."""
    batch, query = rows.shape[:2]
    heads, length, dim = cache.shape[1:]
    config = Config("launch", 0, heads // (2 * layers), dim, layers, rotated=cos.shape[-1], eps=eps)
    constants = _constants(config)
    columns, tile = constants["COLUMNS"], constants["HEADS"]
    overflow = torch.empty(1, dtype=torch.int32, device=rows.device)
    kv_inject[(heads // tile, triton.cdiv(query, columns), batch)](
        rows, cos, sin, k_norm, start, count, cache, batch, query, length, cache, overflow,
        **constants, num_warps=_warps(columns * tile * dim),
    )  # fmt: skip
    return overflow
