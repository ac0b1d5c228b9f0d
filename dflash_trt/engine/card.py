"""What an engine directory holds, as data that `inspect` shows or prints as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_trt.engine.load import Engine, find_faults
from dflash_trt.engine.manifest import Manifest, Nvfp4, read_manifest
from dflash_trt.errors import UserError


def describe_engine(path: Path, memory: bool = False) -> dict[str, Any]:
    """A JSON-able card. `problems` names every file that is missing or not what it was when the directory was made.

    `memory`: with what each rank takes of a GPU.
    """
    card: dict[str, Any] = {"kind": "engine directory", "path": str(path)}
    try:
        manifest = read_manifest(path)
    except UserError as error:
        return card | {"problems": [str(error)]}
    faults = find_faults(path, manifest.given | manifest.compiled)
    card |= _describe(manifest) | {"problems": [str(fault) for fault in faults]}
    if memory and not card["problems"]:
        from dflash_trt.engine.memory import measure  # reads graphs, for which onnx-ir takes a second to import

        card["memory"] = [asdict(rank) for rank in measure(Engine(path, manifest))]
    return card


def _describe(manifest: Manifest) -> dict[str, Any]:
    limits = manifest.limits
    position = sum(manifest.cache_per_token.values()) * manifest.mapping.world
    return {
        "target": manifest.target.name,
        "drafter": manifest.draft.name if manifest.draft else None,
        "format": manifest.format,
        "created": manifest.created,
        "dtype": manifest.dtype,
        "nvfp4": {
            role: _nvfp4(model.nvfp4)
            for role, model in (("target", manifest.target), ("drafter", manifest.draft))
            if model
        },
        "mapping": asdict(manifest.mapping),
        "limits": asdict(limits),
        "eos_ids": list(manifest.eos_ids),
        "weights": [weights.path for weights in manifest.weights.values()],
        "weight_bytes": sum(weights.size for weights in manifest.weights.values()),
        "written_bytes": manifest.written,
        "cache_bytes": {"per_slot": position * limits.cache_len, "all": position * limits.cache_len * limits.max_batch},
        "engines": [
            {key: getattr(engine, key) for key in ("file", "sm", "compiler", "version", "precision", "size")}
            for engine in manifest.engines
        ],
    }


def _nvfp4(nvfp4: Nvfp4 | None) -> dict[str, Any] | None:
    return asdict(nvfp4) | {"of_bf16": round(nvfp4.nbytes / nvfp4.nbytes_bf16, 4)} if nvfp4 else None
