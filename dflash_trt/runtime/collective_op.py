"""The collectives of `graph/collective.py` as custom ops of ONNX Runtime, in Python, over `World`.

Of onnxruntime-extensions only its compiled module is loaded. The package around it would import torch and transformers
wherever they are installed, seconds for each rank, and its own hook copies results through lists of Python floats, 20
to 100 times slower than an array.

An exception must not leave such an op: the module ends the process on the spot, without a word about its cause. So a
failed op keeps its error aside, the ops behind it in the same run do nothing, and `faults` raises it afterwards.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dflash_trt.errors import UserError
from dflash_trt.graph.names import GATHER, REDUCE
from dflash_trt.runtime.world import World

_MODULE = "onnxruntime_extensions._extensions_pydll"
_OPS = {1: (REDUCE, World.all_reduce), 2: (GATHER, World.all_gather)}  # by the number the module knows them by

_defined: list[Any] = []  # the module keeps no reference of its own
_world = World()
_fault: BaseException | None = None


def register(options: Any, world: World) -> None:
    """Let sessions made with `options` (onnxruntime.SessionOptions) run the ops over the ranks of `world`."""
    global _world
    module = sys.modules.get(_MODULE) or _load()
    if not _defined:
        _define(module)
    _world = world
    options.register_custom_ops_library(module.__file__)


@contextmanager
def faults() -> Iterator[None]:
    """Raise what went wrong in an op of the run inside, whatever else that made go wrong."""
    global _fault
    try:
        yield
    finally:
        if _fault is not None:
            fault, _fault = _fault, None
            raise fault from None


def _run(number: int, inputs: list[np.ndarray], attributes: dict[str, str]) -> tuple[int, tuple[int, ...], np.ndarray]:
    """What the module calls; it wants the number back, then shape and content of each result."""
    global _fault
    (result,) = inputs
    if _fault is None:
        try:
            result = _OPS[number][1](_world, result, [int(rank) for rank in attributes["group"].split(",")])
        except BaseException as error:
            _fault = error
    return number, result.shape, result.reshape(-1)


def _load() -> ModuleType:
    package, module = _MODULE.split(".")
    found = importlib.util.find_spec(package)
    files = [file for place in (found and found.submodule_search_locations) or () for file in Path(place).glob("*.so")]
    files = [file for file in files if file.name.partition(".")[0] == module]
    try:
        spec = importlib.util.spec_from_file_location(_MODULE, files[0])
        assert spec and spec.loader
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    except (IndexError, ImportError) as error:
        found_out = f", which cannot be loaded: {error}" if files else ""
        raise UserError(
            f"an engine of several ranks needs onnxruntime-extensions on a CPU{found_out}",
            where=files[0] if files else "Python packages",
            fix="pip install 'dflash-trt[ranks]'",
        ) from None
    sys.modules[_MODULE] = loaded
    return loaded


def _define(module: ModuleType) -> None:
    for number, (kind, _) in _OPS.items():
        op = module.PyCustomOpDef()
        op.op_type, op.obj_id = kind, number
        op.input_types = op.output_types = [op.dt_float]
        op.attrs = {"group": op.dt_string}
        module.add_custom_op(op)
        _defined.append(op)
    module.PyCustomOpDef.install_hooker(_run)
