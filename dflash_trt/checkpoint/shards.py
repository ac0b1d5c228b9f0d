"""Write safetensors piece by piece: what each file will hold is said first, data follow in any order of tensors.

No tensor is ever whole in memory. A file has its name only when it is complete and on the disk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from dflash_trt.checkpoint.weights import DTYPES, INDEX, SINGLE

PARTIAL = ".partial"  # added to the name of a file that is being written
METADATA = {"format": "pt"}  # transformers refuses files without


@dataclass(frozen=True)
class Slot:
    """A tensor that is to come."""

    name: str
    dtype: str  # safetensors spelling
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ShardWriter:
    """One file. Leaving the `with` block well completes it; leaving by an exception leaves the partial file behind."""

    def __init__(self, file: Path, slots: Iterable[Slot]):
        self.file = file
        self._partial = file.with_name(file.name + PARTIAL)
        # Wide types first, as the reference implementation has it: then every tensor is aligned to its type.
        ordered = sorted(slots, key=lambda slot: -DTYPES[slot.dtype].itemsize)
        self._header, ranges, self._size = _layout(ordered)
        self._next = {name: begin for name, (begin, _) in ranges.items()}
        self._end = {name: end for name, (_, end) in ranges.items()}
        self._slots = {slot.name: slot for slot in ordered}

    def __enter__(self) -> ShardWriter:
        self._handle = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.truncate(self._handle, self._size)
        _write_at(self._handle, self._header, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        try:
            if kind is None:
                if missing := [name for name, at in self._next.items() if at < self._end[name]]:
                    raise ValueError(f"{missing[0]} is not complete")
                os.fsync(self._handle)
        finally:
            os.close(self._handle)
        if kind is None:
            self._partial.replace(self.file)

    def write(self, name: str, values: np.ndarray) -> None:
        """The next values of a tensor, in row-major order; copied bytes may come as uint8."""
        slot, data = self._slots[name], np.ascontiguousarray(values).reshape(-1)
        if data.dtype not in (DTYPES[slot.dtype], np.uint8):
            raise ValueError(f"{name} is {slot.dtype}, got {data.dtype}")
        at = self._next[name]
        if at + data.nbytes > self._end[name]:
            raise ValueError(f"{name} has {slot.nbytes} bytes, more were written")
        _write_at(self._handle, data.view(np.uint8).data, at)
        self._next[name] = at + data.nbytes


def name_shards(count: int) -> list[str]:
    """File names as transformers writes them."""
    return [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def write_index(directory: Path, shards: dict[str, Sequence[Slot]]) -> None:
    """File name → its tensors. One file alone has no index."""
    if len(shards) == 1:
        return
    weight_map = {slot.name: file for file, slots in shards.items() for slot in slots}
    total = sum(slot.nbytes for slots in shards.values() for slot in slots)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _layout(slots: Sequence[Slot]) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """(length prefix and header, name → byte range in the file, size of the file)"""
    entries: dict[str, object] = {"__metadata__": METADATA}
    ranges, end = {}, 0
    for slot in slots:
        ranges[slot.name] = end, end + slot.nbytes
        entries[slot.name] = {"dtype": slot.dtype, "shape": list(slot.shape), "data_offsets": [end, end + slot.nbytes]}
        end += slot.nbytes
    if len(ranges) < len(slots):
        raise ValueError("two tensors share a name")
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data start aligned
    start = 8 + len(text)
    shifted = {name: (start + begin, start + stop) for name, (begin, stop) in ranges.items()}
    return len(text).to_bytes(8, "little") + text, shifted, start + end


def _write_at(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written
