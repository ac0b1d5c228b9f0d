"""`manifest.json`: everything a reader of an engine directory needs to know, as frozen records."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.config import read_json
from dflash_trt.engine.strict import Mismatch, decode
from dflash_trt.errors import UserError
from dflash_trt.graph.mapping import Mapping
from dflash_trt.graph.names import graph_file

NAME = "manifest.json"
MAJOR, MINOR = 1, 2  # a reader takes any minor version of its own major version

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a value

CONVERT_AGAIN = "make the directory anew with `dflash-trt convert`"


@dataclass(frozen=True)
class File:
    """What a file must still be: its size in bytes and its fingerprint (see `fingerprint.py`)."""

    size: int
    fingerprint: str


@dataclass(frozen=True)
class WeightFile(File):
    """A checkpoint file that the graphs refer to through a link."""

    path: str  # absolute


@dataclass(frozen=True)
class Nvfp4:
    """Weights of a model that are NVFP4 in its checkpoint and in the engine."""

    algo: str  # as ModelOpt spells it
    weights: int
    activations: int  # for how many of them the activations are NVFP4 too (W4A4)
    nbytes: int  # codes and scales
    nbytes_bf16: int  # what the same weights would take in bfloat16


@dataclass(frozen=True)
class Model:
    """One half of the pair, and the shape of its KV caches: `layers` x 2 x [max_batch, kv_heads, S, head_dim]."""

    name: str
    path: str
    layers: int
    kv_heads: int
    head_dim: int
    heads: int = 0  # query heads; 0: not known, in directories of format 1.1
    nvfp4: Nvfp4 | None = None
    mxfp4: int = 0  # tensors of experts that are MXFP4 in the checkpoint and in the engine

    @property
    def packed(self) -> int:
        """Weights of 4 bits."""
        return self.mxfp4 + (self.nvfp4.weights if self.nvfp4 else 0)


@dataclass(frozen=True)
class Limits:
    """What an engine was built for."""

    max_batch: int  # slots
    max_seq_len: int  # tokens of prompt + answer a slot can hold
    block_size: int  # K: tokens a decode row verifies at most; 1 in an autoregressive engine
    max_query: int  # columns of one call: the longest prefill chunk

    @property
    def cache_len(self) -> int:
        """S: a step writes its Q columns and the next block behind at most max_seq_len committed tokens.

        Attention sinks, where a model has them, take position 0. A multiple of 8, as rows of masks should be.
        """
        needed = 1 + self.max_seq_len + max(self.max_query, self.block_size) + self.block_size
        return -(-needed // 8) * 8


@dataclass(frozen=True)
class CompiledEngine(File):
    """One graph compiled for one SM."""

    graph: str  # the name of its .onnx file without the suffix
    file: str
    sm: int
    compiler: str
    version: str  # of the compiler; an engine runs only under the same one
    precision: str
    seconds: float
    layers: dict[str, int]  # network layers by TensorRT type


@dataclass(frozen=True)
class Manifest:
    """The whole of `manifest.json`."""

    format: str
    created: str  # ISO 8601, UTC
    target: Model
    draft: Model | None
    dtype: str  # of the graphs that TensorRT compiles; those for a CPU are float32
    quantization: str | None  # "nvfp4" if any weight is; `Model.nvfp4` says which
    mapping: Mapping
    limits: Limits
    vocab: int
    eos_ids: tuple[int, ...]
    files: dict[str, File]  # graphs and tokenizer files in the directory
    weights: dict[str, WeightFile]  # links in the directory → checkpoint files
    engines: tuple[CompiledEngine, ...]
    tools: dict[str, str]  # name → version of what wrote the directory
    ops: str = "native"  # or "plugin": who computes attention, caches and acceptance under TensorRT
    moe: str = "native"  # or "layer": which of TensorRT's layers compute experts

    @property
    def pair(self) -> str:
        return f"{self.target.name} + {self.draft.name if self.draft else 'no drafter'}"

    @property
    def models(self) -> tuple[Model, ...]:
        """The target and, if there is one, the drafter."""
        return (self.target, self.draft) if self.draft else (self.target,)

    @property
    def rounds_activations(self) -> bool:
        """Is the target W4A4? Then a text may change with the order of float32 sums (docs/nvfp4.md)."""
        return bool(self.target.nvfp4 and self.target.nvfp4.activations)

    @property
    def cache_per_token(self) -> dict[str, int]:
        """Bytes of one position in one rank's caches, by model. Where ranks are more than heads, each holds one."""
        values = (2 * m.layers * max(1, m.kv_heads // self.mapping.tp) * m.head_dim for m in self.models)
        return {role: count * WIDTHS[self.dtype] for role, count in zip(("target", "drafter"), values, strict=False)}

    @property
    def written(self) -> dict[str, int]:
        """Bytes of weights that had to be written, by file: what ranks cannot refer to in the checkpoints."""
        return {name: file.size for name, file in self.files.items() if name.endswith(".safetensors")}

    @property
    def given(self) -> dict[str, File]:
        """Every file in the directory that `convert` put there."""
        return {**self.weights, **self.files}

    @property
    def compiled(self) -> dict[str, File]:
        """Every file in the directory that `build` put there."""
        return {engine.file: engine for engine in self.engines}

    def as_json(self) -> dict[str, Any]:
        """The content of the file."""
        return dataclasses.asdict(self)

    def write(self, directory: Path) -> None:
        """Put the manifest in place at once: a reader sees the old one or the new one."""
        partial = directory / f".{NAME}.{os.getpid()}"
        try:
            with partial.open("w", encoding="utf-8") as file:
                json.dump(self.as_json(), file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(directory / NAME)
        finally:
            partial.unlink(missing_ok=True)


def read_manifest(directory: Path) -> Manifest:
    """Read `directory/manifest.json`. Raises UserError naming file, key and value if it is not one of ours."""
    file = directory / NAME
    if not directory.exists():
        raise UserError("no such directory", where=directory, fix="give one made by `dflash-trt convert`")
    if not file.is_file():
        raise UserError("not an engine directory: it has no manifest.json", where=directory, fix=CONVERT_AGAIN)
    values = read_json(file)
    found = values.get("format")
    if not isinstance(found, str) or found.partition(".")[0] != str(MAJOR):
        fix = f"use the dflash-trt that wrote it, or {CONVERT_AGAIN}"
        raise UserError(f"format is {found!r}; this version reads {MAJOR}.x", where=file, fix=fix)
    try:
        manifest = decode(Manifest, values)
        _check(manifest)
    except Mismatch as error:
        raise UserError(str(error), where=file, fix=CONVERT_AGAIN) from None
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise Mismatch for numbers that are none of a rank or limit, and for graphs that `files` does not name."""
    for section in ("limits", "mapping"):
        for key, value in dataclasses.asdict(getattr(manifest, section)).items():
            if value < 1:
                raise Mismatch(f"{section}.{key}", f"is {value}, not 1 or more")
    for rank in range(manifest.mapping.world):
        for draft, cpu in itertools.product((True, False) if manifest.draft else (False,), (True, False)):
            if (name := graph_file(rank, draft=draft, cpu=cpu)) not in manifest.files:
                raise Mismatch("files", f"does not name {name}")
