"""The sizes that work is counted from: a target in its precision, its drafter, an EAGLE-3 head, and how they are split.

What the model does not cover is refused here, by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dflash_trt.checkpoint.shape import LINEAR, SLIDING, DrafterShape, Shape
from dflash_trt.errors import UserError
from dflash_trt.kv import WIDTHS

EAGLE_VOCAB = 32000  # rows of the head of public EAGLE-3 checkpoints (arXiv 2503.01840 and its code)
EAGLE_TAPS = 3
EAGLE_FFN = 4  # times hidden, where the target has no dense MLP to copy


@dataclass(frozen=True)
class Split:
    """Over how many ranks a layer goes. With attention_dp each attends for its own requests, with all heads."""

    tp: int = 1
    ep: int = 1
    attention_dp: bool = False

    @property
    def attention_ranks(self) -> int:
        return 1 if self.attention_dp else self.tp

    def rows(self, batch: int) -> int:
        """Of a batch, those that one rank attends for."""
        return -(-batch // self.tp) if self.attention_dp else batch

    def __str__(self) -> str:
        return f"tp {self.tp}, ep {self.ep}" + (", attention dp" if self.attention_dp else "")


@dataclass(frozen=True)
class Layer:
    """What one kind of layer has; `count` layers are alike."""

    count: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    dense: bool  # its MLP is a plain one


@dataclass(frozen=True)
class Stack:
    """A run of decoder layers, split or not: the target's or a drafter's."""

    hidden: int
    ffn: int
    layers: tuple[Layer, ...]
    precision: str
    experts: int = 0
    per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    wide: int = 1  # how many hidden vectors q, k and v are computed from at once: EAGLE-3 has two

    @property
    def depth(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def dense_precision(self) -> str:
        """Of attention, and of experts that see every token. MXFP4 is for routed experts alone (gpt-oss)."""
        return "bf16" if self.precision == "mxfp4" else self.precision


@dataclass(frozen=True)
class Drafter:
    stack: Stack
    taps: int  # target layers whose outputs it reads
    block: int | None  # longest block it was trained for; None: any
    vocab: int  # rows of the head that drafts
    max_position: int | None = None  # how far it counts: its arena is no longer


@dataclass(frozen=True)
class Model:
    """A target and what may draft for it."""

    name: str
    target: Stack
    vocab: int
    tied: bool
    dflash: Drafter | None
    eagle3: Drafter
    max_position: int | None

    def check_split(self, split: Split) -> None:
        """Raises UserError for a split that TensorRT-LLM could not make."""
        parts = {"ep": split.tp % split.ep}
        for what, layer in self._layers():
            parts[f"{what} heads ({layer.heads})"] = layer.heads % split.attention_ranks
            small, large = sorted((layer.kv_heads, split.attention_ranks))
            parts[f"{what} KV heads ({layer.kv_heads})"] = large % small
        if self.target.experts:
            parts[f"experts ({self.target.experts})"] = self.target.experts % split.ep
        if bad := [name for name, rest in parts.items() if rest]:
            what = f"{split} does not divide the {bad[0]}" if bad[0] != "ep" else f"ep {split.ep} does not divide tp"
            raise UserError(what, where=self.name, fix="choose a tp that divides the heads, and an ep that divides tp")

    def _layers(self) -> Iterable[tuple[str, Layer]]:
        yield from (("target's", layer) for layer in self.target.layers)
        if self.dflash:
            yield from (("drafter's", layer) for layer in self.dflash.stack.layers)


def read_model(name: str, target: Shape, drafter: DrafterShape | None, precision: str | None = None) -> Model:
    """`precision` of the target's weights; None: as its config says. Raises UserError for what is not covered."""
    _refuse(target, name)
    said = precision or {None: "bf16", "mxfp4": "mxfp4", "nvfp4": "nvfp4", "fp8": "fp8"}.get(target.quantization)
    if said not in WIDTHS:
        what = f"weights in {precision or target.quantization} are not known to plan"
        raise UserError(what, where=name, fix=f"pass --precision with one of {', '.join(WIDTHS)}")
    if said == "mxfp4" and not target.experts:
        raise UserError("MXFP4 is for routed experts, and it has none", where=name, fix="pass another --precision")
    if target.vocab is None:
        raise UserError("vocab_size is missing", where=target.file, fix="the head's size hangs on it")
    stack = Stack(
        hidden=target.hidden,
        ffn=target.ffn,
        layers=_layers(target, set(range(target.dense_layers)) if target.experts else set(range(target.layers))),
        precision=said,
        experts=target.experts,
        per_token=target.experts_per_token,
        expert_ffn=target.expert_ffn,
        shared_ffn=target.shared_ffn,
    )
    return Model(
        name=name,
        target=stack,
        vocab=target.vocab,
        tied=target.tied,
        dflash=_dflash(drafter, target.vocab) if drafter else None,
        eagle3=_eagle3(target),
        max_position=target.max_position,
    )


def _refuse(shape: Shape, name: str) -> None:
    fix = "plan covers targets with ordinary or sliding-window attention"
    if shape.latent:
        raise UserError("its attention is MLA (a compressed cache), which plan does not model", where=name, fix=fix)
    if LINEAR in shape.kinds:
        count = shape.kinds.count(LINEAR)
        what = f"{count} of its {shape.layers} layers have linear attention, which plan does not model"
        raise UserError(what, where=name, fix=fix)


def _dflash(shape: DrafterShape, vocab: int) -> Drafter:
    _refuse(shape, str(shape.file))
    if shape.variant:
        fix = "plan models plain DFlash: blocks drafted in one pass by dense layers"
        raise UserError(f"the drafter is of the variant {shape.variant}", where=shape.file, fix=fix)
    if not shape.target_layer_ids:
        raise UserError("target_layer_ids is missing", where=shape.file, fix="the size of fc hangs on it")
    stack = Stack(hidden=shape.hidden, ffn=shape.ffn, layers=_layers(shape, set(range(shape.layers))), precision="bf16")
    return Drafter(stack, len(shape.target_layer_ids), shape.block_size, vocab, shape.max_position)


def _eagle3(target: Shape) -> Drafter:
    """One Llama layer of the target's widths that sees an embedding beside a hidden vector; no checkpoint is read."""
    layer = Layer(1, target.heads, target.kv_heads, target.head_dim, None, True)
    ffn = EAGLE_FFN * target.hidden if target.experts else target.ffn
    stack = Stack(hidden=target.hidden, ffn=ffn, layers=(layer,), precision="bf16", wide=2)
    return Drafter(stack, EAGLE_TAPS, None, min(EAGLE_VOCAB, target.vocab or EAGLE_VOCAB))


def _layers(shape: Shape, dense: set[int]) -> tuple[Layer, ...]:
    """Layers that are alike, counted. Full layers of gemma-4 have fewer and wider KV heads: `cached` tells how wide."""
    found: Counter[Layer] = Counter()
    for index, kind in enumerate(shape.kinds):
        window = shape.window if kind == SLIDING else None
        kv_heads, head_dim = shape.kv_heads, shape.head_dim
        if shape.cached[index] != 2 * kv_heads * head_dim:
            head_dim = math.gcd(shape.cached[index] // 2, 2 * head_dim)
            kv_heads = shape.cached[index] // (2 * head_dim)
        found[Layer(1, shape.heads, kv_heads, head_dim, window, index in dense)] += 1
    return tuple(replace(layer, count=count) for layer, count in found.items())
