"""The step graph of a DFlash pair, built with onnx-ir at opset 24.

What builds graphs is imported when it is first asked for: running one needs none of it, and onnx-ir takes a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dflash_trt.graph.mapping import SINGLE, Mapping, Rank

if TYPE_CHECKING:
    from dflash_trt.graph.shard import check_mapping, place
    from dflash_trt.graph.step import build_step
    from dflash_trt.graph.write import write_graphs, write_step

__all__ = ["SINGLE", "Mapping", "Rank", "build_step", "check_mapping", "place", "write_graphs", "write_step"]

_MODULES = {
    "build_step": "step",
    "check_mapping": "shard",
    "place": "shard",
    "write_graphs": "write",
    "write_step": "write",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
