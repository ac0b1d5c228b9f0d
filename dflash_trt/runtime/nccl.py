"""NCCL, by its C interface, as far as TensorRT's collectives need it: one communicator over all ranks.

**Never executed so far**, for the same reason as `trt_session.py`. The library is opened at run time (`libnccl.so.2`),
so machines without it can do everything else.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from dflash_trt.errors import Failure, UserError
from dflash_trt.runtime.world import World

_FILES = ("libnccl.so.2", "libnccl.so")
_CAPSULE = b"ncclComm_t"  # the name TensorRT looks for; Python keeps the pointer, so it must stay


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Communicator:
    """All ranks of `world`, on the current device of each. Must outlive the contexts and graphs that use it.

    Making one waits for all ranks. Raises UserError if NCCL is not installed, Failure with NCCL's words.
    """

    def __init__(self, world: World):
        self._nccl = world.together("loading NCCL", _load)
        unique = _UniqueId()
        if world.rank == 0:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)))
        unique = _UniqueId.from_buffer_copy(world.broadcast("NCCL's id", bytes(unique)))
        self._handle = ctypes.c_void_p()
        self._check(self._nccl.ncclCommInitRank(ctypes.byref(self._handle), world.size, unique, world.rank))

    def join(self, context: Any) -> None:
        """Let a TensorRT execution context use it. All ranks do so in the same order: they wait for each other."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        if context.set_communicator(make(self._handle, _CAPSULE, None)) is False:
            raise Failure("TensorRT refuses the communicator; its message is above")

    def abort(self) -> None:
        """Free a GPU that waits in a collective which will not complete."""
        if self._handle:
            self._nccl.ncclCommAbort(self._handle)
            self._handle = ctypes.c_void_p()

    def _check(self, code: int) -> None:
        if code:
            raise Failure(f"NCCL: {self._nccl.ncclGetErrorString(code).decode()}")


def _load() -> ctypes.CDLL:
    wheels = [str(Path(place, "nvidia", "nccl", "lib", _FILES[0])) for place in sys.path]  # of nvidia-nccl-cu13
    for name in (*_FILES, *wheels):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclGetErrorString.argtypes = (ctypes.c_int,)
        library.ncclGetUniqueId.argtypes = (ctypes.POINTER(_UniqueId),)
        library.ncclCommInitRank.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _UniqueId, ctypes.c_int)
        library.ncclCommAbort.argtypes = (ctypes.c_void_p,)
        return library
    raise UserError(
        "several ranks on GPUs need NCCL, which is not installed",
        where=" or ".join(_FILES),
        fix="pip install nvidia-nccl-cu13",
    )
