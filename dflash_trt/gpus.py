"""The GPUs a server runs on: data sheets as data (`gpus.yaml`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.document import read_document
from dflash_trt.errors import UserError

FILE = Path(__file__).with_name("gpus.yaml")
MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """One GPU."""

    name: str
    sm: int
    memory: int  # bytes
    bandwidth: float  # bytes a second
    flops: Mapping[str, float]  # dense FLOP/s by "bf16", "fp8", "fp4"
    link: float  # bytes a second to the other GPUs of the node, in one direction
    link_latency: float  # seconds of the smallest all-reduce over a node
    nvlink: bool
    source: str


@dataclass(frozen=True)
class Gpus:
    """`count` cards in each of `nodes` nodes."""

    card: Card
    count: int
    nodes: int = 1

    @property
    def total(self) -> int:
        return self.count * self.nodes

    def __str__(self) -> str:
        return f"{self.card.name}x{self.count}" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


@functools.cache
def read_cards() -> Mapping[str, Card]:
    """Name → card, in the order of the file."""
    return {
        name: Card(
            name=name,
            sm=values["sm"],
            memory=values["memory"] * MIB,
            bandwidth=values["bandwidth"] * 1e12,
            flops={dtype: tera * 1e12 for dtype, tera in values["flops"].items()},
            link=values["link"] * 1e9,
            link_latency=values["link_latency"] * 1e-6,
            nvlink=values["nvlink"],
            source=values["source"],
        )
        for name, values in read_document(FILE).values.items()
    }


def parse_gpus(text: str, where: object = "--gpus", nodes: int = 1) -> Gpus:
    """`B300x8`: the card and how many a node has; `B200` is one. Raises UserError, naming the cards known."""
    matched = re.fullmatch(r"(.+?)(?:\s*[x×]\s*(\d{1,4}))?", text.strip(), re.IGNORECASE)
    name, count = (matched[1], int(matched[2] or 1)) if matched else (text, 1)
    cards = {card.lower(): card for card in read_cards()}
    spelled = " ".join(re.sub(r"[_-]", " ", name).lower().split())
    known = ", ".join(read_cards())
    if spelled not in cards:
        raise UserError(f"{text!r} names no GPU known here", where=where, fix=f"known: {known}; write it as in B300x8")
    if not count:
        raise UserError(f"{text!r} has no GPU", where=where, fix="write how many a node has, as in B300x8")
    return Gpus(read_cards()[cards[spelled]], count, nodes)
