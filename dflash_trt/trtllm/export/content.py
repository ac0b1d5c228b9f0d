"""What a rank's file holds: every tensor with its dtype and shape, and where its values come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_trt.checkpoint import TensorRef
from dflash_trt.checkpoint.quantized import BLOCK_SCALES, PACKED, part_name
from dflash_trt.checkpoint.shards import Slot
from dflash_trt.errors import UserError
from dflash_trt.trtllm.export.layout import Linear, Part, Vector
from dflash_trt.trtllm.export.scales import Globals, interleave, interleaved_shape, read_blocks, read_globals
from dflash_trt.trtllm.export.share import WHOLE, Share

FORMATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # TensorRT-LLM's dtype → safetensors' spelling


@dataclass(frozen=True)
class Streamed:
    """One tensor, read from the checkpoint piece by piece; of several tensors there, one below the other."""

    slot: Slot
    sources: tuple[tuple[TensorRef, Share], ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.slot,)

    @property
    def nbytes_read(self) -> int:
        return sum(ref.nbytes for ref, _ in self.sources)


@dataclass(frozen=True)
class Scales:
    """All scales of one NVFP4 linear: an eighth of its codes, and read at once."""

    linear: Linear
    refs: tuple[TensorRef, ...]  # block scales of the members
    globals: Globals
    shape: tuple[int, ...]  # of a rank's block scales

    @property
    def slots(self) -> tuple[Slot, ...]:
        rows, columns = self.shape
        name = self.linear.name
        return (
            Slot(f"{name}.weights_block_scaling_factor", BLOCK_SCALES, self.shape),
            Slot(f"{name}.weights_block_scaling_factor_interleaved", BLOCK_SCALES, interleaved_shape(rows, columns)),
            Slot(f"{name}.weights_global_scaling_factor", "F32", (1,)),
            Slot(f"{name}.activation_global_scaling_factor", "F32", (1,)),
            Slot(f"{name}.alpha", "F32", (1,)),
        )

    @property
    def nbytes_read(self) -> int:
        return sum(ref.nbytes for ref in self.refs)

    def values(self, tensors: Mapping[str, TensorRef], tp: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Of each rank, the values of `slots`. Raises UserError for scales that cannot be joined."""
        numbers = (self.globals.weight, self.globals.input, self.globals.alpha)
        scales = [(read_blocks(tensors, m.module, self.globals.weight), m.share) for m in self.linear.members]
        for rank in range(tp):
            own = np.concatenate([_own(blocks, share, rank, tp) for blocks, share in scales])
            yield own, interleave(own), *(np.array([number], np.float32) for number in numbers)


Content = Streamed | Scales


def contents(
    parts: Sequence[Part], tensors: Mapping[str, TensorRef], packed: Mapping[str, bool], *, dtype: str
) -> list[Content]:
    """All tensors of a network, each of the same shape on every rank. `packed`: the checkpoint's NVFP4 modules.

    Raises UserError where members of one matrix are packed and others are not, or scale their input differently.
    """
    found: list[Content] = []
    for part in parts:
        if isinstance(part, Vector):
            found.append(_streamed(part.name, FORMATS[dtype], [(part.ref, part.share)]))
            continue
        four_bit = is_packed(part, packed)
        weights = [(tensors[part_name(member.module, "weight")], member.share) for member in part.members]
        found.append(_streamed(f"{part.name}.weight", PACKED if four_bit else FORMATS[dtype], weights))
        if four_bit:
            found.append(_scales(part, tensors))
        found += _bias(part, tensors, dtype)
    return found


def is_packed(linear: Linear, packed: Mapping[str, bool]) -> bool:
    """Is its weight NVFP4? Raises UserError if some members are and others are not: they become one matrix."""
    members = [member.module for member in linear.members]
    inside = [module for module in members if module in packed]
    if inside and len(inside) < len(members):
        outside = next(module for module in members if module not in packed)
        what = f"{inside[0]} is NVFP4 and {outside} is not, but TensorRT-LLM has both in one matrix"
        raise UserError(what, where=linear.name, fix="quantize both or neither")
    return bool(inside)


def _streamed(name: str, dtype: str, sources: Sequence[tuple[TensorRef, Share]]) -> Streamed:
    return Streamed(Slot(name, dtype, _joined(sources)), tuple(sources))


def _joined(sources: Sequence[tuple[TensorRef, Share]]) -> tuple[int, ...]:
    shapes = [share.shape(ref.shape) for ref, share in sources]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _scales(linear: Linear, tensors: Mapping[str, TensorRef]) -> Scales:
    modules = [member.module for member in linear.members]
    refs = tuple(tensors[part_name(module, "weight_scale")] for module in modules)
    shape = _joined([(ref, member.share) for ref, member in zip(refs, linear.members, strict=True)])
    return Scales(linear, refs, read_globals(tensors, modules), shape)


def _bias(linear: Linear, tensors: Mapping[str, TensorRef], dtype: str) -> Iterator[Content]:
    """Of a row-parallel linear every rank has all: TensorRT-LLM adds it after the sum over ranks."""
    sources = [
        (tensors[name], WHOLE if member.share.axis == "columns" else member.share)
        for member in linear.members
        if (name := f"{member.module}.bias") in tensors
    ]
    if sources:
        yield _streamed(f"{linear.name}.bias", FORMATS[dtype], sources)


def _own(blocks: np.ndarray, share: Share, rank: int, tp: int) -> np.ndarray:
    """A rank's part, with zeros for rows that are not there."""
    own = share.cut(blocks, 0, len(blocks), rank, tp)
    padded = np.pad(own.view(np.uint8), ((0, share.missing(len(blocks), rank, tp)), (0, 0)))
    return padded.view(blocks.dtype)
