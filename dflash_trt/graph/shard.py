"""Which bytes of a pair's weights one rank needs: rules as data, and tensors cut by them.

A cut along the first axis of a row-major tensor is a range of the checkpoint's own file and stays there. What is no
such range is written to `rankN.safetensors`: the columns of row-parallel weights (o_proj, down_proj), experts cut by
their width, and NVFP4 experts, which ModelOpt stores transposed and 4-bit types cannot express.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, overload

import numpy as np

from dflash_trt.checkpoint import Draft, DraftConfig, Experts, Pair, Target, TargetConfig, TensorRef, read_header
from dflash_trt.checkpoint.mxfp4 import transpose_bytes
from dflash_trt.checkpoint.shards import ShardWriter, Slot
from dflash_trt.checkpoint.weights import DTYPES, slices
from dflash_trt.errors import UserError
from dflash_trt.graph.mapping import Mapping, Rank
from dflash_trt.graph.names import weights_file

By = Literal["heads", "kv_heads", "ffn", "vocab", "experts", "expert_width"]
Bounds = tuple[tuple[int, int], ...]  # per axis: first and end

# Pattern of a tensor's name → which axes are cut, and by what; the first pattern that fits holds. Everything else,
# norms, router, `fc` and scales of whole tensors, is on every rank.
RULES: dict[str, dict[int, By]] = {
    "*_weight_scale_2": {},
    "*_input_scale": {},
    "*.weight_scale_2": {},
    "*.input_scale": {},
    "*.experts.gate_up_proj_blocks": {0: "experts", 1: "expert_width"},  # [E, 2I, H/32, 16]
    "*.experts.gate_up_proj_scales": {0: "experts", 1: "expert_width"},
    "*.experts.gate_up_proj_bias": {0: "experts", 1: "expert_width"},
    "*.experts.gate_up_proj*": {0: "experts", 2: "expert_width"},  # [E, H, 2I]
    "*.experts.down_proj_blocks": {0: "experts", 2: "expert_width"},  # [E, H, I/32, 16]
    "*.experts.down_proj_scales": {0: "experts", 2: "expert_width"},
    "*.experts.down_proj_bias": {0: "experts"},
    "*.experts.down_proj*": {0: "experts", 1: "expert_width"},  # [E, I, H]
    "*.self_attn.q_proj.*": {0: "heads"},
    "*.self_attn.[kv]_proj.*": {0: "kv_heads"},
    "*.self_attn.sinks": {0: "heads"},
    "*.self_attn.o_proj.bias": {},
    "*.self_attn.o_proj.*": {1: "heads"},
    "*.mlp.gate_proj.*": {0: "ffn"},
    "*.mlp.up_proj.*": {0: "ffn"},
    "*.mlp.down_proj.bias": {},
    "*.mlp.down_proj.*": {1: "ffn"},
    "*embed_tokens.*": {0: "vocab"},
    "lm_head.*": {0: "vocab"},
}
READ = 8 << 20  # bytes read at once where columns are cut out
TURNED = ("*.experts.*_proj", "*.experts.*_proj_weight_scale")  # in NVFP4, [E, in/2, out] and [E, in/16, out]


@dataclass(frozen=True)
class Piece:
    """What one rank needs of a tensor."""

    key: str
    ref: TensorRef
    bounds: Bounds
    turned: bool = False  # the last two axes change places

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = tuple(end - first for first, end in self.bounds)
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.turned else sizes

    @property
    def in_place(self) -> TensorRef | None:
        """The piece as one range of the checkpoint's file; None if it is none."""
        cut = [axis for axis, size in enumerate(self.ref.shape) if self.bounds[axis] != (0, size)]
        before = self.bounds[: max(cut, default=0)]
        if self.turned or any(end - first > 1 for first, end in before):
            return None
        offset, stride = self.ref.offset, self.ref.nbytes
        for (first, _), size in zip(self.bounds, self.ref.shape, strict=True):
            stride //= size
            offset += first * stride
        nbytes = math.prod(self.shape) * DTYPES[self.ref.dtype].itemsize
        return replace(self.ref, offset=offset, nbytes=nbytes, shape=self.shape)

    def read(self) -> Iterator[np.ndarray]:
        """The piece in its own row-major order, some of the first axis at a time."""
        first, *inner = self.bounds
        source = replace(self, bounds=(first, *((0, size) for size in self.ref.shape[1:])), turned=False).in_place
        assert source  # a cut along the first axis alone
        index = (slice(None), *(slice(*bound) for bound in inner))
        for rows in slices(source, size=0 if self.turned else READ):
            yield transpose_bytes(rows[index]) if self.turned else rows[index]


def place(models: Pair, rank: Rank, directory: Path) -> Pair:
    """The pair as `rank` sees it: heads, widths and tensors are its own, the vocabulary and the router's experts whole.

    Writes `directory/rankN.safetensors` if anything has to be written. Raises UserError if the mapping does not fit.
    """
    check_mapping(models, rank.mapping)
    halves: dict[str, Target | Draft] = {"target": models.target} | ({"draft": models.draft} if models.draft else {})
    pieces = {role: list(cut(half, rank)) for role, half in halves.items()}
    file = directory / weights_file(rank.number)
    written = {f"{role}.{piece.key}": piece for role in pieces for piece in pieces[role] if piece.in_place is None}
    if written:
        with ShardWriter(file, [Slot(name, piece.ref.dtype, piece.shape) for name, piece in written.items()]) as writer:
            for name, piece in written.items():
                for values in piece.read():
                    writer.write(name, values)
    moved = read_header(file) if written else {}

    def placed(role: str) -> dict[str, TensorRef]:
        return {piece.key: piece.in_place or moved[f"{role}.{piece.key}"] for piece in pieces[role]}

    target = replace(models.target, config=own_config(models.target, rank), tensors=placed("target"))
    if models.draft is None:
        return Pair(target, None)
    return Pair(target, replace(models.draft, config=own_config(models.draft, rank), tensors=placed("draft")))


def cut(half: Target | Draft, rank: Rank) -> Iterator[Piece]:
    """The pieces of one checkpoint that `rank` needs. Raises UserError where a cut would fall inside a scale block."""
    for key, ref in half.tensors.items():
        rule: dict[int, By] = next((axes for pattern, axes in RULES.items() if fnmatchcase(key, pattern)), {})
        bounds = tuple(
            _bounds(half, rank, rule[axis], ref, size) if axis in rule else (0, size)
            for axis, size in enumerate(ref.shape)
        )
        turned = _is_nvfp4(half) and any(fnmatchcase(key, pattern) for pattern in TURNED)
        yield Piece(key, ref, bounds, turned)


def check_mapping(models: Pair, mapping: Mapping) -> None:
    """Raises UserError that names the first number which cannot be split as `mapping` says."""
    tp, ep = mapping.tp, mapping.ep
    for option, value in {"--tp": tp, "--ep": ep}.items():
        if value < 1:
            raise UserError(f"{value} is too small", where=option, fix="give 1 or more")
    experts, where = models.target.config.experts, models.target.path
    halves = [half for half in (models.target, models.draft) if half]
    for half in halves:
        if what := _unsplit(half, tp):
            fitting = [n for n in range(1, half.config.heads + 1) if not any(_unsplit(other, n) for other in halves)]
            fix = f"choose --tp {', '.join(map(str, fitting))}"
            raise UserError(f"{what} cannot be split over {tp} ranks", where=half.path, fix=fix)
    if ep > 1 and experts is None:
        raise UserError(f"ep {ep} asked, but the target has no experts", where=where, fix="leave --ep out")
    if experts and experts.count % ep:
        raise _uneven(f"{experts.count} experts", ep, "--ep", where)
    if tp % ep and ep % tp:
        raise UserError(f"of tp {tp} and ep {ep} neither divides the other", where="--tp, --ep", fix="change one")
    widths = mapping.world // ep
    if experts and models.target.config.ffn % widths:
        raise _uneven(f"experts of width {models.target.config.ffn}", widths, "--tp / --ep", where)
    if (tp - 1) * rows_each(models.target.config.vocab, tp) >= models.target.config.vocab:
        raise _uneven(f"a vocabulary of {models.target.config.vocab}", tp, "--tp", where)


def rows_each(vocab: int, tp: int) -> int:
    """Rows of the embedding and the head a rank holds; the last rank may hold fewer."""
    return -(-vocab // tp)


def _unsplit(half: Target | Draft, tp: int) -> str | None:
    """What of a model tp ranks cannot share evenly."""
    config = half.config
    if config.heads % tp:
        return f"{config.heads} attention heads"
    if config.kv_heads % tp and tp % config.kv_heads:
        return f"{config.kv_heads} key/value heads"
    if config.ffn % tp and not _experts(half):
        return f"an MLP of width {config.ffn}"
    return None


def _uneven(what: str, ranks: int, option: str, where: Path) -> UserError:
    return UserError(f"{what} cannot be split over {ranks} ranks", where=where, fix=f"choose another {option}")


@overload
def own_config(half: Target, rank: Rank) -> TargetConfig: ...
@overload
def own_config(half: Draft, rank: Rank) -> DraftConfig: ...
def own_config(half: Target | Draft, rank: Rank) -> TargetConfig | DraftConfig:
    """The config with a rank's own heads and widths."""
    config, tp = half.config, rank.mapping.tp
    parts = rank.expert_widths if _experts(half) else tp
    kv_heads = max(1, config.kv_heads // tp)
    return replace(config, heads=config.heads // tp, kv_heads=kv_heads, ffn=config.ffn // parts)


def _bounds(half: Target | Draft, rank: Rank, by: By, ref: TensorRef, size: int) -> tuple[int, int]:
    """First and end of what a rank needs along an axis of `size` entries."""
    first, end, total = _units(half, rank, by)
    if first * size % total or end * size % total:
        option = "--ep" if by.startswith("expert") else "--tp"
        raise UserError(
            f"{ref.name}: {end - first} of {total} ({by.replace('_', ' ')}) a rank would cut a scale block in two",
            where=ref.file,
            fix="split experts by number (a larger --ep)" if option == "--ep" else "choose a smaller --tp",
        )
    return first * size // total, end * size // total


def _units(half: Target | Draft, rank: Rank, by: By) -> tuple[int, int, int]:
    """First, end and total of what is split."""
    config, tp, part = half.config, rank.mapping.tp, rank.tp_rank
    if by == "experts":
        experts = _experts(half)
        assert experts is not None
        own = rank.experts(experts.count)
        return own.start, own.stop, experts.count
    if by == "vocab":
        each = rows_each(config.vocab, tp)
        return part * each, min((part + 1) * each, config.vocab), config.vocab
    if by == "expert_width":
        total, parts, part = config.ffn, rank.expert_widths, rank.expert_width_rank
    else:
        total, parts = getattr(config, by), tp
    if by == "kv_heads" and parts > total:  # several ranks share one
        return part * total // parts, part * total // parts + 1, total
    return part * total // parts, (part + 1) * total // parts, total


def _experts(half: Target | Draft) -> Experts | None:
    return half.config.experts if isinstance(half, Target) else None


def _is_nvfp4(half: Target | Draft) -> bool:
    experts = _experts(half)
    return experts is not None and experts.storage == "nvfp4"
