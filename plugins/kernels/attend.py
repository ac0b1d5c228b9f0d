"""The two Triton functions of `block_attention`: attention to a share of the keys, and the sum of the shares.

One program takes a tile of rows and a share of the keys. A row is (column, query head of the group): all query heads
that read one K/V head share its keys, and G*Q rows fill the 64 or 128 rows that wgmma and tcgen05 multiply at once.

The keys are two runs, the context in the cache and the block's own, and one pipelined loop goes over the tiles of both.
What a tile lacks at the end of a run is read from the run's last row: in bounds, finite, and hidden by the mask. So no
load carries a mask, and only tiles at an edge pay for masking scores. Tiles that no row sees are skipped.

Keys as the M side (scores transposed) was tried: at 64 rows it spills registers on SM100 and SM120, for the softmax
then reduces across warps and probabilities pass through shared memory. It is the smaller one for 16 rows or fewer.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
FAR = tl.constexpr(1 << 30)  # starts beyond any cache are moved here, to fit 32 bits


@triton.jit
def attend(
    q, k_block, v_block, cache, start, count, sinks,
    Q, S, Hc, k_head, v_head,
    out, partial, lse,
    Hq: tl.constexpr, Hkv: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BOTH_SIDES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q T [B, Hq, Q, D], k_block and v_block T [B, Hkv, Q, D], cache T [B, Hc, S, D], start and count i64 [B], sinks
    f32 [Hq] or None → out T [B, Hq, Q, D]; or, where that is None, the attention to each share of the keys: partial f32
    [splits, B, Hq, Q, D] and the log2 of its sum of exponentials, lse f32 [splits, B, Hq, Q], -inf where there is no
    key; partial then stays unwritten.

    Grid (row tiles, splits, B*Hkv). SCALE is positive and includes log2(e). Columns from count[b] on are zeros of
    `out`, and are left out of `partial` and `lse`.
    """
    G: tl.constexpr = Hq // Hkv
    tile, split, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = plane // Hkv, plane % Hkv
    begin = tl.minimum(tl.maximum(tl.load(start + b), 0), FAR).to(tl.int32)
    used = tl.minimum(tl.maximum(tl.load(count + b), 0), Q).to(tl.int32)
    context = tl.minimum(begin, S)

    rows = tile * ROWS + tl.arange(0, ROWS)
    column = rows // G
    first_column = tile * ROWS // G
    last_column = tl.minimum((tile * ROWS + ROWS - 1) // G, used - 1)

    # the tiles of keys that some row sees: those of the context come first, those of the block follow
    context_tiles = tl.cdiv(context, KEYS)
    seen = used
    if CAUSAL:
        seen = last_column + 1
    elif BOTH_SIDES:
        seen = tl.minimum(used, last_column + WINDOW)
    first, end = 0, context_tiles + tl.cdiv(seen, KEYS)
    if WINDOW > 0:
        oldest = tl.maximum(begin + first_column - WINDOW + 1, 0)
        in_block = context_tiles + tl.maximum(oldest - begin, 0) // KEYS
        first = tl.where(oldest < context, oldest // KEYS, in_block)
    if first_column >= used:
        end = first
    share = tl.maximum(tl.cdiv(end - first, tl.num_programs(1)), 2)  # a single tile is not worth a program
    first += split * share
    end = tl.minimum(first + share, end)

    dims = tl.arange(0, D)
    keys = tl.arange(0, KEYS)
    base = (b * Hq + h * G).to(tl.int64) * Q
    row = rows % G * Q + tl.minimum(column, Q - 1)
    queries = tl.load(q + base * D + row[:, None] * D + dims[None, :])
    k_context = cache + (b.to(tl.int64) * Hc + k_head + h) * S * D
    v_context = cache + (b.to(tl.int64) * Hc + v_head + h) * S * D
    k_own = k_block + plane.to(tl.int64) * Q * D
    v_own = v_block + plane.to(tl.int64) * Q * D

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for t in tl.range(first, end, num_stages=STAGES):
        own = t >= context_tiles
        key = (t - tl.where(own, context_tiles, 0)) * KEYS
        length = tl.where(own, used, context)
        offsets = tl.minimum(key + keys, length - 1)[:, None] * D + dims[None, :]
        k = tl.load(tl.where(own, k_own, k_context) + offsets)
        v = tl.load(tl.where(own, v_own, v_context) + offsets)
        scores = tl.dot(queries, k.T)

        at_edge = own | (key + KEYS > length)
        if WINDOW > 0:
            at_edge |= key <= begin + last_column - WINDOW
        if at_edge:
            past = tl.where(own, 0, -begin)  # places are counted from the block's first position
            place = key + past + keys
            below = length + past + tl.zeros_like(column)
            if CAUSAL:
                below = tl.minimum(below, column + 1)
            elif BOTH_SIDES:
                below = tl.minimum(below, column + WINDOW)
            visible = place[None, :] < below[:, None]
            if WINDOW > 0:
                visible &= place[None, :] > (column - WINDOW)[:, None]
            scores = tl.where(visible, scores, float("-inf"))

        higher = tl.maximum(peak, tl.max(scores, 1) * SCALE)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * SCALE - level[:, None])
        shrink = tl.exp2(peak - level)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = higher

    live = column < used
    if out is None:
        base += (split * (tl.num_programs(2) // Hkv) * Hq).to(tl.int64) * Q
        result = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        target = partial + base * D + row[:, None] * D + dims[None, :]
        tl.store(target, result, mask=(live & (total > 0))[:, None])
        tl.store(lse + base + row, peak + tl.log2(total), mask=live)
    else:
        if sinks is not None:
            sink = tl.load(sinks + h * G + rows % G) * LOG2E
            level = tl.maximum(peak, sink)
            shrink = tl.exp2(peak - level)
            total = total * shrink + tl.exp2(sink - level)
            acc = acc * shrink[:, None]
        result = tl.where(live[:, None], acc * (1.0 / total)[:, None], 0.0)
        target = out + base * D + row[:, None] * D + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=(column < Q)[:, None])


@triton.jit
def combine(
    partial, lse, count, sinks,
    Q, splits,
    out,
    Hq: tl.constexpr, D: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """partial and lse of `attend`, count i64 [B], sinks f32 [Hq] or None → out T [B, Hq, Q, D].

    Grid (Q, Hq, B): a program makes one row. MOST is a power of two that holds `splits`.
    """
    column, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (b * Hq + head).to(tl.int64) * Q + column
    stride = tl.num_programs(2).to(tl.int64) * Hq * Q
    dims = tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    if column < tl.load(count + b):
        every = tl.arange(0, MOST)
        levels = tl.load(lse + every * stride + row, mask=every < splits, other=float("-inf"))
        peak = tl.max(levels, 0)
        if sinks is not None:
            sink = tl.load(sinks + head) * LOG2E
            peak = tl.maximum(peak, sink)
        total = tl.sum(tl.exp2(levels - peak), 0)
        if sinks is not None:
            total += tl.exp2(sink - peak)
        held = tl.max(tl.where(levels > float("-inf"), every + 1, 0), 0)
        for first in tl.range(0, held, CHUNK):
            part = first + tl.arange(0, CHUNK)
            level = tl.load(lse + part * stride + row, mask=part < held, other=float("-inf"))
            source = partial + (part * stride + row)[:, None] * D + dims[None, :]
            values = tl.load(source, mask=(level > float("-inf"))[:, None], other=0.0)
            acc += tl.sum(values * tl.exp2(level - peak)[:, None], 0)
        acc = acc / total
    tl.store(out + row * D + dims, acc.to(out.dtype.element_ty))
