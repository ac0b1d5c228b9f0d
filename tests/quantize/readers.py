"""How other readers match a module's name with the patterns of `exclude_modules` and `ignore`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from dflash_trt.quantize.presets import GROUPS


def tensorrt_llm_leaves(name: str, patterns: Sequence[str]) -> bool:
    """Its `is_module_excluded_from_quantization`: the name, and that of every module above it."""
    parts = name.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    globs = {form for pattern in patterns for form in (pattern, pattern.removesuffix(".*"))}
    return any(fnmatchcase(part, glob) for part in above for glob in globs)


def vllm_leaves(name: str, patterns: Sequence[str]) -> bool:
    """Its `is_layer_excluded`: exact names of the members, which must agree; part of the name; globs."""
    parent, _, last = name.rpartition(".")
    members = {f"{parent}.{member}" in patterns for member in GROUPS.get(last, (last,))}
    assert len(members) == 1, "some but not all shards are quantized"
    return members == {True} or any(pattern in name or fnmatchcase(name, pattern) for pattern in patterns)


READERS = (tensorrt_llm_leaves, vllm_leaves)
