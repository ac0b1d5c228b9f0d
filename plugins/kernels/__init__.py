"""Triton kernels, one file an op. `spec` is what describes them; the op files import Triton, this does not."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

from dflash_trt.errors import UserError
from dflash_trt.plugins.kernels.spec import Argument, Config, Kernel, check

OPS = ("kv_inject", "block_attention", "accept", "draft_head")  # the files here

__all__ = ["OPS", "Argument", "Config", "Kernel", "check", "load", "shipped"]


def load(file: str, config: Config) -> list[Kernel]:
    """The kernels of one file for one model. Raises UserError for what is not supported. Imports Triton."""
    check(config)
    return _module(file).kernels(config)


def shipped(files: Sequence[str] = OPS) -> dict[Kernel, list[str]]:
    """All kernels of the shipped models, each with the names of the models that share it."""
    found: dict[str, tuple[Kernel, list[str]]] = {}
    for file in files:
        for config in _module(file).CONFIGS:
            for kernel in load(file, config):
                _, models = found.setdefault(kernel.identity, (kernel, []))
                if config.name not in models:
                    models.append(config.name)
    ops = list(dict.fromkeys(kernel.op for kernel, _ in found.values()))
    return dict(sorted(found.values(), key=lambda item: ops.index(item[0].op)))


def _module(file: str) -> ModuleType:
    try:
        return importlib.import_module(f"{__name__}.{file}")
    except ModuleNotFoundError as error:
        if error.name not in ("triton", "torch"):
            raise
        fix = "pip install 'dflash-trt[plugins]', or convert with --ops native"
        raise UserError(f"kernels need {error.name}, which is not installed", where="plugins", fix=fix) from None
