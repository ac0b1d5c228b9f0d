"""What an engine directory holds, as data that `inspect` shows or prints as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.engine.load import open_engine
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.errors import UserError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def describe_engine(path: Path) -> dict[str, Any]:
    """A JSON-able card. `problems` says why the directory cannot be used, files that changed since included."""
    card: dict[str, Any] = {"kind": "engine directory", "path": str(path), "problems": []}
    try:
        card |= _describe(read_manifest(path))
        open_engine(path)
    except UserError as error:
        card["problems"] = [str(error)]
    return card


def _describe(manifest: Manifest) -> dict[str, Any]:
    models = [model for model in (manifest.target, manifest.draft) if model]
    position = sum(2 * m.layers * m.kv_heads * m.head_dim for m in models) * DTYPE_BYTES[manifest.dtype]
    return {
        "target": manifest.target.name,
        "drafter": manifest.draft.name if manifest.draft else None,
        "format": manifest.format,
        "dtype": manifest.dtype,
        "quantization": manifest.quantization,
        "mapping": asdict(manifest.mapping),
        "limits": asdict(manifest.limits),
        "eos_ids": list(manifest.eos_ids),
        "weight_bytes": sum(file.size for file in manifest.weights.values()),
        "cache_bytes_per_slot": position * manifest.limits.cache_len,
        "engines": [
            {
                "file": engine.file,
                "compiler": f"{engine.compiler} {engine.version}",
                "precision": engine.precision,
                "size": engine.size,
            }
            for engine in manifest.engines
        ],
    }
