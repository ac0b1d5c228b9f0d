"""The safetensors format: which tensor lies where, without reading a tensor.

Format: https://huggingface.co/docs/safetensors/index#format. A file is eight bytes of header length, the header (JSON:
name → dtype, shape, byte range) and the data, which the ranges cover from first to last byte.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

from dflash_trt.checkpoint.config import read_json
from dflash_trt.checkpoint.model import TensorRef
from dflash_trt.errors import UserError

MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation
CHUNK = 512 << 10  # bytes that stay in a core's cache
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
        "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32, "F64": np.float64,
        "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}  # fmt: skip


def read_tensors(directory: Path) -> dict[str, TensorRef]:
    """Every tensor of a checkpoint directory by the name its file gives it.

    The files are those of the index; without one `model.safetensors`; without that all `*.safetensors`.
    Raises UserError for files that are missing, damaged or at odds with each other or with the index.
    """
    index = directory / INDEX
    weight_map = _read_index(index) if index.exists() else None
    tensors: dict[str, TensorRef] = {}
    for file in _files(directory, weight_map):
        for name, ref in read_header(file).items():
            if name in tensors:
                files = f"{tensors[name].file} and {file}"
                raise UserError(f"tensor {name} is in two files", where=files, fix="remove the stale one")
            if weight_map is not None and weight_map.get(name) != file.name:
                raise _damaged(f"tensor {name} of {file.name} is not in the index", index)
            tensors[name] = ref
    if weight_map and (absent := sorted(weight_map.keys() - tensors.keys())):
        raise _damaged(f"tensor {absent[0]} is in the index but not in {weight_map[absent[0]]}", index)
    return tensors


def read_header(file: Path) -> dict[str, TensorRef]:
    """The tensors of one file. Raises UserError unless the header is well-formed and its ranges fill the file."""
    header, start, size = _read_header_bytes(file)
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"the safetensors header is not valid JSON ({error})", file) from None
    if not isinstance(entries, dict):
        raise _damaged("the safetensors header is not a JSON object", file)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor_ref(name, entry, file, start) for name, entry in entries.items()}
    _check_ranges(sorted(tensors.values(), key=lambda ref: (ref.offset, ref.nbytes)), start, size, file)
    return tensors


def rename_tensors(tensors: dict[str, TensorRef], rename: Callable[[str], str]) -> dict[str, TensorRef]:
    """Key the same tensors by other names. Raises UserError if two would share one."""
    renamed: dict[str, TensorRef] = {}
    for name, ref in tensors.items():
        if (other := renamed.setdefault(rename(name), ref)) is not ref:
            raise UserError(f"tensors {other.name} and {name} are the same", where=ref.file, fix="remove the stale one")
    return renamed


def load_tensor(ref: TensorRef) -> np.ndarray:
    """Read one tensor; bfloat16 and float8 come as ml_dtypes."""
    count = math.prod(ref.shape)
    try:
        values = np.fromfile(ref.file, DTYPES[ref.dtype], count, offset=ref.offset)
    except OSError as error:
        raise UserError(f"cannot read tensor {ref.name}: {error.strerror}", where=ref.file) from None
    if len(values) < count:
        raise _damaged(f"the file is truncated inside tensor {ref.name}", ref.file)
    return values.reshape(ref.shape)


def slices(ref: TensorRef, size: int = CHUNK) -> Iterator[np.ndarray]:
    """Slices along the first axis: as many rows at a time as `size` bytes hold, at least one.

    They come by `read`, as the pages of a map count as resident memory.
    """
    dtype, row = DTYPES[ref.dtype], math.prod(ref.shape[1:])
    if not ref.nbytes:
        return
    rows = max(1, size // (row * dtype.itemsize))
    try:
        with ref.file.open("rb", buffering=0) as stream:
            stream.seek(ref.offset)
            for begin in range(0, ref.shape[0], rows):
                count = min(rows, ref.shape[0] - begin) * row
                values = np.fromfile(stream, dtype, count)
                if values.size < count:
                    raise UserError(f"the file is truncated inside tensor {ref.name}", where=ref.file)
                yield values.reshape(-1, *ref.shape[1:])
    except OSError as error:
        raise UserError(f"cannot read tensor {ref.name}: {error.strerror}", where=ref.file) from None


def _damaged(what: str, where: Path) -> UserError:
    return UserError(what, where=where, fix="download it again")


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged("weight_map is missing or empty", index)
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise UserError(f"weight_map puts {name} into {file!r}, which is no plain file name", where=index)
    return weight_map


def _files(directory: Path, weight_map: dict[str, str] | None) -> list[Path]:
    present = {file.name for file in directory.glob("*.safetensors")}
    if weight_map is not None:
        named = set(weight_map.values())
        if missing := sorted(named - present):
            raise _damaged(f"the index names {missing[0]}, which is missing", directory)
        if SINGLE in present - named:
            raise UserError(f"{SINGLE} is not named by {INDEX}", where=directory, fix="remove the stale one")
        present = named
    if not present:
        fix = "weights in .bin, .pt or .gguf are not supported; convert them"
        raise UserError("no .safetensors file", where=directory, fix=fix)
    if weight_map is None and SINGLE in present:
        present = {SINGLE}
    return sorted(directory / name for name in present)


def _read_header_bytes(file: Path) -> tuple[bytes, int, int]:
    """(header, where the data start, file size)"""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if prefix == b"version ":
                raise UserError("the file is a git-lfs pointer, not the weights", where=file, fix="run `git lfs pull`")
            length = int.from_bytes(prefix, "little")
            if size == 0:
                raise _damaged("the file is empty", file)
            if size >= 8 and length > MAX_HEADER:
                raise _damaged(f"the header is too large: {length} bytes, allowed are {MAX_HEADER}", file)
            if size < 8 + length:
                raise _damaged(f"the file is truncated inside its header: {size} bytes", file)
            return stream.read(length), 8 + length, size
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=file) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        raise ValueError("a key occurs twice")
    return keys


def _tensor_ref(name: str, entry: Any, file: Path, start: int) -> TensorRef:
    if not isinstance(entry, dict):
        raise _damaged(f"tensor {name}: {entry!r} is not an object", file)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(f"tensor {name}: dtype {dtype!r} is not supported", file)
    if not _naturals(shape):
        raise _damaged(f"tensor {name}: shape {shape!r} is not a list of sizes", file)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(f"tensor {name}: data_offsets {offsets!r} is not [begin, end]", file)
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _damaged(f"tensor {name}: {end - begin} bytes do not hold {dtype} {shape}", file)
    return TensorRef(name, file, start + begin, end - begin, dtype, tuple(shape))


def _naturals(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_ranges(refs: list[TensorRef], start: int, size: int, file: Path) -> None:
    """The ranges, in order of offset, must follow each other from the header to the last byte."""
    end = max((ref.offset + ref.nbytes for ref in refs), default=start)
    if end > size:
        raise _damaged(f"the file is truncated: {size} bytes, its header promises {end}", file)
    bounds = [start, *(ref.offset + ref.nbytes for ref in refs)]
    for before, ref in zip(bounds, refs, strict=False):
        if ref.offset != before:
            fault = "overlaps the one before it" if ref.offset < before else "leaves a gap before it"
            raise _damaged(f"tensor {ref.name} {fault}", file)
    if end < size:
        raise _damaged(f"{size - end} bytes after the last tensor", file)
