"""A step of each method as work: what one rank does between two visits to the scheduler.

AR feeds one token a row. EAGLE-3 drafts K tokens in K passes of one layer, DFlash a block of K in one pass of its
layers; either way the target then checks K+1 columns a row. Sources: DFlash as TensorRT-LLM's PyTorch backend runs
it (`_torch/speculative/dflash.py`, `_torch/models/modeling_dflash.py`); docs/plan.md has the list of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dflash_trt.kv import rank_heads
from dflash_trt.plan.models import Drafter, Layer, Model, Split, Stack
from dflash_trt.plan.ops import ACTIVATION, AllReduce, Attention, Experts, Gemm, Op, Small

Method = Literal["ar", "eagle3", "dflash"]
METHODS: tuple[Method, ...] = ("ar", "eagle3", "dflash")
NAMES: dict[str, str] = {"ar": "AR", "eagle3": "EAGLE-3", "dflash": "DFlash"}


@dataclass(frozen=True)
class Call:
    """`count` times the same work, for one part of a step."""

    part: Literal["target", "head", "drafter", "sampling"]
    op: Op
    count: int = 1


@dataclass(frozen=True)
class Load:
    """What a step works on."""

    batch: int  # rows on all ranks of the split
    draft: int  # K
    context: int  # tokens in the caches of a row
    cache: str = "bf16"  # dtype of the target's KV cache


def build_step(model: Model, method: Method, load: Load, split: Split) -> list[Call]:
    """All work of a step. `load.draft` is ignored for AR."""
    columns = 1 if method == "ar" else load.draft + 1
    rows = split.rows(load.batch)
    calls = [Call("target", *call) for call in _embed(rows * columns, model.target.hidden, split)]
    calls += [Call("target", *call) for call in _layers(model.target, rows, columns, load, split, load.cache)]
    calls += [Call("head", *call) for call in _head(rows * columns, model.target.hidden, model.vocab, split)]
    calls.append(Call("sampling", Small(), 4))  # last tokens gathered, a choice, lengths and stop flags updated
    if method == "ar":
        return calls
    calls.append(Call("sampling", Small(), 6))  # accepted prefix, its tokens and lengths, next inputs and positions
    if method == "dflash":
        if model.dflash is None:
            raise ValueError("no drafter")
        drafter, draft = model.dflash, _dflash(model.dflash, model, rows, columns, load, split)
    else:
        drafter, draft = model.eagle3, _eagle3(model.eagle3, model, rows, columns, load, split)
    calls += [Call("target", *call) for call in _capture(drafter.taps, rows * columns, model.target.hidden)]
    return calls + [Call("drafter", *call) for call in draft]


Work = Iterator[tuple[Op, int]]


def _embed(tokens: int, hidden: int, split: Split) -> Work:
    """The table is split over its rows, so what ranks looked up is summed."""
    yield Small(2 * tokens * hidden * ACTIVATION), 1
    if split.attention_ranks > 1:
        yield AllReduce(tokens * hidden, split.tp), 1


def _layers(stack: Stack, rows: int, columns: int, load: Load, split: Split, cache: str) -> Work:
    for layer in stack.layers:
        yield from ((op, layer.count * count) for op, count in _attend(stack, layer, rows, columns, load, split, cache))
        yield from ((op, layer.count * count) for op, count in mlp(stack, layer, rows * columns, split))


def _attend(stack: Stack, layer: Layer, rows: int, columns: int, load: Load, split: Split, cache: str) -> Work:
    tokens, ranks = rows * columns, split.attention_ranks
    heads, kv_heads = layer.heads // ranks, rank_heads(layer.kv_heads, ranks)
    yield Gemm(tokens, (heads + 2 * kv_heads) * layer.head_dim, stack.wide * stack.hidden, stack.dense_precision), 1
    seen = load.context if layer.window is None else min(load.context, layer.window)
    yield Attention(rows, columns, seen, heads, kv_heads, layer.head_dim, layer.window, cache), 1
    yield Gemm(tokens, stack.hidden, heads * layer.head_dim, stack.dense_precision), 1
    yield from _join(tokens, stack.hidden, split)


def mlp(stack: Stack, layer: Layer, tokens: int, split: Split) -> Work:
    """The second half of a layer, with what joins the ranks after it."""
    if layer.dense:
        yield from _dense(tokens, stack.hidden, stack.ffn // split.attention_ranks, stack.dense_precision)
    else:
        yield Gemm(tokens, stack.experts, stack.hidden), 1  # the router, in bf16 and on every rank
        everyone = tokens * (split.tp if split.attention_dp else 1)
        share, groups = split.tp // split.ep, split.ep
        yield (
            Experts(
                everyone, stack.hidden, stack.expert_ffn, stack.experts, stack.per_token, share, groups, stack.precision
            ),
            1,
        )
        if stack.shared_ffn:
            yield from _dense(tokens, stack.hidden, stack.shared_ffn // split.attention_ranks, stack.dense_precision)
        if split.attention_dp and split.tp > 1:  # rows go to the experts' ranks and back
            yield AllReduce(everyone * stack.hidden, split.tp), 1
            yield Small(2 * tokens * stack.hidden * ACTIVATION), 1
            return
    yield from _join(tokens, stack.hidden, split)


def _dense(tokens: int, hidden: int, ffn: int, precision: str) -> Work:
    yield Gemm(tokens, 2 * ffn, hidden, precision), 1
    yield Small(3 * tokens * ffn * ACTIVATION), 1
    yield Gemm(tokens, hidden, ffn, precision), 1


def _join(tokens: int, hidden: int, split: Split) -> Work:
    """The sum over the ranks with residual and norm in one kernel; the norm alone where nothing is split."""
    if split.attention_ranks > 1:
        yield AllReduce(tokens * hidden, split.tp), 1
    else:
        yield Small(4 * tokens * hidden * ACTIVATION), 1


def _head(tokens: int, hidden: int, vocab: int, split: Split) -> Work:
    """Each rank's best of its share of the vocabulary, then the best of these."""
    yield Gemm(tokens, -(-vocab // split.attention_ranks), hidden), 1
    yield Small(tokens * vocab / split.attention_ranks * ACTIVATION), 1
    if split.attention_ranks > 1:
        yield AllReduce(2 * tokens, split.tp), 1


def _capture(taps: int, tokens: int, hidden: int) -> Work:
    """A captured layer's all-reduce cannot fuse the norm (`modeling_gpt_oss.py`): the norm runs alone, and a copy."""
    yield Small(4 * tokens * hidden * ACTIVATION), 2 * taps


def _dflash(drafter: Drafter, model: Model, rows: int, columns: int, load: Load, split: Split) -> Work:
    """Context in, block out. fc and its norm are whole on every rank; K and V of all layers come from one GEMM."""
    stack, tokens = drafter.stack, rows * columns
    yield Gemm(tokens, stack.hidden, drafter.taps * model.target.hidden), 1
    yield Small(2 * tokens * stack.hidden * ACTIVATION), 1
    values = sum(
        layer.count * 2 * rank_heads(layer.kv_heads, split.attention_ranks) * layer.head_dim for layer in stack.layers
    )
    yield Gemm(tokens, values, stack.hidden), 1
    yield Small(2 * tokens * values * ACTIVATION), 3  # k_norm, rotary, store
    yield from _embed(tokens, stack.hidden, split)
    yield Small(2 * tokens * stack.hidden * ACTIVATION), stack.depth  # q_norm and k_norm of the block
    yield from _layers(stack, rows, columns, load, split, "bf16")
    yield from _head(rows * (columns - 1), stack.hidden, drafter.vocab, split)


def _eagle3(drafter: Drafter, model: Model, rows: int, columns: int, load: Load, split: Split) -> Work:
    """First over all checked columns, whose features are new, then K-1 times over the last draft of each row."""
    stack = drafter.stack
    yield Gemm(rows * columns, stack.hidden, drafter.taps * model.target.hidden), 1
    for width, times in ((columns, 1), (1, columns - 2)):
        if times:
            tokens = rows * width
            work = [
                *_embed(tokens, stack.hidden, split),
                (Small(4 * tokens * stack.hidden * ACTIVATION), 2),  # norms of the embedding and of the hidden vector
                *_layers(stack, rows, width, load, split, "bf16"),
                *_head(rows, stack.hidden, drafter.vocab, split),
                (Small(), 1),  # draft vocabulary to the target's
            ]
            yield from ((op, times * count) for op, count in work)
