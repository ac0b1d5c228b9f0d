"""The step graph on an NVIDIA GPU: a compiled TensorRT engine with the KV caches updated in place.

**Never executed so far**: it was written on machines without a GPU, against the documented interfaces of TensorRT 11
and cuda-python 13. Expect to debug it.

The caches stay on the device; a step copies one block of small arrays in and one out, both through pinned memory. The
input and the output of each cache are the same address, as TensorRT's KV-cache-update layer demands, and a range of
slots is a pointer into the cache.

A decode step of a given shape is captured as one CUDA graph, copies included, and replayed. A captured graph keeps
using the execution context it was captured from, so each gets a context of its own; the contexts share their working
memory, for only one runs at a time. Calls with prefill chunks have too many shapes for that and are enqueued.

With several ranks every context joins one NCCL communicator, and each rank is a process with a GPU of its own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from cuda.bindings import runtime as cudart

from dflash_trt.engine import Limits
from dflash_trt.errors import Failure
from dflash_trt.runtime.nccl import Communicator
from dflash_trt.runtime.session import OVERFLOW, StepInputs, StepOutputs, check_overflow
from dflash_trt.runtime.world import World

_DECODE, _PREFILL = 0, 1  # optimization profiles; see engine/network.py
_ALIGNMENT = 256  # bytes; what TensorRT asks of device addresses

_Layout = Mapping[str, tuple[tuple[int, ...], type]]  # tensor → shape, dtype


@dataclass(frozen=True)
class _Cache:
    """One KV cache [max_batch, Hkv, S, D] on the device."""

    address: int
    heads: int
    length: int  # S
    position_bytes: int  # of one position of one head

    @property
    def slot_bytes(self) -> int:
        return self.heads * self.length * self.position_bytes


@dataclass
class _Call:
    """A context prepared for one range of slots and one shape, and the host's views of its small arrays."""

    context: Any
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    sizes: tuple[int, int] = (0, 0)  # bytes to copy in and out
    graph: Any = None


class TensorRTSession:
    """Runs one engine on a device of its own. What it allocates there stays until the process ends.

    `trt` is the module that built `plan`: `tensorrt`, or `tensorrt_rtx_bindings`, whose engines specialise kernels at
    run time and therefore are not captured. Raises Failure with the driver's or TensorRT's words.
    """

    def __init__(self, plan: Path, limits: Limits, trt: ModuleType, world: World = World()):
        self.limits = limits
        # Where the launcher shows each rank one GPU only, that is number 0.
        _cuda(cudart.cudaSetDevice(world.local_rank % _cuda(cudart.cudaGetDeviceCount())))
        self._communicator = Communicator(world) if world.size > 1 else None
        self._trt = trt
        self._capture = trt.__name__ == "tensorrt"
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        if self._engine is None:
            raise Failure(f"{trt.__name__} {trt.__version__} cannot load the engine — {plan} — build it again here")
        self._stream = _cuda(cudart.cudaStreamCreate())
        self._workspace = _cuda(cudart.cudaMalloc(max(self._engine.device_memory_size_v2, _ALIGNMENT)))
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self._caches = {name: self._allocate(name) for name in names if "_cache." in name}
        self._overflows = [name for name in names if name == OVERFLOW]  # of plugin engines
        widest = max(limits.max_query, limits.block_size)
        self._in = _Block(_offsets(self._inputs(limits.max_batch, widest))[1])
        self._out = _Block(_offsets(self._outputs(limits.max_batch))[1])
        self._decode: dict[tuple[int, int], _Call] = {}  # by first slot and number of slots
        self._prefill = _Call(self._context(_PREFILL))

    def step(self, inputs: StepInputs) -> StepOutputs:
        try:
            return self._step(inputs)
        except BaseException:
            if self._communicator:
                self._communicator.abort()
            raise

    def _step(self, inputs: StepInputs) -> StepOutputs:
        batch, query = inputs.input_ids.shape
        call = self._prefill
        if query == self.limits.block_size:
            key = (inputs.first, batch)
            if key not in self._decode:
                self._decode[key] = self._prepare(_Call(self._context(_DECODE)), inputs.first, batch, query)
            call = self._decode[key]
        else:
            self._prepare(call, inputs.first, batch, query)
        for name, view in call.inputs.items():
            view[...] = getattr(inputs, name)
        self._launch(call)
        _cuda(cudart.cudaStreamSynchronize(self._stream))
        results = {name: view.copy() for name, view in call.outputs.items()}
        for name in self._overflows:
            check_overflow(int(results.pop(name)[0]), inputs)
        return StepOutputs(**results)

    def move_slot(self, source: int, target: int, length: int) -> None:
        for cache in self._caches.values():
            pitch, width = cache.length * cache.position_bytes, (1 + length) * cache.position_bytes
            old, new = (cache.address + slot * cache.slot_bytes for slot in (source, target))
            kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            _cuda(cudart.cudaMemcpy2DAsync(new, pitch, old, pitch, width, cache.heads, kind, self._stream))

    def free_slot(self, slot: int) -> None:
        """Nothing to do: the caches have a fixed size."""

    def _launch(self, call: _Call) -> None:
        if call.graph is not None:
            _cuda(cudart.cudaGraphLaunch(call.graph, self._stream))
            return
        self._enqueue(call)
        if call is self._prefill or not self._capture:
            return
        # The run above was the one that TensorRT asks for before a capture; from the next call on the graph serves.
        _cuda(cudart.cudaStreamSynchronize(self._stream))
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _cuda(cudart.cudaStreamBeginCapture(self._stream, mode))
        self._enqueue(call)
        call.graph = _cuda(cudart.cudaGraphInstantiate(_cuda(cudart.cudaStreamEndCapture(self._stream)), 0))

    def _enqueue(self, call: _Call) -> None:
        to_device, to_host = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice, cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        received, sent = call.sizes
        _cuda(cudart.cudaMemcpyAsync(self._in.device, self._in.address, received, to_device, self._stream))
        if not call.context.execute_async_v3(int(self._stream)):
            raise Failure("TensorRT could not enqueue the step; its message is above")
        _cuda(cudart.cudaMemcpyAsync(self._out.address, self._out.device, sent, to_host, self._stream))

    def _context(self, profile: int) -> Any:
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        context.set_optimization_profile_async(profile, int(self._stream))
        context.set_device_memory(self._workspace, self._engine.device_memory_size_v2)
        if self._communicator:
            self._communicator.join(context)
        _cuda(cudart.cudaStreamSynchronize(self._stream))
        return context

    def _prepare(self, call: _Call, first: int, batch: int, query: int) -> _Call:
        """Point the call's context at slots `first …` and at the small arrays of a step of that shape."""
        context = call.context
        sizes: list[int] = []
        for block, layout, views in (
            (self._in, self._inputs(batch, query), call.inputs),
            (self._out, self._outputs(batch), call.outputs),
        ):
            offsets, size = _offsets(layout)
            sizes.append(size)
            for name, (shape, dtype) in layout.items():
                views[name] = block.view(offsets[name], shape, dtype)
                context.set_tensor_address(name, block.device + offsets[name])
        call.sizes = (sizes[0], sizes[1])
        for name, (shape, _) in self._inputs(batch, query).items():
            context.set_input_shape(name, shape)
        for name, cache in self._caches.items():
            address = cache.address + first * cache.slot_bytes
            context.set_input_shape(name, (batch, *self._engine.get_tensor_shape(name)[1:]))
            context.set_tensor_address(name, address)
            context.set_tensor_address(name.replace("_cache.", "_present."), address)
        return call

    def _allocate(self, name: str) -> _Cache:
        _, heads, length, dim = self._engine.get_tensor_shape(name)
        position_bytes = dim * self._engine.get_tensor_bytes_per_component(name)
        size = self.limits.max_batch * heads * length * position_bytes
        address = _cuda(cudart.cudaMalloc(size))
        _cuda(cudart.cudaMemsetAsync(address, 0, size, self._stream))  # stale NaN would survive a masked attention
        return _Cache(address, heads, length, position_bytes)

    def _inputs(self, batch: int, query: int) -> _Layout:
        return {
            "input_ids": ((batch, query), np.int64),
            "n_valid": ((batch,), np.int64),
            "n_given": ((batch,), np.int64),
            "past_len": ((batch,), np.int64),
            "temperature": ((batch,), np.float32),
            "top_p": ((batch,), np.float32),
            "top_k": ((batch,), np.int64),
            "uniform": ((batch, self.limits.block_size), np.float32),
        }

    def _outputs(self, batch: int) -> _Layout:
        return {
            "n_accepted": ((batch,), np.int64),
            "next_token": ((batch,), np.int64),
            "next_block": ((batch, self.limits.block_size), np.int64),
            **dict.fromkeys(self._overflows, ((1,), np.int64)),
        }


class _Block:
    """`size` bytes of pinned host memory and as many on the device."""

    def __init__(self, size: int):
        self.address = _cuda(cudart.cudaMallocHost(size))
        self.device = _cuda(cudart.cudaMalloc(size))
        self._bytes = memoryview((ctypes.c_byte * size).from_address(self.address))

    def view(self, offset: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        return np.ndarray(shape, dtype, buffer=self._bytes, offset=offset)


def _offsets(layout: _Layout) -> tuple[dict[str, int], int]:
    """Where in a block each tensor lies, and how long the block is."""
    offsets, size = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def _cuda(answer: tuple[Any, ...]) -> Any:
    """The value of a call of the CUDA runtime, which returns (error, value …)."""
    error, *values = answer
    if error != cudart.cudaError_t.cudaSuccess:
        raise Failure(f"CUDA: {cudart.cudaGetErrorString(error)[1].decode()}")
    return values[0] if values else None
