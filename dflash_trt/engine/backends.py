"""Which compiler builds for which GPU: TensorRT where it is installed, else TensorRT-RTX ahead of time."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from dflash_trt.engine.hardware import TENSORRT, TENSORRT_RTX, Sm, find_sm, listed, local_sm, targets
from dflash_trt.errors import UserError

MODULES = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt_rtx_bindings"}
INSTALL = {TENSORRT: "pip install -r requirements-gpu.txt", TENSORRT_RTX: "pip install -r requirements.txt"}


@dataclass(frozen=True)
class Backend:
    """A compiler at hand; both have the same Python API."""

    name: str
    module: ModuleType

    @property
    def version(self) -> str:
        return self.module.__version__

    @property
    def ahead_of_time(self) -> bool:
        """TensorRT builds for the GPU it runs on; TensorRT-RTX needs none."""
        return self.name == TENSORRT_RTX


def load_backend(name: str) -> Backend | None:
    """The compiler of that name, if it is installed with the libraries it needs."""
    try:
        return Backend(name, importlib.import_module(MODULES[name]))
    except ImportError:
        return None


def choose(backend: str, sm: int | None) -> tuple[Backend, Sm]:
    """The compiler and the SM for `--backend auto|tensorrt|tensorrt-rtx` and `--sm`.

    Without `sm` the GPU of this machine is meant. Raises UserError saying what is missing.
    """
    if backend not in ("auto", *MODULES):
        fix = f"choose one of {', '.join(('auto', *MODULES))}"
        raise UserError(f"there is no backend {backend!r}", where="--backend", fix=fix)
    here = local_sm()
    number = here if sm is None else sm
    if number is None:
        fix = f"pass --sm, one of {listed(*targets(TENSORRT_RTX))} for {TENSORRT_RTX}"
        raise UserError("there is no GPU on this machine to build for", where="--sm", fix=fix)
    wanted = find_sm(number)
    refusals = []
    for name in MODULES if backend == "auto" else [backend]:
        compiler = load_backend(name)
        if name not in wanted.compilers:
            refusals.append(f"{name} builds for SM {listed(*targets(name))} only")
        elif compiler is None:
            refusals.append(f"{name} is not installed ({INSTALL[name]})")
        elif name == TENSORRT and here != wanted.number:
            refusals.append(f"{name} builds for the GPU it runs on, here {f'SM{here}' if here else 'none'}")
        else:
            return compiler, wanted
    what = f"cannot build for SM{wanted.number} ({wanted.family}: {wanted.cards})"
    raise UserError(what, where="; ".join(refusals), fix="install what is missing or choose another --sm")
