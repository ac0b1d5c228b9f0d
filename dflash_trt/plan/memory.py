"""Bytes of a rank: weights, the drafter's arena, and what is left for the target's KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_trt.gpus import Card
from dflash_trt.kv import CACHE_WIDTHS, WIDTHS, Arena, rank_heads
from dflash_trt.plan.models import Drafter, Layer, Model, Split, Stack
from dflash_trt.plan.steps import Method

RESERVED = 0.1  # of the card: activations, CUDA graphs, NCCL, what is fragmented


@dataclass(frozen=True)
class Memory:
    """One rank's share, in bytes."""

    weights: int
    drafter: int  # its weights; embedding and head are the target's
    cache: int  # the target's KV of `batch` rows of `sequence` tokens
    arena: int  # the drafter's KV, which lies outside kv_cache_config's fraction
    free: int  # what a card has for all of this
    largest_batch: int  # that fits, with rows of this length

    @property
    def used(self) -> int:
        return self.weights + self.drafter + self.cache + self.arena

    @property
    def fits(self) -> bool:
        return self.used <= self.free


def measure_memory(
    model: Model, method: Method, split: Split, card: Card, batch: int, sequence: int, draft: int, cache: str = "bf16"
) -> Memory:
    """`sequence`: tokens of the longest row (max_seq_len), for which the arena is made and the cache must do."""
    weights = weights_per_rank(model, split)
    drafter = model.dflash if method == "dflash" else model.eagle3 if method == "eagle3" else None
    extra = 0
    if drafter:
        fc = drafter.taps * model.target.hidden * drafter.stack.hidden
        head = drafter.vocab // split.attention_ranks * model.target.hidden if method == "eagle3" else 0
        extra = round(2 * (fc + head) + _stack_bytes(drafter.stack, split))
    row = cache_per_row(model.target, split, sequence, cache)
    slot = 0
    if drafter and method == "dflash":
        slot = make_arena(drafter, split, sequence, draft).slot
    elif drafter:
        slot = cache_per_row(drafter.stack, split, sequence + draft + 1, "bf16")
    free = round(card.memory * (1 - RESERVED))
    ranks = split.tp if split.attention_dp else 1
    spare = free - weights - extra - slot  # one slot of the arena is for padded rows (TensorRT-LLM#16548)
    fit = max(0, int(spare // max(1, row + slot))) * ranks
    rows = split.rows(batch)
    return Memory(weights, extra, rows * row, (rows + 1) * slot if drafter else 0, free, fit)


def weights_per_rank(model: Model, split: Split) -> int:
    """Of the target: layers split as they run, embedding and head over the vocabulary."""
    tables = (1 if model.tied else 2) * model.vocab * model.target.hidden
    return round(2 * tables / split.attention_ranks + _stack_bytes(model.target, split))


def make_arena(drafter: Drafter, split: Split, sequence: int, draft: int) -> Arena:
    """It keeps everything, whatever the windows, as far as the drafter counts."""
    layer = drafter.stack.layers[0]  # TensorRT-LLM takes drafters whose layers have the same heads
    return Arena(
        layers=drafter.stack.depth,
        positions=min(sequence, drafter.max_position or sequence),
        width=draft + 1,
        kv_heads=rank_heads(layer.kv_heads, split.attention_ranks),
        head_dim=layer.head_dim,
    )


def cache_per_row(stack: Stack, split: Split, tokens: int, cache: str) -> int:
    """Of all layers; a sliding layer keeps its window."""
    values = 0
    for layer in stack.layers:
        kept = min(tokens, layer.window) if layer.window else tokens
        values += layer.count * 2 * rank_heads(layer.kv_heads, split.attention_ranks) * layer.head_dim * kept
    return round(values * CACHE_WIDTHS[cache])


def _stack_bytes(stack: Stack, split: Split) -> float:
    return sum(layer.count * _layer_bytes(stack, layer, split) for layer in stack.layers)


def _layer_bytes(stack: Stack, layer: Layer, split: Split) -> float:
    ranks, precision = split.attention_ranks, WIDTHS[stack.dense_precision]
    kv_heads = rank_heads(layer.kv_heads, ranks)
    attention = (stack.wide * (layer.heads // ranks + 2 * kv_heads) + layer.heads // ranks) * layer.head_dim
    numbers = attention * stack.hidden
    if layer.dense:
        return (numbers + 3 * stack.hidden * stack.ffn / ranks) * precision
    shared = 3 * stack.hidden * stack.shared_ffn / ranks
    experts = 3 * stack.experts * stack.hidden * stack.expert_ffn / split.tp
    return (numbers + shared) * precision + 2 * stack.experts * stack.hidden + experts * WIDTHS[stack.precision]
