"""Write the files of all ranks at once: every tensor of the checkpoint is read one time, some MiB of it at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflash_trt.checkpoint import TensorRef, scan
from dflash_trt.checkpoint.scan import NOT_FINITE
from dflash_trt.checkpoint.shards import ShardWriter
from dflash_trt.checkpoint.stack import FLOATS
from dflash_trt.checkpoint.weights import DTYPES, slices
from dflash_trt.errors import UserError
from dflash_trt.trtllm.export.content import Content, Scales, Streamed

READ = 2 << 20  # bytes at once


@dataclass
class Conversions:
    """Which tensors are written in another float type than they are stored in."""

    names: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (from, to) → tensors

    def notes(self) -> tuple[str, ...]:
        """`3 tensors are rounded from F32 to BF16: model.norm.weight, …`"""
        return tuple(
            f"{len(names)} tensors are {'widened' if after == 'F32' else 'rounded'} from {before} to {after}: "
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            for (before, after), names in self.names.items()
        )


def rank_file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def write_ranks(
    folder: Path,
    items: Sequence[Content],
    tensors: Mapping[str, TensorRef],
    tp: int,
    read: Callable[[int], None],
) -> Conversions:
    """Write `rank0.safetensors` … into `folder`; `read` is told how many bytes were read.

    Raises UserError for values that are not finite or that the files' float type cannot hold.
    """
    made = Conversions()
    with contextlib.ExitStack() as stack:
        slots = [slot for item in items for slot in item.slots]
        writers = [stack.enter_context(ShardWriter(folder / rank_file(rank), slots)) for rank in range(tp)]
        for item in items:
            if isinstance(item, Scales):
                for writer, arrays in zip(writers, item.values(tensors, tp), strict=True):
                    for slot, values in zip(item.slots, arrays, strict=True):
                        writer.write(slot.name, values)
                read(item.nbytes_read)
            else:
                _stream(item, writers, made, read)
    return made


def _stream(item: Streamed, writers: Sequence[ShardWriter], made: Conversions, read: Callable[[int], None]) -> None:
    tp, name, dtype = len(writers), item.slot.name, item.slot.dtype
    for ref, share in item.sources:
        if ref.dtype != dtype:
            made.names.setdefault((ref.dtype, dtype), []).append(ref.name)
        begin = 0
        for stored in slices(ref, READ):
            values = _converted(stored, ref, dtype)
            for rank, writer in enumerate(writers):
                own = share.cut(values, begin, ref.shape[0], rank, tp)
                if own.size:
                    writer.write(name, own)
            begin += len(values)
            read(stored.nbytes)
        for rank, writer in enumerate(writers):
            if missing := share.missing(ref.shape[0], rank, tp):
                writer.write(name, np.zeros((missing, *item.slot.shape[1:]), DTYPES[dtype]))


def _converted(values: np.ndarray, ref: TensorRef, dtype: str) -> np.ndarray:
    """The same values, rounded to nearest even where `dtype` is narrower."""
    if ref.dtype not in FLOATS:
        return values
    with np.errstate(over="ignore"):
        made = values if ref.dtype == dtype else values.astype(DTYPES[dtype])
    mask = np.array(NOT_FINITE[dtype], f"u{made.itemsize}")
    if ((made.view(mask.dtype) & mask) == mask).any():
        if found := scan(ref):
            raise UserError(str(found), where=ref.file, fix="the checkpoint is damaged; download it again or train on")
        largest = float(np.abs(values.astype(np.float32)).max())
        raise UserError(f"{ref.name} holds {largest:g}, too large for {dtype}", where=ref.file, fix="--dtype bfloat16")
    return made
